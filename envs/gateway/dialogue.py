"""What the gateway's protocols have in common: messages, tools, and tool calls in the text of a reply.

Invariant: every protocol's request becomes these records, so a history is compared in one form whoever sent it.
Called by the protocols (envs/gateway/chat.py and its neighbours), the session and the prompts.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from envs.tool_calls import ToolCall as ParsedCall
from envs.tool_calls import parse_tool_calls

MAX_DEPTH = 100
"""Levels of a policy's arguments; readers of JSON give up at some depth, each at its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A function that the policy asks for."""

    name: str
    arguments: str
    """JSON, in one spelling per value, so that equal calls compare equal."""

    def values(self) -> Any:
        """The arguments as values; under "text" where the policy wrote something else than a JSON object."""
        try:
            value = cast(object, json.loads(self.arguments))
        except (ValueError, RecursionError):
            value = self.arguments
        return cast(Any, value) if isinstance(value, dict) else {"text": self.arguments}


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """One message of a dialogue."""

    role: str
    """"system", "user", "assistant" or "tool"."""
    content: str
    calls: tuple[ToolCall, ...] = ()
    """Of an assistant only."""

    @property
    def text(self) -> str:
        """Words and calls as one text."""
        return "\n".join([*([self.content] if self.content else []), *(spell_call(call) for call in self.calls)])


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function that the policy may call."""

    name: str
    description: str
    parameters: str
    """Its JSON schema, as JSON."""

    def spec(self) -> dict[str, Any]:
        """As chat templates expect it."""
        function: dict[str, Any] = {"name": self.name, "description": self.description}
        return {"type": "function", "function": {**function, "parameters": json.loads(self.parameters)}}


def spell_json(value: object) -> str:
    """The JSON of a value, keys in order."""
    return json.dumps(value, ensure_ascii=False, sort_keys=True)


def make_call(name: str, arguments: object) -> ToolCall:
    """A call with its arguments in the one spelling; `arguments` is a JSON text, or a value.

    A text that is no JSON, or none that can be spelled, is kept as it is: a client must be able to send back what a
    policy wrote.
    """
    if isinstance(arguments, str):
        try:
            spelled = spell_json(json.loads(arguments or "{}"))
            spelled.encode()
        except (ValueError, RecursionError):  # half a surrogate pair is a ValueError
            return ToolCall(name=name, arguments=arguments)
        return ToolCall(name=name, arguments=spelled)
    return ToolCall(name=name, arguments=spell_json(arguments))


def spell_call(call: ToolCall) -> str:
    """A call as a policy writes it (the convention of Hermes and Qwen templates)."""
    return f'<tool_call>\n{{"name": {json.dumps(call.name)}, "arguments": {call.arguments}}}\n</tool_call>'


def parse_reply(text: str) -> Said:
    """The assistant's message of a reply: words before, between and after its calls, and the calls.

    A call that cannot be made stays among the words: the client then sees what the policy wrote.
    """
    blocks = [block for block in parse_tool_calls(text) if not block.call.error and _is_json(block.call)]
    if not blocks:
        return Said(role="assistant", content=text)
    edges = [0, *(edge for block in blocks for edge in (block.begin, block.end)), len(text)]
    words = [text[begin:end].strip() for begin, end in zip(edges[::2], edges[1::2], strict=True)]
    calls = tuple(make_call(block.call.name, block.call.arguments) for block in blocks)
    return Said(role="assistant", content="\n".join(part for part in words if part), calls=calls)


def _is_json(call: ParsedCall) -> bool:
    """Whether every client can read it: Python takes NaN and half a surrogate pair for JSON, others do not."""
    if not _is_flat(call.arguments, MAX_DEPTH):
        return False
    try:
        json.dumps([call.name, dict(call.arguments)], ensure_ascii=False, allow_nan=False).encode()
    except ValueError:
        return False
    return True


def _is_flat(value: object, depth: int) -> bool:
    """Whether objects and lists nest in at most `depth` levels."""
    if isinstance(value, Mapping):
        value = list(cast(Mapping[str, object], value).values())
    if not isinstance(value, list):
        return True
    return depth > 0 and all(_is_flat(item, depth - 1) for item in cast(list[object], value))
