"""Tool calls in a reply, as Hermes and Qwen chat templates write them.

    <tool_call>
    {"name": "bash", "arguments": {"command": "ls"}}
    </tool_call>

Invariant: it never raises; each block of a reply becomes one call or one error, in order. Called by envs/bash_tools.py
and envs/gateway/dialogue.py.
"""

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, cast

from envs.thinking import THINK_END

_BEGIN = re.compile(r"<tool_call>\s*")
_END = re.compile(r"\s*</tool_call>")
_BROKEN_END = re.compile(r"</tool_call>|(?=<tool_call>)|\Z")
"""Where a block ends that holds no JSON."""
_JSON = json.JSONDecoder()


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """One call, or why it cannot be made."""

    name: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict[str, Any])
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallBlock:
    """A call, and the characters [begin, end) of the reply that it takes."""

    begin: int
    end: int
    call: ToolCall


def parse_tool_calls(reply: str) -> list[CallBlock]:
    """The calls after the reply's thinking, which ends with its last </think>."""
    blocks: list[CallBlock] = []
    done = max(0, reply.rfind(THINK_END))
    while begin := _BEGIN.search(reply, done):
        call, done = _read_block(reply, begin.end())
        blocks.append(CallBlock(begin=begin.start(), end=done, call=call))
    return blocks


def _read_block(reply: str, begin: int) -> tuple[ToolCall, int]:
    """The call whose JSON begins there, and where its block ends. A string inside the JSON may spell the tags."""
    with suppress(ValueError, RecursionError):
        content, end = _JSON.raw_decode(reply, begin)
        if closing := _END.match(reply, end):
            return _read_call(content), closing.end()
    broken = _BROKEN_END.search(reply, begin)
    assert broken is not None, "the end of the text matches"
    if not broken.group():
        return ToolCall(error="the tool call does not end with </tool_call>"), broken.end()
    return ToolCall(error=f"the tool call is not JSON: {_fault(reply[begin : broken.start()])}"), broken.end()


def _read_call(content: Any) -> ToolCall:
    if not isinstance(content, dict):
        return ToolCall(error="the tool call is not a JSON object")
    fields = cast(dict[str, Any], content)
    name, arguments = fields.get("name"), fields.get("arguments", {})
    if not isinstance(name, str) or not name:
        return ToolCall(error="the tool call has no 'name' that is a string")
    if isinstance(arguments, str):  # some models spell the object once more as a string
        with suppress(ValueError, RecursionError):
            arguments = json.loads(arguments)
    if not isinstance(arguments, dict):
        return ToolCall(name=name, error=f"the arguments of {name} are not a JSON object")
    return ToolCall(name=name, arguments=cast(dict[str, Any], arguments))


def _fault(text: str) -> str:
    """What is wrong with a text that is no JSON."""
    try:
        json.loads(text)
    except (ValueError, RecursionError) as error:
        return str(error)
    return "it nests too deeply"
