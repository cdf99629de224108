"""What every protocol of the gateway reads alike: fields of a request, checked, and the errors it may be refused with.

Invariant: a request is wholly understood or refused; a field that would be ignored is one whose value changes nothing.
Called by envs/gateway/chat.py, completions.py, responses.py and messages.py; errors are spelled by envs/gateway/app.py.
"""

import json
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from envs.gateway.dialogue import Said, Tool, spell_json

Json = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One server-sent event."""

    data: Json | str
    name: str = ""

    def encode(self) -> bytes:
        """As it goes over the wire."""
        data = self.data if isinstance(self.data, str) else json.dumps(self.data, ensure_ascii=False)
        return (f"event: {self.name}\n" if self.name else "").encode() + f"data: {data}\n\n".encode(errors="replace")


class Refused(Exception):
    """A request that is refused; each protocol spells it in its own form."""

    def __init__(self, status: int, message: str, *, code: str = "invalid_request", param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.retry_after_s = 1 if status in (429, 503) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Fields:
    """A request's body, read field by field; `finish` refuses what nobody read."""

    body: Json
    read: set[str] = field(default_factory=set[str])

    def get(self, name: str) -> Any:
        """The field's value; None when it is absent or null."""
        self.read.add(name)
        return self.body.get(name)

    def text(self, name: str) -> str:
        """A string that must be there."""
        value = self.get(name)
        if not isinstance(value, str):
            raise Refused(400, f"{name} must be a string, got {_kind(value)}", param=name)
        return value

    def flag(self, name: str) -> bool:
        """A boolean; False when absent."""
        value = self.get(name)
        if value is not None and not isinstance(value, bool):
            raise Refused(400, f"{name} must be true or false, got {_kind(value)}", param=name)
        return bool(value)

    def number(self, name: str, low: float, high: float) -> float | None:
        """A number within bounds."""
        value = self.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise Refused(400, f"{name} must be a number from {low:g} to {high:g}, got {value!r}", param=name)
        return value

    def count(self, name: str, low: int = 0) -> int | None:
        """A whole number, `low` or more."""
        value = self.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            raise Refused(400, f"{name} must be a whole number >= {low}, got {value!r}", param=name)
        return value

    def mapping(self, name: str) -> Json:
        """An object; empty when absent."""
        value = self.get(name)
        if value is not None and not isinstance(value, dict):
            raise Refused(400, f"{name} must be an object, got {_kind(value)}", param=name)
        return cast(Json, value or {})

    def items(self, name: str) -> list[Json]:
        """A list of objects; empty when absent."""
        return read_objects(self.get(name), name)

    def neutral(self, name: str, *values: object) -> None:
        """A field that is understood only where it asks for nothing: absent, null or one of `values`."""
        value = self.get(name)
        if value is not None and value not in values:
            raise Refused(400, f"{name}={value!r} is not supported here; leave it out", code="unsupported", param=name)

    def ignore(self, *names: str) -> None:
        """Fields that say something about the caller, not about the reply."""
        self.read.update(names)

    def finish(self) -> None:
        """Refuses every field that nobody has read."""
        unknown = sorted(name for name, value in self.body.items() if name not in self.read and value is not None)
        if unknown:
            raise Refused(400, f"unknown field {unknown[0]}; leave it out", code="unknown_parameter", param=unknown[0])


def make_id(prefix: str) -> str:
    """A new identifier in the manner of the protocol."""
    return f"{prefix}{uuid.uuid4().hex[:24]}"


def now() -> int:
    """Seconds since 1970, as the protocols stamp objects."""
    return int(time.time())


def read_objects(value: object, where: str) -> list[Json]:
    """A list of objects; empty for null."""
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in cast(list[object], value)):
        raise Refused(400, f"{where} must be a list of objects", param=where)
    return cast(list[Json], value)


def read_text(content: object, where: str, kinds: Sequence[str] = ("text",)) -> str:
    """The words of a message: a string, null, or parts of the given text kinds."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise Refused(400, f"{where} must be a string or a list of parts", param=where)
    texts: list[str] = []
    for part in cast(list[object], content):
        words = cast(Json, part).get("text") if isinstance(part, dict) else part
        kind = cast(Json, part).get("type", "text") if isinstance(part, dict) else "text"
        if kind not in kinds or not isinstance(words, str):
            raise Refused(400, f"{where} holds a part of type {kind!r}; only text is read here", param=where)
        texts.append(words)
    return "".join(texts)


def read_tool(name: object, description: object, parameters: object) -> Tool:
    """A tool of a request."""
    if not isinstance(name, str) or not name:
        raise Refused(400, "a tool needs a name", param="tools")
    if parameters is not None and not isinstance(parameters, Mapping):
        raise Refused(400, f"the parameters of tool {name} must be a JSON schema", param="tools")
    schema: Json = cast(Json, parameters) or {"type": "object", "properties": {}}
    return Tool(name=name, description=str(description or ""), parameters=spell_json(schema))


def check_dialogue(said: Sequence[Said]) -> None:
    """Refuses a dialogue that a policy cannot answer."""
    if not said:
        raise Refused(400, "there are no messages", param="messages")
    if said[-1].role in ("assistant", "system"):
        raise Refused(400, f"the last message must be of the user or a tool, not of the {said[-1].role}")


def pieces(text: str, size: int = 64) -> Iterator[str]:
    """The text in the pieces that a stream sends; whole replies are sampled before the first one goes out."""
    for start in range(0, len(text), size):
        yield text[start : start + size]


def _kind(value: object) -> str:
    return "nothing" if value is None else type(value).__name__
