r"""Command lines that make tmux work inside a Sandbox: one to start it, one for each Turn.

Invariant: pure functions; one command line does everything a Turn needs, so a Turn costs one exec. Called by
envs/terminus2/terminal.py.

How a Turn waits for the shell (Wait.PROMPT). Each primary or secondary prompt counts itself up in the pane's title,
through an escape sequence that is part of the prompt (`PS1`, `PS2`); before a command runs, `PS0` puts an R before the
number. The title travels in the terminal's own stream, after all that the command wrote, so when tmux knows title k
everything up to the k-th prompt is on its screen: there is no race, however slow the machine. A line that is typed
brings one prompt (continued lines bring a secondary one, a command that is already running brings one more), so tmux
itself knows the title to wait for; a hook on the title wakes the waiting client, which then captures. Lines that a
program reads bring no prompt, and no prompt means waiting for the time limit, as terminus-2 always does.
"""

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from envs.terminus2.parser import Command

SESSION = "terminus-2"
CAPTURED_LINES = 1000
"""Lines of history that a Turn captures beside the screen; longer output costs a second exec."""

_MAX_DURATION_S = 60.0
_MAX_ARGUMENT_BYTES = 4096  # longer keystrokes go by file: tmux refuses messages over 16 KiB
_MAX_CLIENT_BYTES = 12_000  # of one tmux command line
_ENTER_KEYS = frozenset({"Enter", "KPEnter", "C-m", "C-j"})
_ENDING_KEYS = frozenset({"C-c", "C-d", "C-z", "C-\\", "^C", "^D", "^Z", "\x03", "\x04", "\x1a", "\x1c"})


class Wait(StrEnum):
    """When a Turn's keystrokes count as done."""

    DURATION = "duration"
    """After the given duration, whatever happens: terminus-2 to the letter. Any tmux."""
    PROMPT = "prompt"
    """As soon as the shell prompts again, else after the duration or `patience_s`. tmux 3.2 or later."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TerminalConfig:
    """What the policy's terminal is like."""

    width: int = 160
    """Columns."""
    height: int = 40
    """Rows."""
    history_lines: int = 100_000
    """Scrollback. terminus-2 sets 10,000,000, with which `yes` takes a small Sandbox's memory in seconds."""
    wait: Wait = Wait.DURATION
    patience_s: float = 5.0
    """Wait.PROMPT: a line that was typed may take at least this long before its half output is shown."""
    start_limit_s: float = 30.0
    """Wait.PROMPT: the first prompt must come within this."""
    max_output_bytes: int = 10_000
    """A longer output is cut in its middle."""
    omission: str = "\n[... output limited to {max_bytes} bytes; {num_bytes} bytes left out here ...]\n"
    """Stands where the output is cut."""
    shell_prompt: str | None = None
    """Wait.PROMPT: replaces the shell's prompt, to spend fewer tokens on it ("$ "). None keeps it."""

    def __post_init__(self) -> None:
        if min(self.width, self.height, self.history_lines) < 1:
            raise ValueError(f"width, height and history_lines must be >= 1, got {self}")
        if self.shell_prompt is not None and self.wait is not Wait.PROMPT:
            raise ValueError("shell_prompt needs wait=prompt")


def start_command(config: TerminalConfig) -> str:
    """Starts tmux with a login shell, waits until the shell prompts, and captures."""
    options = [
        "start-server",
        f"set -g history-limit {config.history_lines}",
        "set -g default-terminal xterm-256color",
    ]
    session = f"new-session -d -s {SESSION} -x {config.width} -y {config.height} bash --login"
    if config.wait is Wait.DURATION:
        return f"{_tmux([*options, session], '-f /dev/null')} && sleep 1; {_tmux(_capture())}"
    wake = _quote("if -F '#{==:#{pane_title},1}' 'wait-for -S t0'")
    is_over = _quote(f"if -F '#{{==:#{{hook_session_name}},{SESSION}}}' kill-server")  # frees a client that waits
    hooks = [f"set-hook -g pane-title-changed {wake}", f"set-hook -g session-closed {is_over}"]
    steps = [*options, *hooks, _timer("t0", config.start_limit_s), session, "wait-for t0", *_capture()]
    return f"exec {_tmux(steps, '-f /dev/null')}"


def start_environment(config: TerminalConfig) -> dict[str, str]:
    """Variables for the start command, and so for the shell: UTF-8, and the prompts where they are waited for."""
    prompts = {"PROMPT_COMMAND": _prompt_setting(config.shell_prompt)} if config.wait is Wait.PROMPT else {}
    return {"LC_CTYPE": "C.UTF-8", **prompts}


def turn_command(config: TerminalConfig, turn: int, commands: Sequence[Command], files: Sequence[str | None]) -> str:
    """Types the commands, each followed by its wait, and captures.

    `files`: for each command the path inside the Sandbox that holds its keystrokes, or None to give them here.
    """
    parts: list[str] = []
    steps: list[str] = []
    for k, (command, file) in enumerate(zip(commands, files, strict=True)):
        send = _send(command.keystrokes, file)
        if config.wait is Wait.DURATION:
            parts += [*([_tmux(send)] if send else []), f"sleep {wait_limit_s(config, command):g}"]
            continue
        step = [*_aim(config, command, f"t{turn}.{k}"), *send, *_await(command, f"t{turn}.{k}")]
        if sum(len(words.encode()) for words in steps + step) > _MAX_CLIENT_BYTES:
            parts.append(_tmux(steps))
            steps = []
        steps += step
    return " && ".join([*parts, f"exec {_tmux([*steps, *_capture()])}"])


def output_command(first_line: int, max_bytes: int) -> str:
    """Prints the size of the text from an absolute line on (0 is the oldest), then the text: its halves, NUL between,
    when it is longer than max_bytes.
    """
    half = max_bytes // 2
    history = _tmux([_display("#{history_size}")])
    return f"""\
h=$({history}) && x=$({_tmux([_capture_pane(f"$(({first_line} - h))")])}) || exit 1
LC_ALL=C
echo ${{#x}}
if ((${{#x}} > {max_bytes})); then printf '%s\\0%s' "${{x:0:{half}}}" "${{x: -{half}}}"; else printf %s "$x"; fi"""


def wait_limit_s(config: TerminalConfig, command: Command) -> float:
    """Seconds that a command may be waited for."""
    duration_s = min(command.duration_s, _MAX_DURATION_S)
    if config.wait is Wait.PROMPT and (num_lines(command.keystrokes) or command.keystrokes in _ENDING_KEYS):
        return max(duration_s, config.patience_s)
    return duration_s


def needs_file(keystrokes: str) -> bool:
    """Whether keystrokes are too long for an argument, or hold a byte that no argument can."""
    return len(key_bytes(keystrokes)) > _MAX_ARGUMENT_BYTES or "\0" in keystrokes


def key_bytes(keystrokes: str) -> bytes:
    """Keystrokes as typed; half a surrogate pair, which JSON can spell, becomes a question mark."""
    return keystrokes.encode("utf-8", errors="replace")


def num_lines(keystrokes: str) -> int:
    """How many lines the keystrokes enter."""
    return 1 if keystrokes in _ENTER_KEYS else len(re.findall(r"[\r\n]", keystrokes))


def _prompt_setting(shell_prompt: str | None) -> str:
    """Runs once, before the first prompt and so after the start-up files: prompts that count themselves."""
    count = r"'\[\e]2;$((++__prompt))\a\]'"
    primary = "$PS1" if shell_prompt is None else shlex.quote(shell_prompt)
    running = r"'\e]2;R$((__prompt))\a'"
    return f"__prompt=0 PS1={primary}{count} PS2='> '{count} PS0={running}; unset PROMPT_COMMAND"


def _aim(config: TerminalConfig, command: Command, channel: str) -> list[str]:
    """Sets the title to wait for, from the title of now, and has tmux signal the channel then or at the limit."""
    lines = num_lines(command.keystrokes)
    if command.keystrokes in _ENDING_KEYS:
        add = "1"
    elif lines or not command.keystrokes:
        add = f"#{{?#{{m:R*,#{{pane_title}}}},{lines + 1},{lines}}}"
    else:
        add = ""  # text without a line end brings no prompt
    count = f"#{{e|+:#{{s/R//:pane_title}},{add}}}"
    target = f"#{{?#{{m/r:^R?[0-9]+$,#{{pane_title}}}},{count},none}}" if add else "none"
    wake = f"if -F '#{{==:#{{pane_title}},#{{@target}}}}' 'wait-for -S {channel}'"
    return [
        f"set -F -t {SESSION} @target {_quote(target)}",
        f"set-hook -t {SESSION} pane-title-changed {_quote(wake)}",
        _timer(channel, wait_limit_s(config, command)),
    ]


def _await(command: Command, channel: str) -> list[str]:
    """Waits for the channel, or not at all when nothing was typed and the shell is at its prompt."""
    if command.keystrokes:
        return [f"wait-for {channel}"]
    is_there = _quote("#{==:#{pane_title},#{@target}}")
    return [f"if -F -t {SESSION} {is_there} {_quote(f'wait-for -S {channel}')}", f"wait-for {channel}"]


def _send(keystrokes: str, file: str | None) -> list[str]:
    if file is not None:
        return [f"load-buffer -b keys {shlex.quote(file)}", f"paste-buffer -d -r -b keys -t {SESSION}"]
    if not keystrokes:
        return []
    return [f"send-keys -t {SESSION} -- {_quote(key_bytes(keystrokes).decode())}"]


def _capture() -> list[str]:
    """State first: history size, cursor row, alternate screen or not, title; then the text."""
    return [_display("#{history_size} #{cursor_y} #{alternate_on} #{pane_title}"), _capture_pane(f"-{CAPTURED_LINES}")]


def _display(text: str) -> str:
    return f"display-message -p -t {SESSION} {_quote(text)}"


def _capture_pane(start: str) -> str:
    return f"capture-pane -p -t {SESSION} -S {start}"


def _timer(channel: str, seconds: float) -> str:
    return f"run-shell -b -d {seconds:g} -C {_quote(f'wait-for -S {channel}')}"


def _tmux(steps: Sequence[str], flags: str = "") -> str:
    return f"tmux -u {flags} " + r" \; ".join(steps)


def _quote(text: str) -> str:
    """For bash, and for tmux, which takes a semicolon at an argument's end as the end of its command."""
    return shlex.quote(text[:-1] + "\\;" if text.endswith(";") else text)
