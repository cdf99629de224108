"""A table of a TOML or YAML file whose values are checked as they are read, and which knows what nobody read.

Invariant: a value of the wrong kind is a Fault that names its dotted key; nothing is converted silently.
Called by envs/task_toml.py, envs/registry.py and recipes/harbor_config.py.
"""

from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any, cast


class Fault(Exception):
    """What is wrong in a file, before its path is known: one line with the key and the remedy."""


class Table:
    """The values of one table; `path` is its dotted name, "" for the root."""

    def __init__(self, path: str, values: Mapping[str, Any]) -> None:
        self.path = path
        self.values = values
        self._read: set[str] = set()
        self._children: list[Table] = []

    def unread(self) -> list[str]:
        """Dotted keys that nobody asked for, here and in the tables below, in the order of the file."""
        own = [self.key(name) for name in self.values if name not in self._read]
        return own + [name for child in self._children for name in child.unread()]

    def has(self, name: str) -> bool:
        """Whether the key is there; asking does not count as reading it."""
        return self.values.get(name) is not None

    def raw(self, name: str) -> Any:
        """The value as it stands; None when it is missing."""
        self._read.add(name)
        return self.values.get(name)

    def table(self, name: str) -> "Table":
        """The table of that name, empty when it is missing."""
        return self.optional_table(name) or Table(self.key(name), {})

    def optional_table(self, name: str) -> "Table | None":
        """The table of that name; None when it is missing."""
        value = self.raw(name)
        return None if value is None else self._child(self.key(name), value)

    def tables(self, name: str) -> "list[Table]":
        """The tables of an array; empty when it is missing."""
        return [self._child(f"{self.key(name)}[{index}]", value) for index, value in enumerate(self._list(name))]

    def text(self, name: str) -> str | None:
        """A string."""
        value = self.raw(name)
        if value is not None and not isinstance(value, str):
            raise Fault(f"{self.key(name)} must be a string, got {value!r}")
        return value

    def required_text(self, name: str) -> str:
        """A string that must be there and hold more than blanks."""
        value = self.text(name)
        if value is None or not value.strip():
            raise Fault(f"{self.key(name)} is missing; set it")
        return value

    def choice(self, name: str, choices: Sequence[str]) -> str | None:
        """One of `choices`."""
        value = self.text(name)
        if value is not None and value not in choices:
            raise Fault(f"{self.key(name)} must be one of {', '.join(choices)}, got {value!r}")
        return value

    def flag(self, name: str) -> bool | None:
        """A truth value."""
        value = self.raw(name)
        if value is not None and not isinstance(value, bool):
            raise Fault(f"{self.key(name)} must be true or false, got {value!r}")
        return value

    def number(self, name: str, *, at_least_zero: bool = False) -> float | None:
        """A finite number above 0, or from 0 on."""
        value = self.raw(name)
        if value is None:
            return None
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)
        if not is_number or value < 0 or (value == 0 and not at_least_zero):
            raise Fault(f"{self.key(name)} must be a number {'from' if at_least_zero else 'above'} 0, got {value!r}")
        return float(value)

    def count(self, name: str, *, at_least: int = 0) -> int | None:
        """A whole number."""
        value = self.raw(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < at_least):
            raise Fault(f"{self.key(name)} must be a whole number from {at_least}, got {value!r}")
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        """An array of strings; empty when it is missing."""
        values = self._list(name)
        for value in values:
            if not isinstance(value, str):
                raise Fault(f"{self.key(name)} must hold strings only, got {value!r}")
        return tuple(values)

    def strings(self, name: str) -> dict[str, str]:
        """A table of strings; empty when it is missing."""
        table = self.table(name)
        for key, value in table.values.items():
            table._read.add(key)
            if not isinstance(value, str):
                raise Fault(f"{table.key(key)} must be a string, got {value!r}; quote it")
        return dict(table.values)

    def list_of(self, name: str) -> list[Any]:
        """An array of anything; empty when it is missing."""
        return self._list(name)

    def key(self, name: str) -> str:
        """The dotted name of a key of this table."""
        return f"{self.path}.{name}" if self.path else name

    def _list(self, name: str) -> list[Any]:
        value = self.raw(name)
        if value is not None and not isinstance(value, list):
            raise Fault(f"{self.key(name)} must be an array, got {value!r}")
        return cast(list[Any], value or [])

    def _child(self, path: str, value: object) -> "Table":
        if not isinstance(value, dict):
            raise Fault(f"{path} must be a table, got {value!r}")
        child = Table(path, cast(dict[str, Any], value))
        self._children.append(child)
        return child
