"""The oracle: plays a Task's reference solution as a teacher, in the reply format of the policy it teaches.

Invariant: what it says is what a policy may learn to say; solution/ enters the Sandbox only with SolutionScript. Made
by recipes: `Terminus2(prompts)` driven by `oracle_conversation(task, prompts)`.
"""

import json
import os
import re
import subprocess
from collections.abc import Sequence
from enum import StrEnum
from functools import lru_cache

from envs.conversation import ScriptedConversation
from envs.errors import HarnessTimeout, TaskError
from envs.harness import Conversation
from envs.sandbox import Sandbox
from envs.steps import steps_of
from envs.task import Task
from envs.templating import resolve_variables
from envs.terminus2.prompts import Prompts, ReplyFormat, ReplyStyle

ORACLE_DURATION_S = 1.0
"""What a demonstration gives each command."""

_SCRIPT_LIMIT_S = 3600.0
_SIMPLE = re.compile(r"(?!(?:if|for|while|until|case|select|function|time|coproc)\b)[\w./+:,@%=\- >]*[\w./+:,@%=\-]")
_SETTING = re.compile(r"set [-+]\w+(?: pipefail)?")
_EXIT = re.compile(r"exit(?: \d+)?")
_NEEDS_FILE = re.compile(r"\$\{?[0-9@*]|BASH_SOURCE")
_SINGLE_QUOTED = re.compile(r"'[^']*'")


class Claim(StrEnum):
    """Where a demonstration first claims completion."""

    WITH_LAST_COMMAND = "with_last_command"
    """One Turn fewer; the confirmation is then the first look at the last command's output."""
    AFTER_LOOK = "after_look"
    """In a reply of its own, after the last command's output was shown."""


def oracle_conversation(
    task: Task, prompts: Prompts, *, claim: Claim | None = None, confirm: bool = True
) -> ScriptedConversation:
    """The solution as replies: one Turn a command, then the claim of completion, twice if `confirm`.

    `claim` None: WITH_LAST_COMMAND for compact replies, where Turns cost most, else AFTER_LOOK. `confirm` is that of
    the harness. TaskError when the solution is missing or cannot be split (then SolutionScript plays it).
    """
    return ScriptedConversation(
        [
            reply
            for step in steps_of(task)
            for reply in _solution_replies(solution_steps(step.task), prompts, claim, confirm)
        ]
    )


def solution_steps(task: Task) -> list[str]:
    """The complete shell commands of solution/solve.sh, to be typed one after the other.

    Comments, `set -e` and a final `exit 0` are left out; a heredoc, a loop or a quoted text is one step. Takes some
    milliseconds for each line that is not plain, as bash itself is asked whether it wants more; the last 10,000
    solutions are remembered.
    """
    path = task.path / "solution" / "solve.sh"
    if not path.is_file():
        raise TaskError(f"{path}: missing, so the oracle cannot play {task.id}; add the reference solution")
    if task.solution_env:
        raise TaskError(f"{path}: needs solution.env, which cannot be typed; play it whole with SolutionScript")
    steps = _split(path.read_text())
    if steps is None:
        raise TaskError(f"{path}: cannot be typed command by command; play it whole with SolutionScript")
    return list(steps)


class SolutionScript:
    """A Harness for solutions that cannot be split: uploads solution/ and runs solve.sh whole, as Harbor's oracle does.

    Drive it by `script_conversation()`; its Trajectory holds one Turn and teaches nothing.
    """

    name = "oracle-script"

    async def run(self, task: Task, sandbox: Sandbox, conversation: Conversation) -> None:
        """Ends when the script did, whatever its exit status; the episode's time limit cuts it short."""
        reply = await conversation.ask(task.instruction)
        await sandbox.upload_dir(task.path / "solution", "/solution")
        limit_s = task.limits.agent_timeout_s or _SCRIPT_LIMIT_S
        result = await sandbox.exec(reply, timeout_s=limit_s, env=resolve_variables(task.solution_env))
        if result.exit_code == 124:
            raise HarnessTimeout(f"solution/solve.sh did not end within {limit_s:g} s")


def script_conversation(task: Task) -> ScriptedConversation:
    """The replies that run whole solutions, one a step."""
    return ScriptedConversation(["bash /solution/solve.sh"] * len(steps_of(task)))


def _solution_replies(commands: Sequence[str], prompts: Prompts, claim: Claim | None, confirm: bool) -> list[str]:
    style = prompts.reply_style
    claim = claim or (Claim.WITH_LAST_COMMAND if style is ReplyStyle.COMPACT else Claim.AFTER_LOOK)
    is_joined = claim is Claim.WITH_LAST_COMMAND
    replies = [_step_reply(c, prompts, is_last=is_joined and k == len(commands)) for k, c in enumerate(commands, 1)]
    return [*replies, *[_claim_reply(prompts)] * ((2 if confirm else 1) - is_joined)]


@lru_cache(maxsize=10_000)
def _split(script: str) -> tuple[str, ...] | None:
    """The steps of a script; None when it must run as a file."""
    steps: list[str] = []
    open_lines: list[str] = []
    for line in script.split("\n"):
        is_aside = not line.strip() or line.lstrip().startswith("#") or _SETTING.fullmatch(line.strip())
        if not open_lines and is_aside:
            continue
        open_lines.append(line)
        step = "\n".join(open_lines)
        if not _wants_more(step):
            steps.append(step)
            open_lines = []
    if steps and _EXIT.fullmatch(steps[-1]):
        del steps[-1]
    if open_lines or not steps or any(map(_needs_file, steps)):
        return None
    return tuple(steps)


def _needs_file(step: str) -> bool:
    """Whether a step means something else, or ends the shell, when it is typed; a heredoc's text may say anything."""
    words = _SINGLE_QUOTED.sub("", step.split("\n", 1)[0] if "<<" in step else step)
    return bool(_EXIT.fullmatch(step) or _NEEDS_FILE.search(words))


def _wants_more(text: str) -> bool:
    """Whether bash would prompt for another line."""
    if _SIMPLE.fullmatch(text):
        return False
    if re.search(r"(?<!\\)(?:\\\\)*\\$", text):
        return True
    environment = {"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C"}
    check = subprocess.run(
        ["bash", "-n"], input=text + "\n", capture_output=True, text=True, env=environment, check=False
    )
    return (
        "unexpected end of file" in check.stderr
        or "unexpected EOF" in check.stderr
        or ("delimited by end-of-file" in check.stderr)
    )


def _step_reply(step: str, prompts: Prompts, *, is_last: bool) -> str:
    keystrokes = step.replace("\t", "\x16\t") + "\n"  # typed at a shell, a tab completes unless Ctrl-V quotes it
    if prompts.reply_style is ReplyStyle.COMPACT:
        return _reply("", "", keystrokes, is_complete=is_last, prompts=prompts)
    first_line = step.split("\n", 1)[0]
    analysis = "The terminal is ready for the next step."
    return _reply(analysis, f"Run: {first_line}", keystrokes, is_complete=is_last, prompts=prompts)


def _claim_reply(prompts: Prompts) -> str:
    if prompts.reply_style is ReplyStyle.COMPACT:
        return _reply("", "", "", is_complete=True, prompts=prompts)
    return _reply("Every step has been carried out.", "Nothing is left to do.", "", is_complete=True, prompts=prompts)


def _reply(analysis: str, plan: str, keystrokes: str, *, is_complete: bool, prompts: Prompts) -> str:
    """One command, or none when there are no keystrokes."""
    is_compact = prompts.reply_style is ReplyStyle.COMPACT
    if prompts.reply_format is ReplyFormat.XML:
        return _xml_reply(analysis, plan, keystrokes, is_complete=is_complete)
    command: dict[str, object] = {"keystrokes": keystrokes}
    command |= {} if is_compact else {"duration": ORACLE_DURATION_S}
    fields: dict[str, object] = {"analysis": analysis, "plan": plan, "commands": [command] if keystrokes else []}
    if is_compact:
        fields |= {"task_complete": True} if is_complete else {}
        return json.dumps(fields, ensure_ascii=False, separators=(",", ":"))
    return json.dumps(fields | {"task_complete": is_complete}, ensure_ascii=False, indent=2)


def _xml_reply(analysis: str, plan: str, keystrokes: str, *, is_complete: bool) -> str:
    """What a compact reply leaves out in JSON, it must hold in XML."""
    if "</keystrokes>" in keystrokes:
        raise TaskError("a solution that types </keystrokes> cannot be told in XML; play it with reply_format json")
    command = f'<keystrokes duration="{ORACLE_DURATION_S}">{keystrokes}</keystrokes>\n' if keystrokes else ""
    complete = "<task_complete>true</task_complete>\n" if is_complete else ""
    sections = f"<analysis>{analysis}</analysis>\n<plan>{plan}</plan>\n<commands>\n{command}</commands>\n"
    return f"<response>\n{sections}{complete}</response>"
