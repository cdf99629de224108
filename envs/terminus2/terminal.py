"""Terminal: the tmux session in a Sandbox that the policy types into and looks at.

Invariant: one exec to start, one exec for each Turn; a session that is gone is the policy's doing (SandboxDied), one
that cannot start is not (SandboxError). Called by envs/terminus2/harness.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from envs.errors import SandboxDied, SandboxError
from envs.sandbox import ExecResult, Sandbox
from envs.terminus2.parser import Command
from envs.terminus2.scrollback import Capture, Seen, look, new_start
from envs.terminus2.tmux import (
    CAPTURED_LINES,
    TerminalConfig,
    Wait,
    key_bytes,
    needs_file,
    output_command,
    start_command,
    start_environment,
    turn_command,
    wait_limit_s,
)

_GRACE_S = 60.0  # an exec may take this much longer than what it waits for, on a busy machine
_MAX_ARGUMENTS_BYTES = 60_000  # of one bash command line; Linux allows 128 KiB


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """What the policy may look at after a Turn; each text is cut in its middle at the configured size."""

    screen: str
    """The visible screen."""
    new: str | None
    """Text since the last view, from the last line of it on; None when that cannot be found any more."""
    is_changed: bool
    """Whether there is anything new."""


async def start_terminal(sandbox: Sandbox, config: TerminalConfig) -> tuple["Terminal", View]:
    """A started Terminal and the first view of it. SandboxError when tmux is missing or does not start."""
    result = await sandbox.exec(start_command(config), timeout_s=_GRACE_S, env=start_environment(config))
    if result.exit_code == 127:
        raise SandboxError("no tmux in the Sandbox; install it in the Task's image (apt-get install tmux)")
    if result.exit_code:
        raise SandboxError(f"tmux did not start (exit code {result.exit_code}): {_message(result)}")
    capture = _read_capture(result.stdout, config.height)
    if config.wait is Wait.PROMPT and capture.title != "1":
        raise SandboxError("the shell's start-up files replace PROMPT_COMMAND or PS1; use wait=duration for this image")
    screen = _cut(capture.screen, config)
    return Terminal(sandbox, config, look(capture)), View(screen=screen, new=None, is_changed=True)


class Terminal:
    """A running tmux session; made by `start_terminal`."""

    def __init__(self, sandbox: Sandbox, config: TerminalConfig, seen: Seen | None) -> None:
        self._sandbox = sandbox
        self._config = config
        self._seen = seen
        self._num_turns = 0

    async def type(self, commands: Sequence[Command]) -> View:
        """Types the commands, waits for each as configured, and looks. SandboxDied when the session is gone."""
        self._num_turns += 1
        files = await self._upload(commands)
        command = turn_command(self._config, self._num_turns, commands, files)
        limit_s = sum(wait_limit_s(self._config, c) for c in commands)
        capture = _read_capture(await self._run(command, limit_s), self._config.height)
        view = await self._view(capture)
        self._seen = look(capture)
        return view

    async def _upload(self, commands: Sequence[Command]) -> list[str | None]:
        """For each command the file that holds its keystrokes, or None when they fit the command line."""
        files: list[str | None] = []
        num_bytes = 0
        for k, command in enumerate(commands):
            data = key_bytes(command.keystrokes)
            if needs_file(command.keystrokes) or num_bytes + len(data) > _MAX_ARGUMENTS_BYTES:
                files.append(f"/tmp/.terminus-2-keys-{k}")
                await self._sandbox.write_file(f"/tmp/.terminus-2-keys-{k}", data)
            else:
                num_bytes += len(data)
                files.append(None)
        return files

    async def _view(self, capture: Capture) -> View:
        screen = _cut(capture.screen, self._config)
        start = new_start(self._seen, capture)
        may_be_trimmed = capture.history_size >= 0.9 * self._config.history_lines  # tmux drops a tenth when it is full
        if start is None or self._seen is None or (start < capture.first_line and may_be_trimmed):
            return View(screen=screen, new=None, is_changed=True)
        if start < capture.first_line:
            return View(screen=screen, new=await self._long_output(start), is_changed=True)
        new = "\n".join(capture.lines[start - capture.first_line :]).rstrip()
        return View(screen=screen, new=_cut(new, self._config), is_changed=new != self._seen.lines[-1].rstrip())

    async def _long_output(self, start: int) -> str:
        """Output beyond what a Turn captures: it is cut inside the Sandbox."""
        text = await self._run(output_command(start, self._config.max_output_bytes), 0)
        size, _, parts = text.partition(b"\n")
        head, _, tail = parts.partition(b"\0")
        if not tail:
            return _text(head)
        return _text(head) + _omission(int(size), self._config) + _text(tail)

    async def _run(self, command: str, limit_s: float) -> bytes:
        result = await self._sandbox.exec(command, timeout_s=limit_s + _GRACE_S)
        if result.exit_code == 124:
            raise SandboxDied(f"the terminal did not answer within {limit_s + _GRACE_S:g} s")
        if result.exit_code:
            raise SandboxDied(f"the terminal is gone: {_message(result)}")
        return result.stdout


def _read_capture(stdout: bytes, height: int) -> Capture:
    """Raises SandboxDied when it is not what tmux prints: the policy has replaced the session."""
    state, _, text = _text(stdout).partition("\n")
    fields = state.split(" ", 3)
    if len(fields) < 4 or not all(field.isascii() and field.isdigit() for field in fields[:3]):
        raise SandboxDied(f"the terminal answered {state[:200]!r}")
    history_size, cursor_row, is_alternate = (int(field) for field in fields[:3])
    num_lines = min(history_size, CAPTURED_LINES) + height
    lines = [line.rstrip() for line in text.split("\n")][:num_lines]
    return Capture(
        history_size=history_size,
        cursor_row=cursor_row,
        is_alternate=bool(is_alternate),
        lines=(*lines, *[""] * (num_lines - len(lines))),
        height=height,
        title=fields[3],
    )


def _cut(text: str, config: TerminalConfig) -> str:
    data = text.encode()
    if len(data) <= config.max_output_bytes:
        return text
    half = config.max_output_bytes // 2
    return _text(data[:half]) + _omission(len(data), config) + _text(data[-half:])


def _omission(size: int, config: TerminalConfig) -> str:
    return config.omission.format(max_bytes=config.max_output_bytes, num_bytes=size - config.max_output_bytes)


def _text(data: bytes) -> str:
    """Text of bytes that may be cut within a character."""
    return data.decode("utf-8", errors="ignore")


def _message(result: ExecResult) -> str:
    return _text(result.stderr).strip()[-500:] or "no message"
