"""Conversations from elsewhere: rows of JSONL or Parquet as messages of known roles.

Invariant: a row is read whole or refused by file and row; nothing is guessed, nothing is left out in silence.
Called by recipes/demonstrations.py; the other direction is trajectories/export.py.

Read are the columns `messages` or `conversations`, each a list of {"role", "content"} (OpenAI, OpenThoughts' trace
rows) or of {"from", "value"} (ShareGPT); a column `system`, put before them; and as reward a column `reward` or
OpenThoughts' `result`.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

ROLES: Mapping[str, str] = {
    "system": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "tool": "tool",
    "observation": "tool",
}
"""Names of roles in files -> ours."""
COLUMNS = ("messages", "conversations")
UNREAD = ("tool_calls", "function_call", "reasoning_content", "reasoning")
"""Fields of a message that say more than its content; a row that has one is refused."""
SUFFIXES = (".jsonl", ".parquet")
PARQUET_ROWS = 256
"""Rows decoded at once."""


class BadConversation(ValueError):
    """A row is no conversation; the message names file, row and what is wrong with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """One row."""

    messages: tuple[Mapping[str, str], ...]
    """{"role": "system" | "user" | "assistant" | "tool", "content": text} in order, at least one."""
    reward: float | None
    """None when the row has none, or NaN; 0.0 where its result is the name of an exception."""
    source: str
    """File and row, for messages about it: "traces.jsonl row 12", counted from 1."""

    @property
    def num_turns(self) -> int:
        """Replies of the assistant."""
        return sum(message["role"] == "assistant" for message in self.messages)


def read_conversations(path: Path) -> Iterator[Conversation]:
    """Every row of a .jsonl or .parquet file, or of all such files in a directory in the order of their names.

    BadConversation at the first row that is none; ValueError when there is nothing to read.
    """
    files = sorted(file for file in path.iterdir() if file.suffix in SUFFIXES) if path.is_dir() else [path]
    if not files or not all(file.suffix in SUFFIXES and file.is_file() for file in files):
        raise ValueError(
            f"{path}: no conversations here; give a run directory, a .jsonl or .parquet file, or a folder of such files"
        )
    for file in files:
        rows = _json_rows(file) if file.suffix == ".jsonl" else _parquet_rows(file)
        for number, row in enumerate(rows, start=1):
            yield _conversation(row, f"{file} row {number}")


def _json_rows(file: Path) -> Iterator[object]:
    with open(file, encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                yield json.loads(line)
            except json.JSONDecodeError as error:
                raise BadConversation(f"{file} row {number}: no JSON: {error}") from None


def _parquet_rows(file: Path) -> Iterator[object]:
    import pyarrow.parquet  # pyright: ignore[reportMissingTypeStubs]  # 0.1 s that JSONL need not pay

    parquet: Any = pyarrow.parquet
    for batch in parquet.ParquetFile(file).iter_batches(batch_size=PARQUET_ROWS):
        yield from cast(Iterable[object], batch.to_pylist())


def _conversation(row: object, source: str) -> Conversation:
    if not isinstance(row, dict):
        raise BadConversation(f"{source}: a row must be an object with a column {' or '.join(COLUMNS)}")
    columns = cast(dict[str, object], row)
    said = next((columns[name] for name in COLUMNS if columns.get(name) is not None), None)
    if not isinstance(said, list) or not said:
        raise BadConversation(f"{source}: no list of messages in a column {' or '.join(COLUMNS)}")
    if columns.get("tools"):
        raise BadConversation(f"{source}: a column tools, which no message shows; write it into the system message")
    messages = [_message(message, source) for message in cast(Sequence[object], said)]
    if system := columns.get("system"):
        messages.insert(0, _message({"role": "system", "content": system}, source))
    return Conversation(messages=tuple(messages), reward=_reward(columns, source), source=source)


def _message(message: object, source: str) -> Mapping[str, str]:
    if not isinstance(message, dict):
        raise BadConversation(f"{source}: a message must be an object, got {message!r}")
    fields = cast(dict[str, object], message)
    if unread := [name for name in UNREAD if fields.get(name)]:
        raise BadConversation(
            f"{source}: a message has {unread[0]} beside its content, which would not be trained; write it into the "
            "content as the policy is to say it"
        )
    role, content = fields.get("role", fields.get("from")), fields.get("content", fields.get("value"))
    if not isinstance(role, str) or role not in ROLES:
        raise BadConversation(f"{source}: role must be one of {', '.join(ROLES)}, got {role!r}")
    if not isinstance(content, str):
        raise BadConversation(f"{source}: the content of a message must be text, got {type(content).__name__}")
    return {"role": ROLES[role], "content": content}


def _reward(columns: Mapping[str, object], source: str) -> float | None:
    """The number in `reward` or `result`; another text in `result` is the exception that ended the rollout."""
    if (reward := columns.get("reward")) is not None:
        if not isinstance(reward, int | float):
            raise BadConversation(f"{source}: reward must be a number, got {reward!r}")
        return _number(reward)
    result = columns.get("result")
    if result is None:
        return None
    try:
        return _number(float(str(result)))
    except ValueError:
        return 0.0


def _number(reward: float) -> float | None:
    """None for NaN, which tables hold where nothing judged."""
    return None if math.isnan(reward) else float(reward)
