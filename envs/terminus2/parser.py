"""The parser of terminus-2's JSON replies: a reply's text in, what to do and what to tell the policy out.

Invariant: it never raises; a reply with an error carries no commands. Called by envs/terminus2/prompts.py.

The rules are those of terminus-2 (Harbor 0.25), message texts aside: errors stop the Turn, warnings do not, and two
mends are tried on a reply with an error. One addition: limits on what Python's json takes (depth, digits) are errors.
"""

import json
import math
import re
from dataclasses import dataclass, replace
from typing import Any, cast

DEFAULT_DURATION_S = 1.0

ENDLESS_S = 1e9
"""A longer duration is this one; a longer integer may not fit a float."""
_FIELDS = ("analysis", "plan", "commands")
_NESTED_ONCE = re.compile(r"\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\}")
_CORRECTED = "AUTO-CORRECTED: {name} - please fix this in future responses"


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """Keys to type and how long to wait for their effect."""

    keystrokes: str
    duration_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedReply:
    """What a reply says."""

    commands: tuple[Command, ...] = ()
    is_complete: bool = False
    error: str = ""
    """Why nothing of it is done; "" when it is."""
    warnings: tuple[str, ...] = ()


def parse_reply(text: str) -> ParsedReply:
    """The reply's commands; with an error, the mends are tried in order and the first that helps is told."""
    parsed = _parse(text)
    if not parsed.error:
        return parsed
    for name, mended in (
        ("closed unbalanced braces", _close_braces(text)),
        ("extracted JSON from mixed content", _extract_json(text)),
    ):
        again = _parse(mended) if mended is not None else parsed
        if not again.error:
            return replace(again, warnings=(_CORRECTED.format(name=name), *again.warnings))
    return parsed


def _parse(text: str) -> ParsedReply:
    start, end = _find_object(text)
    if end == 0:
        return ParsedReply(error="No valid JSON object found")
    warnings = _outside_warnings(text[:start], text[end:])
    try:
        content = json.loads(text[start:end])
    except (ValueError, RecursionError) as error:
        return ParsedReply(error=f"Invalid JSON: {error}", warnings=warnings)
    fields = cast(dict[str, Any], content)
    warnings += _field_warnings(fields)
    missing = [name for name in _FIELDS if name not in fields]
    if missing:
        return ParsedReply(error=f"Missing required fields: {', '.join(missing)}", warnings=warnings)
    is_complete, complete_warnings = _read_complete(fields)
    commands, command_warnings, error = _read_commands(fields["commands"])
    warnings += complete_warnings + command_warnings
    if error and is_complete and isinstance(fields["commands"], list):
        return ParsedReply(is_complete=True, warnings=(*warnings, error))
    return ParsedReply(
        commands=() if error else commands, is_complete=is_complete and not error, error=error, warnings=warnings
    )


def _find_object(text: str) -> tuple[int, int]:
    """(start, end) of the first top-level {...}, blind to braces in strings; (0, 0) when none is closed."""
    depth, start = 0, 0
    in_string = is_escaped = False
    for k, char in enumerate(text):
        if is_escaped:
            is_escaped = False
        elif in_string:
            is_escaped, in_string = char == "\\", char != '"'
        elif depth and char == '"':
            in_string = True
        elif char == "{":
            start = start if depth else k
            depth += 1
        elif char == "}" and depth:
            depth -= 1
            if not depth:
                return start, k + 1
    return 0, 0


def _outside_warnings(before: str, after: str) -> tuple[str, ...]:
    sides = (("before", before), ("after", after))
    return tuple(f"Extra text detected {side} the JSON object" for side, extra in sides if extra.strip())


def _field_warnings(fields: dict[str, Any]) -> tuple[str, ...]:
    wrong_type = [name for name in ("analysis", "plan") if name in fields and not isinstance(fields[name], str)]
    warnings = [f"Field '{name}' should be a string" for name in wrong_type]
    present = [name for name in fields if name in _FIELDS]
    if present != [name for name in _FIELDS if name in fields]:
        warnings.append(f"Fields appear in the wrong order: {', '.join(present)}; expected {', '.join(_FIELDS)}")
    return tuple(warnings)


def _read_complete(fields: dict[str, Any]) -> tuple[bool, tuple[str, ...]]:
    value = fields.get("task_complete", False)
    if isinstance(value, str):
        return value.lower() in ("true", "1", "yes"), ()
    if isinstance(value, bool):
        return value, ()
    if value is None:
        return False, ()
    return bool(value), ("Field 'task_complete' should be a boolean or a string",)


def _read_commands(value: Any) -> tuple[tuple[Command, ...], tuple[str, ...], str]:
    """(commands, warnings, error): the first bad command is the error."""
    if not isinstance(value, list):
        return (), (), "Field 'commands' must be a list"
    items = cast(list[Any], value)
    commands: list[Command] = []
    warnings: list[str] = []
    for k, item in enumerate(items, start=1):
        if not isinstance(item, dict):
            return (), tuple(warnings), f"Command {k} must be an object"
        fields = cast(dict[str, Any], item)
        keystrokes = fields.get("keystrokes")
        if not isinstance(keystrokes, str):
            what = "must be a string" if "keystrokes" in fields else "is missing"
            return (), tuple(warnings), f"Command {k}: required field 'keystrokes' {what}"
        duration_s, duration_warnings = _read_duration(k, fields)
        warnings += duration_warnings
        unknown = sorted(fields.keys() - {"keystrokes", "duration"})
        if unknown:
            warnings.append(f"Command {k}: unknown fields: {', '.join(unknown)}")
        if k < len(items) and not keystrokes.endswith("\n"):
            warnings.append(f"Command {k} should end with a newline when another command follows, else the two join")
        commands.append(Command(keystrokes=keystrokes, duration_s=duration_s))
    return tuple(commands), tuple(warnings), ""


def _read_duration(k: int, fields: dict[str, Any]) -> tuple[float, list[str]]:
    if "duration" not in fields:
        return DEFAULT_DURATION_S, [f"Command {k}: missing duration, using {DEFAULT_DURATION_S}"]
    value = fields["duration"]
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        return DEFAULT_DURATION_S, [f"Command {k}: invalid duration, using {DEFAULT_DURATION_S}"]
    return float(min(value, ENDLESS_S)), []


def _close_braces(text: str) -> str | None:
    num_missing = text.count("{") - text.count("}")
    return text + "}" * num_missing if num_missing > 0 else None


def _extract_json(text: str) -> str | None:
    """The first {...} with at most one level inside that parses."""
    for match in _NESTED_ONCE.finditer(text):
        try:
            json.loads(match.group())
        except (ValueError, RecursionError):
            continue
        return match.group()
    return None
