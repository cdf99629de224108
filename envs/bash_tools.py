"""BashTools: the harness in which a policy calls two tools, `bash` and `submit`; it needs no terminal in the image.

Invariant: each bash call is one exec of `bash -lc` with a deadline and a bounded output, in the directory where the
call before it ended; only submit ends a rollout as completed. Called by envs/episode.py.
"""

import shlex
from dataclasses import dataclass
from typing import Any

from envs.harness import Conversation
from envs.sandbox import ExecResult, Sandbox
from envs.task import Task
from envs.tool_calls import ToolCall, parse_tool_calls

_PROMPT = """\
You work on a Linux machine by calling tools. Bring the task below to completion on your own, and then submit it.

<tools>
{{"name": "bash", "description": "Runs a command and shows what it prints. A cd lasts until the next call; variables \
and functions do not.", "parameters": {{"type": "object", "properties": {{"command": {{"type": "string"}}, "timeout": \
{{"type": "number", "description": "seconds, at most {limit_s:g}"}}}}, "required": ["command"]}}}}
{{"name": "submit", "description": "Ends the work, which is then judged as it stands.", "parameters": \
{{"type": "object", "properties": {{}}}}}}
</tools>

Call a tool by writing, once or several times in a reply:
<tool_call>
{{"name": "bash", "arguments": {{"command": "ls -la"}}}}
</tool_call>
What the calls of a reply came to is told in the next message, in their order.

Task:
{instruction}
"""
_NO_CALL = 'No tool was called. Call bash, or submit when the work is done: <tool_call>{"name": "submit"}</tool_call>'
_CUT = "Your last reply was longer than a reply may be and was cut off; nothing of it was done. Reply again, shorter."

# The shell says on standard error where it ended up, behind a NUL, because start-up files may complain there; what the
# command prints goes to standard output together. The directory may be gone since the last call.
_CALL = """\
cd {cwd} 2>/dev/null || cd {workdir} 2>/dev/null || cd /
exec 3>&2 2>&1
trap 'printf "\\0%s" "$PWD" >&3' EXIT
{command}"""

_MAX_ARGUMENT_BYTES = 30_000  # Linux allows 128 KiB, and quoting may multiply what is sent
_SCRIPT_FILE = "/logs/.bash-tools-call"


@dataclass(frozen=True, slots=True, kw_only=True)
class BashToolsConfig:
    """What a call may take."""

    call_timeout_s: float = 120.0
    """A call's deadline, and the most that it may ask for."""
    max_output_bytes: int = 10_000
    """A longer output is cut in its middle."""

    def __post_init__(self) -> None:
        if self.call_timeout_s <= 0 or self.max_output_bytes < 2:
            raise ValueError(f"need call_timeout_s > 0 and max_output_bytes >= 2, got {self}")


@dataclass(frozen=True, slots=True)
class BashTools:
    """The Harness."""

    config: BashToolsConfig = BashToolsConfig()

    @property
    def name(self) -> str:
        """Appears in provenance."""
        return "bash-tools"

    async def run(self, task: Task, sandbox: Sandbox, conversation: Conversation) -> None:
        """Plays until submit is called; raises what the conversation and the Sandbox raise."""
        shell = _Shell(sandbox, self.config)
        message = _PROMPT.format(instruction=task.instruction, limit_s=self.config.call_timeout_s)
        while True:
            calls = [block.call for block in parse_tool_calls(await conversation.ask(message))]
            if conversation.was_cut or not calls:
                message = _CUT if conversation.was_cut else _NO_CALL
                continue
            results: list[str] = []
            for call in calls:
                if call.name == "submit" and not call.error:
                    return
                results.append(f"<tool_response>\n{await shell.answer(call)}\n</tool_response>")
            message = "\n".join(results)


class _Shell:
    """The bash tool: it remembers the directory."""

    def __init__(self, sandbox: Sandbox, config: BashToolsConfig) -> None:
        self._sandbox = sandbox
        self._config = config
        self._cwd = sandbox.workdir

    async def answer(self, call: ToolCall) -> str:
        """What a call came to, in words; a call that cannot be made is told why."""
        if call.error:
            return f"error: {call.error}"
        if call.name != "bash":
            return f"error: there is no tool {call.name!r}; there are bash and submit"
        command, limit_s = call.arguments.get("command"), call.arguments.get("timeout", self._config.call_timeout_s)
        if not isinstance(command, str) or "\0" in command:
            return "error: bash needs 'command', a string without NUL"
        if not _is_positive(limit_s):
            return f"error: 'timeout' must be a number of seconds above 0, got {limit_s!r}"
        return await self._run(command, min(limit_s, self._config.call_timeout_s))

    async def _run(self, command: str, limit_s: float) -> str:
        script = _CALL.format(cwd=shlex.quote(self._cwd), workdir=shlex.quote(self._sandbox.workdir), command=command)
        # A lone surrogate, which JSON can spell, is no UTF-8: it becomes a question mark.
        data = script.encode(errors="replace")
        if len(data) > _MAX_ARGUMENT_BYTES:
            await self._sandbox.write_file(_SCRIPT_FILE, data)
            call = f"exec bash -l {_SCRIPT_FILE}"
        else:
            call = f"exec bash -lc {shlex.quote(data.decode())}"
        result = await self._sandbox.exec(call, timeout_s=limit_s, cwd="/")
        directory = _directory(result)
        self._cwd = directory or self._cwd
        output = _cut(result.stdout, self._config.max_output_bytes)
        if result.exit_code == 124 and not directory:  # a command may end with 124 of its own
            return f"{output}\n[killed: it did not end within {limit_s:g} s]".lstrip("\n")
        return f"{output}\n[exit status {result.exit_code}]".lstrip("\n")


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def _directory(result: ExecResult) -> str:
    """Where the command ended; "" when its shell could not say."""
    path = result.stderr.rpartition(b"\0")[2].decode(errors="replace")
    return path if b"\0" in result.stderr and path.startswith("/") else ""


def _cut(output: bytes, max_bytes: int) -> str:
    text = output.decode(errors="replace").rstrip("\n")
    data = text.encode()
    if len(data) <= max_bytes:
        return text
    head, tail = data[: max_bytes // 2], data[-(max_bytes // 2) :]
    num_left_out = len(data) - len(head) - len(tail)
    words = f"\n[... {num_left_out} bytes left out ...]\n"
    return head.decode(errors="ignore") + words + tail.decode(errors="ignore")
