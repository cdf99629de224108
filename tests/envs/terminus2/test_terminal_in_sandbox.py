"""A real tmux in a real sandbox: what is typed happens, what is shown is whole, also on a busy machine."""

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from envs.errors import SandboxDied, SandboxError
from envs.local.provider import LocalProvider
from envs.terminus2.parser import Command
from envs.terminus2.prompts import COMPACT
from envs.terminus2.terminal import Terminal, View, start_terminal
from envs.terminus2.tmux import TerminalConfig, Wait
from tests.envs.local.boxes import make_provider, make_task

pytestmark = pytest.mark.sandbox

PROMPT = replace(COMPACT.terminal, history_lines=100_000, max_output_bytes=10_000, omission="[{num_bytes}]")
DURATION = TerminalConfig(wait=Wait.DURATION)


@pytest.fixture
async def provider() -> AsyncGenerator[LocalProvider]:
    provider = make_provider()
    yield provider
    await provider.close()


@asynccontextmanager
async def terminal(provider: LocalProvider, config: TerminalConfig = PROMPT) -> AsyncGenerator[Terminal]:
    async with provider.start(make_task(memory_mb=256, storage_mb=64), owner="t") as sandbox:
        yield (await start_terminal(sandbox, config))[0]


async def press(terminal: Terminal, *keystrokes: str, duration_s: float = 0.2) -> View:
    return await terminal.type([Command(keystrokes=keys, duration_s=duration_s) for keys in keystrokes])


async def test_the_first_view_is_the_prompt(provider: LocalProvider) -> None:
    async with provider.start(make_task(memory_mb=256, storage_mb=64), owner="t") as sandbox:
        _, view = await start_terminal(sandbox, PROMPT)
    assert view == View(screen="$", new=None, is_changed=True)


@pytest.mark.parametrize(
    ("keystrokes", "new"),
    [
        (["echo hi\n"], "$ echo hi\nhi\n$"),
        (["echo a\necho b\n"], "$ echo a\na\n$ echo b\nb\n$"),
        (["echo a\n", "echo b\n"], "$ echo a\na\n$ echo b\nb\n$"),
        (["sleep 0.3; echo done\n"], "$ sleep 0.3; echo done\ndone\n$"),
        (["cat <<'X'\n#!/bin/sh\n\n  two\nX\n"], "$ cat <<'X'\n> #!/bin/sh\n>\n>   two\n> X\n#!/bin/sh\n\n  two\n$"),
        (["for i in 1 2\ndo echo $i\ndone\n"], "$ for i in 1 2\n> do echo $i\n> done\n1\n2\n$"),
        (["\n"], "$\n$"),
        (["Enter"], "$\n$"),
        (["# nothing\n"], "$ # nothing\n$"),
        (["nosuchcommand\n"], "$ nosuchcommand\nbash: nosuchcommand: command not found\n$"),
        (["echo 'open\n"], "$ echo 'open\n>"),
        (["fi\n"], "$ fi\nbash: syntax error near unexpected token `fi'\n$"),
        (["echo 'a;b'; echo c;\n"], "$ echo 'a;b'; echo c;\na;b\nc\n$"),
        (["echo 'é ✓'\n"], "$ echo 'é ✓'\né ✓\n$"),
        (["echo '#{pane_id}' $SHLVL \"\\$x\"\n"], "$ echo '#{pane_id}' $SHLVL \"\\$x\"\n#{pane_id} 1 $x\n$"),
        (["printf 'a\x16\tb\\n'\n"], "$ printf 'a     b\\n'\na       b\n$"),
        (["-x\n"], "$ -x\nbash: -x: command not found\n$"),
        (["false\n"], "$ false\n$"),
        ([""], "$"),
    ],
)
async def test_a_line_is_shown_whole_as_soon_as_the_shell_prompts(
    provider: LocalProvider, keystrokes: list[str], new: str
) -> None:
    async with terminal(provider) as term:
        began = time.monotonic()
        view = await press(term, *keystrokes, duration_s=30)
        assert view.new == new
        assert time.monotonic() - began < 10, "it waited for the duration"


async def test_many_turns_see_each_output_once(provider: LocalProvider) -> None:
    async with terminal(provider) as term:
        for k in range(60):
            assert (await press(term, f"echo {k}\n")).new == f"$ echo {k}\n{k}\n$"


async def test_keys_without_a_line_end_wait_for_the_duration_and_join(provider: LocalProvider) -> None:
    async with terminal(provider) as term:
        assert (await press(term, "echo a;", duration_s=0.5)).new == "$ echo a;"
        assert (await press(term, "echo b\n")).new == "$ echo a;echo b\na\nb\n$"


async def test_a_program_that_waits_for_input_takes_the_limit(provider: LocalProvider) -> None:
    async with terminal(provider, replace(PROMPT, patience_s=0.5)) as term:
        assert (await press(term, "cat\n")).new == "$ cat\n"[:-1]
        assert (await press(term, "hello\n")).new == "hello\nhello"
        assert (await press(term, "C-d", duration_s=30)).new == "$"
        assert (await press(term, "echo x\n", duration_s=30)).new == "$ echo x\nx\n$"


async def test_a_command_past_the_limit_is_waited_for_next_time(provider: LocalProvider) -> None:
    async with terminal(provider, replace(PROMPT, patience_s=0.3)) as term:
        assert (await press(term, "sleep 1; echo slow\n")).new == "$ sleep 1; echo slow"
        assert (await press(term, "", duration_s=30)).new == "slow\n$"
        assert (await press(term, "sleep 1\n")).is_changed
        view = await press(term, "echo typed-ahead\n", duration_s=30)
        assert view.new is not None and view.new.endswith("\ntyped-ahead\n$")


async def test_an_interrupt_brings_the_prompt_back(provider: LocalProvider) -> None:
    async with terminal(provider, replace(PROMPT, patience_s=0.3)) as term:
        await press(term, "sleep 100\n")
        assert (await press(term, "C-c", duration_s=30)).new == "^C\n$"
        await press(term, "echo half")
        assert (await press(term, "C-c", duration_s=30)).new == "$ echo half^C\n$"
        assert (await press(term, "echo x\n", duration_s=30)).new == "$ echo x\nx\n$"


async def test_long_output_is_cut_inside_and_counted(provider: LocalProvider) -> None:
    text = "$ seq 20000\n" + "".join(f"{k}\n" for k in range(1, 20001)) + "$"
    async with terminal(provider) as term:
        view = await press(term, "seq 20000\n", duration_s=30)
        assert view.new == f"{text[:5000]}[{len(text) - 10_000}]{text[-5000:]}"
        assert (await press(term, "echo on\n")).new == "$ echo on\non\n$"


async def test_output_beyond_the_history_is_shown_as_a_screen(provider: LocalProvider) -> None:
    async with terminal(provider, replace(PROMPT, history_lines=2000)) as term:
        view = await press(term, "seq 20000\n", duration_s=30)
        assert (view.new, view.screen.split("\n")[-2:]) == (None, ["20000", "$"])
        assert (await press(term, "echo on\n")).new == "$ echo on\non\n$"


async def test_a_cleared_screen_and_a_full_screen_program_are_shown_as_screens(provider: LocalProvider) -> None:
    async with terminal(provider, replace(PROMPT, patience_s=0.4)) as term:
        await press(term, "echo a\n")
        assert await press(term, "clear\n") == View(screen="$", new=None, is_changed=True)
        view = await press(term, "printf '\\e[?1049h\\e[Hfull'; read; printf '\\e[?1049l'\n", duration_s=0.3)
        assert (view.new, view.screen) == (None, "full")
        assert (await press(term, "\n")).new is None
        assert (await press(term, "echo b\n")).new == "$ echo b\nb\n$"


async def test_keystrokes_too_long_for_arguments_arrive_whole(provider: LocalProvider) -> None:
    words = "".join(f"{k:04d} " for k in range(20_000))
    body = words.replace("0 ", "0\n")
    async with terminal(provider) as term:
        await press(term, "cat > /tmp/long <<'X'\n" + body + "\nX\n", duration_s=30)
        view = await press(term, *["true " + "✓" * 1300 + "\n"] * 9, "md5sum </tmp/long; wc -c </tmp/long\n")
    assert view.new is not None and f"\n{len(body) + 1}\n$" in view.new


async def test_a_shell_that_hides_its_prompt_costs_time_and_nothing_else(provider: LocalProvider) -> None:
    async with terminal(provider, replace(PROMPT, patience_s=0.3)) as term:
        await press(term, "PS1='me: '\n")
        assert (await press(term, "echo a\n")).new == "me: echo a\na\nme:"
        await press(term, "printf '\\e]2;2\\a'; bash --norc\n")
        view = await press(term, "echo b\n")
        assert view.new is not None and "echo b\nb\n" in view.new


HOSTILE = (
    "yes\n",
    "cat /dev/urandom\n",
    "while :; do printf '\\e]2;%s\\a' '#(id)' 'R1,}' 99999999999999999999; done\n",
    "printf '\\e]2;R12345678901234567890\\a'; trap '' INT; sleep 2\n",
    "tmux resize-window -x 20 -y 5 \\; split-window\n",
    "PS1='\\[\\e]2;$RANDOM\\a\\]'\n",
    "set -u; unset __prompt\n",
    "stty raw -echo; cat\n",
    "printf '\\e[?1049h\\ec\\e[3J'\n",
    "printf '%5000s' x; printf '\\xff\\x00\\xfe'\n",
)


@pytest.mark.parametrize("keys", HOSTILE)
async def test_no_policy_makes_its_terminal_a_bug_or_holds_it_for_long(provider: LocalProvider, keys: str) -> None:
    began = time.monotonic()
    async with terminal(provider, replace(PROMPT, patience_s=0.3, history_lines=2000)) as term:
        views = [await press(term, keys), await press(term, "C-c"), await press(term, "echo b\n")]
    assert all(len((view.new or "").encode()) < 11_000 and len(view.screen.encode()) < 11_000 for view in views)
    assert time.monotonic() - began < 10


@pytest.mark.parametrize("keys", ["exit\n", "C-d", "kill -9 $$\n", "tmux kill-server\n", "pkill -9 tmux\n"])
async def test_a_policy_that_ends_its_terminal_has_ended_its_rollout(provider: LocalProvider, keys: str) -> None:
    began = time.monotonic()
    async with terminal(provider) as term:
        with pytest.raises(SandboxDied, match="the terminal"):
            await press(term, keys, duration_s=30)
            await press(term, "echo still here\n", duration_s=30)
    assert time.monotonic() - began < 10, "it waited for the duration"


async def test_duration_waits_as_long_as_it_is_told(provider: LocalProvider) -> None:
    async with terminal(provider, DURATION) as term:
        began = time.monotonic()
        view = await press(term, "echo a\n", "sleep 3; echo late\n", "", duration_s=0.4)
        assert 1.2 <= time.monotonic() - began < 3
        assert view.new is not None and view.new.endswith("sleep 3; echo late") and "late\n" not in view.new


async def test_an_image_whose_shell_overrides_the_prompt_is_refused(provider: LocalProvider) -> None:
    async with provider.start(make_task(memory_mb=256, storage_mb=64), owner="t") as sandbox:
        await sandbox.exec("echo 'PROMPT_COMMAND=; PS1=mine' > ~/.bash_profile", timeout_s=10)
        with pytest.raises(SandboxError, match="wait=duration"):
            await start_terminal(sandbox, replace(PROMPT, start_limit_s=1.0))


async def test_32_boxes_at_once_show_no_half_output(provider: LocalProvider) -> None:
    async def play(index: int) -> None:
        async with terminal(provider) as term:
            for k in range(3):
                command = f"sleep 0.05; echo done-{index}-{k}"
                view = await press(term, command + "\n", duration_s=0.1)
                assert view.new == f"$ {command}\ndone-{index}-{k}\n$"

    spinners = [await asyncio.create_subprocess_exec("bash", "-c", "while :; do :; done") for _ in range(4)]
    try:
        async with asyncio.TaskGroup() as group:
            for index in range(32):
                group.create_task(play(index))
    finally:
        for spinner in spinners:
            spinner.kill()
            await spinner.wait()
