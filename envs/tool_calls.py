"""Tool calls in a reply, as Hermes and Qwen chat templates write them.

    <tool_call>
    {"name": "bash", "arguments": {"command": "ls"}}
    </tool_call>

Invariant: it never raises; each block of a reply becomes one call or one error, in order. Called by envs/bash_tools.py.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

_BLOCK = re.compile(r"<tool_call>(.*?)(</tool_call>|(?=<tool_call>)|\Z)", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """One call, or why it cannot be made."""

    name: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict[str, Any])
    error: str = ""


def parse_tool_calls(reply: str) -> list[ToolCall]:
    """The calls after the reply's thinking, which ends with its last </think>."""
    _, _, words = reply.rpartition("</think>")
    return [_parse(match[1], is_closed=bool(match[2])) for match in _BLOCK.finditer(words)]


def _parse(text: str, *, is_closed: bool) -> ToolCall:
    if not is_closed:
        return ToolCall(error="the tool call does not end with </tool_call>")
    try:
        content: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        return ToolCall(error=f"the tool call is not JSON: {error}")
    if not isinstance(content, dict):
        return ToolCall(error="the tool call is not a JSON object")
    fields = cast(dict[str, Any], content)
    name, arguments = fields.get("name"), fields.get("arguments", {})
    if not isinstance(name, str):
        return ToolCall(error="the tool call has no 'name' that is a string")
    if not isinstance(arguments, dict):
        return ToolCall(name=name, error=f"the arguments of {name} are not a JSON object")
    return ToolCall(name=name, arguments=cast(dict[str, Any], arguments))
