"""Prompts: every word that terminus-2 says to a policy, as templates.

Invariant: a Prompts and its terminal are all that the policy sees; the same words serve its training and its play.
FULL states the whole reply format, for real models; COMPACT states nothing, for a tiny policy that learned the format
from demonstrations. Used by envs/terminus2/harness.py and, for the reply style, by envs/oracle.py.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache

from jinja2 import Environment, StrictUndefined, Template

from envs.terminus2.parser import Command, ParsedReply, parse_reply
from envs.terminus2.terminal import View
from envs.terminus2.tmux import TerminalConfig, Wait
from envs.terminus2.xml_parser import parse_xml_reply, salvage


class ReplyFormat(StrEnum):
    """In which format replies are written."""

    JSON = "json"
    XML = "xml"
    """Keystrokes stand there as they are typed, and a whole reply at the head of one that was cut is done."""


class ReplyStyle(StrEnum):
    """How a demonstration writes its replies."""

    FULL = "full"
    """A sentence of analysis and of plan, with durations."""
    COMPACT = "compact"
    """Nothing that can be left out, no blanks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompts:
    """Templates (jinja2) of the user messages. `observation` is a rendered new_output or screen."""

    initial: str
    """Of `instruction` and `screen`."""
    new_output: str
    """Of `text`: what came since the last look."""
    screen: str
    """Of `text`: the visible screen, when what is new cannot be told."""
    confirm: str
    """Of `observation`: asks whether the task is really complete."""
    malformed: str
    """Of `error` and `warnings`, a list."""
    cut: str
    """The reply reached its token limit; nothing of it was done."""
    warned: str
    """Of `observation` and `warnings`, a list."""
    is_terse: bool
    """Whether observations leave out blank lines, the echo of what was typed, and a screen that did not change."""
    reply_style: ReplyStyle
    terminal: TerminalConfig
    reply_format: ReplyFormat = ReplyFormat.JSON

    def read(self, reply: str, *, was_cut: bool) -> ParsedReply | None:
        """What a reply says; None when it was cut at its token limit and cannot be used."""
        if self.reply_format is ReplyFormat.XML:
            return salvage(reply) if was_cut else parse_xml_reply(reply)
        return None if was_cut else parse_reply(reply)

    def first_message(self, instruction: str, view: View) -> str:
        """The first user message."""
        return _render(self.initial, instruction=instruction, screen=view.screen)

    def next_message(self, parsed: ParsedReply, view: View) -> str:
        """What the policy is told after a reply that was done."""
        message = self._observation(view, parsed.commands)
        if parsed.is_complete:
            message = _render(self.confirm, observation=message)
        if parsed.warnings:
            message = _render(self.warned, observation=message, warnings=parsed.warnings)
        return message

    def error_message(self, parsed: ParsedReply) -> str:
        """What the policy is told after a reply that could not be parsed."""
        return _render(self.malformed, error=parsed.error, warnings=parsed.warnings)

    def cut_message(self) -> str:
        """What the policy is told after a reply that was cut."""
        return _render(self.cut)

    def _observation(self, view: View, commands: Sequence[Command]) -> str:
        is_new = view.new is not None and (view.is_changed or self.is_terse)
        template, text = (self.new_output, view.new) if is_new else (self.screen, view.screen)
        return _render(template, text=self._terse(text or "", commands) if self.is_terse else text)

    def _terse(self, text: str, commands: Sequence[Command]) -> str:
        typed = [line.rstrip() for command in commands for line in re.split(r"[\r\n]", command.keystrokes)]
        lines = [line for line in text.split("\n") if line.strip()]
        for echo in typed:
            for prompt in (self.terminal.shell_prompt or "", "> "):
                if prompt + echo in lines:
                    lines.remove(prompt + echo)
                    break
        return "\n".join(lines) or "..."  # a message is never empty


@lru_cache
def _compile(source: str) -> Template:
    return Environment(undefined=StrictUndefined, keep_trailing_newline=True, autoescape=False).from_string(source)


def _render(source: str, **values: object) -> str:
    return _compile(source).render(**values)


_ROLE = """\
You are an agent that works on a Linux machine through a terminal. Bring the task below to completion on your own, \
step by step: look at the terminal, decide what to do next, and send the keystrokes that do it. After each of your \
replies you are shown what the terminal printed.
"""
_JSON_FORMAT = """\

Every reply is one JSON object and nothing else, with these fields in this order:

{
  "analysis": "What the terminal shows, what is already done, and what is still missing.",
  "plan": "What you will do next, and what you expect each command to achieve.",
  "commands": [
    {"keystrokes": "ls -la\\n", "duration": 0.1},
    {"keystrokes": "make test\\n", "duration": 20.0}
  ],
  "task_complete": false
}

Required: "analysis" (string), "plan" (string) and "commands" (list, possibly empty).
Optional: "task_complete" (boolean, false when left out).

Each command holds:
- "keystrokes" (string, required): typed into the terminal exactly as given. A line runs only if it ends with \\n, so \
nearly every command ends with \\n. Two commands run into one line if the first of them lacks it.
- "duration" (number of seconds, 1.0 when left out): how long to wait before the next command is typed or the terminal \
is shown to you.

About keystrokes:
- To press a special key, send its tmux name alone, without \\n: "C-c" interrupts, "C-d" ends the input.
- JSON rules apply: write \\n for a new line, \\" for a quotation mark and \\\\ for a backslash.
- Whatever you type goes to the program in front. Leave editors and pagers before you type shell commands.
"""
_RULES = """\

About durations:
- 0.1 is enough for commands that answer at once, such as cd, ls, echo and cat.
- 1.0 suits small programs and compilers; use more for builds, downloads and test suites.
- Never ask for more than 60. If a command is still running, wait on: send empty keystrokes with a duration, and look \
again. Many short waits are better than a long one.

When the task is done, set task_complete to true. You are then shown the terminal once more and asked to confirm; \
the work is judged as it stands once you confirm.

Task Description:
{{ instruction }}

Current terminal state:
{{ screen }}
"""
_XML_FORMAT = """\

Every reply is one XML element and nothing else, with these elements in this order:

<response>
<analysis>
What the terminal shows, what is already done, and what is still missing.
</analysis>
<plan>
What you will do next, and what you expect each command to achieve.
</plan>
<commands>
<keystrokes duration="0.1">ls -la
</keystrokes>
<keystrokes duration="20.0">make test
</keystrokes>
</commands>
<task_complete>false</task_complete>
</response>

Required: <analysis>, <plan> and <commands> (possibly empty).
Optional: <task_complete>, true or false (false when left out).

Each <keystrokes> element holds what is typed into the terminal, exactly as it stands there: a line runs only if it \
ends with a new line, so nearly every one closes on a line of its own. Its "duration" is the number of seconds to wait \
before the next command is typed or the terminal is shown to you (1.0 when left out).

About keystrokes:
- To press a special key, send its tmux name alone, without a new line: C-c interrupts, C-d ends the input.
- Nothing is decoded: write <, > and & themselves, never &lt;, &gt; or &amp;.
- Whatever you type goes to the program in front. Leave editors and pagers before you type shell commands.
"""

FULL = Prompts(
    initial=_ROLE + _JSON_FORMAT + _RULES,
    new_output="New Terminal Output:\n{{ text }}\n",
    screen="Current Terminal Screen:\n{{ text }}\n",
    confirm="""\
Current terminal state:
{{ observation }}
Are you sure that the task is complete? Your work will now be judged, and you cannot change anything afterwards. \
If it is complete, reply once more with task_complete set to true. If anything is missing, reply with the commands \
that do it.
""",
    malformed="""\
Previous response had parsing errors:
ERROR: {{ error }}
{%- if warnings %}
WARNINGS: {{ warnings | join("; ") }}
{%- endif %}

Please fix these issues and provide a proper JSON response.
""",
    cut="""\
ERROR!! NONE of the actions of your last reply were performed: it was longer than a reply may be and was cut off.
Reply again, shorter; split the work into several replies if you must.
""",
    warned="""\
Previous response had warnings:
WARNINGS: {{ warnings | join("; ") }}

{{ observation }}""",
    is_terse=False,
    reply_style=ReplyStyle.FULL,
    terminal=TerminalConfig(),
)
"""terminus-2's messages, in this project's words."""

COMPACT = Prompts(
    initial="{{ instruction }}",
    new_output="{{ text }}",
    screen="{{ text }}",
    confirm="{{ observation }}\nsure?",
    malformed="error: not JSON",
    cut="error: too long",
    warned="{{ observation }}",
    is_terse=True,
    reply_style=ReplyStyle.COMPACT,
    terminal=TerminalConfig(
        wait=Wait.PROMPT, shell_prompt="$ ", history_lines=2000, max_output_bytes=400, omission="\n...\n"
    ),
)
"""A few words a message; the shell's prompt is "$ "."""


def in_format(prompts: Prompts, reply_format: ReplyFormat) -> Prompts:
    """FULL or COMPACT, for replies in that format."""
    if reply_format is ReplyFormat.JSON:
        return prompts
    return replace(
        prompts,
        reply_format=reply_format,
        initial=prompts.initial.replace(_JSON_FORMAT, _XML_FORMAT),
        malformed=prompts.malformed.replace("JSON", "XML"),
    )
