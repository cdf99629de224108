"""The parser of terminus-2's XML replies: a reply's text in, what to do and what to tell the policy out.

Invariant: it never raises; a reply with an error carries no commands. Called by envs/terminus2/prompts.py.

The rules are those of terminus-2 (Harbor 0.25), message texts aside: what lies between the tags is taken byte for byte,
entities included, and nothing is mended (the one mend of Harbor's own parser can never come about). As in the JSON
format a duration that is negative or not finite is invalid.
"""

import math
import re
from collections.abc import Iterator

from envs.terminus2.parser import DEFAULT_DURATION_S, ENDLESS_S, Command, ParsedReply

_SECTIONS = ("analysis", "plan", "commands")
_TAGS = (*_SECTIONS, "task_complete")
_KEYSTROKES = re.compile(r"<keystrokes([^>]*)>(.*?)</keystrokes>", re.DOTALL)
_DURATION = re.compile(r"""duration\s*=\s*["']([^"']*)["']""")
_COMPLETE = re.compile(r"<task_complete>\s*true\s*</task_complete>", re.IGNORECASE)
_ENTITIES = ("&lt;", "&gt;", "&amp;", "&quot;", "&apos;")
_ONE_BLOCK = "IMPORTANT: only issue one <{tag}> block at a time; of {count} only the first was done"


def parse_xml_reply(text: str) -> ParsedReply:
    """The reply's commands. A reply whose <response> is not closed counts to its end."""
    before, start, rest = text.partition("<response>")
    content, _, after = rest.partition("</response>")
    content = content.strip()
    warnings = list(_outside_warnings(text, before, after)) if start else []
    if not content:
        return ParsedReply(error="No <response> tag found, or nothing in it", warnings=tuple(warnings))
    is_complete = _COMPLETE.search(content) is not None
    warnings += _section_warnings(content)
    inside = _section(content, "commands")
    if inside is None and not is_complete:
        return ParsedReply(error="Missing <commands> section", warnings=tuple(warnings))
    if inside == "" and not is_complete:
        warnings.append("The <commands> section is empty, so nothing was done; to wait, send empty keystrokes")
    matches = enumerate(_KEYSTROKES.finditer(inside or ""), start=1)
    commands = [_read_command(k, match[1], match[2], warnings) for k, match in matches]
    warnings += _keystroke_warnings(inside or "", commands)
    return ParsedReply(commands=tuple(commands), is_complete=is_complete, warnings=tuple(warnings))


def salvage(text: str) -> ParsedReply | None:
    """What a reply that was cut at its token limit says up to its first </response>; None when that is no reply."""
    commands_end = text.find("</commands>")
    end = text.find("</response>", commands_end)
    if commands_end < 0 or end < 0:
        return None
    parsed = parse_xml_reply(text[:end] + "</response>")
    is_several = any(warning.startswith("IMPORTANT: only issue one") for warning in parsed.warnings)
    return None if parsed.error or is_several else parsed


def _outside_warnings(text: str, before: str, after: str) -> Iterator[str]:
    if before.strip():
        yield "Extra text detected before <response>"
    if after.strip():
        yield "Extra text detected after </response>"
        if text.count("<response>") > 1:
            yield _ONE_BLOCK.format(tag="response", count=text.count("<response>"))


def _section(content: str, tag: str) -> str | None:
    """What the first such section holds, without blanks around it; None when there is none."""
    match = re.search(rf"<{tag}>(.*?)</{tag}>", content, re.DOTALL)
    if match:
        return match[1].strip()
    return "" if re.search(rf"<{tag}\s*/>", content) else None


def _section_warnings(content: str) -> Iterator[str]:
    yield from (f"Missing <{tag}> section" for tag in _SECTIONS if _section(content, tag) is None)
    yield from (
        f"Unknown tag <{name}>; expected {', '.join(_TAGS)}" for name in sorted(_outer_tags(content) - {*_TAGS})
    )
    starts = {tag: [match.start() for match in re.finditer(rf"<{tag}(?:\s|>|/>)", content)] for tag in _TAGS}
    for tag, found in starts.items():
        if len(found) > 1:
            several = f"Several <{tag}> sections"
            yield _ONE_BLOCK.format(tag=tag, count=len(found)) if tag == "commands" else several
    present = [tag for tag in _SECTIONS if starts[tag]]
    order = sorted(present, key=lambda tag: starts[tag][0])
    if order != present:
        yield f"Sections appear in the wrong order: {', '.join(order)}; expected {', '.join(present)}"


def _outer_tags(content: str) -> set[str]:
    """Names of the tags that lie within no other, as counting opened and closed ones tells."""
    names: set[str] = set()
    depth = 0
    for match in re.finditer(r"<([^>]*)>", content):
        if match[1].startswith("/"):
            depth -= 1
        elif not match[1].startswith(("!", "?")):
            if depth == 0:
                names.add(match[1].partition(" ")[0].removesuffix("/"))
            depth += not match[1].endswith("/")
    return names


def _read_command(k: int, attributes: str, keystrokes: str, warnings: list[str]) -> Command:
    """The k-th command; what is wrong with its attributes is added to the warnings."""
    warnings += _attribute_warnings(k, attributes)
    match = _DURATION.search(attributes)
    try:
        duration_s = float(match[1]) if match else DEFAULT_DURATION_S
    except ValueError:
        duration_s = math.nan
    if match is None:
        warnings.append(f"Command {k}: missing duration, using {DEFAULT_DURATION_S}")
    elif not 0 <= duration_s < math.inf:
        warnings.append(f"Command {k}: invalid duration {match[1]!r}, using {DEFAULT_DURATION_S}")
        duration_s = DEFAULT_DURATION_S
    return Command(keystrokes=keystrokes, duration_s=min(duration_s, ENDLESS_S))


def _attribute_warnings(k: int, attributes: str) -> Iterator[str]:
    for name, value in re.findall(r"""(\w+)\s*=\s*([^"'\s>]+)""", attributes):
        yield f'Command {k}: the value of {name} must be in quotes: {name}="{value}"'
    for name, value in re.findall(r"(\w+)\s*=\s*'([^']*)'", attributes):
        yield f'Command {k}: use double quotes: {name}="{value}"'
    names = re.findall(r"(\w+)\s*=", attributes)
    yield from (
        f"Command {k}: unknown attribute {name}; only duration is known" for name in names if name != "duration"
    )


def _keystroke_warnings(inside: str, commands: list[Command]) -> Iterator[str]:
    for k, command in enumerate(commands[:-1], start=1):
        if not command.keystrokes.endswith("\n"):
            yield f"Command {k} should end with a newline when another command follows, else the two join"
    yield from (
        f"{entity} is typed as it stands: write the character itself" for entity in _ENTITIES if entity in inside
    )
    if "\\r\\n" in inside:
        yield "\\r\\n is typed as it stands: a line ends with a new line alone"
