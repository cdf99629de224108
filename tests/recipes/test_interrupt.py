"""Signals and errors of a real process that runs a recipe's coroutine."""

import asyncio
import os
import pty
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from recipes.interrupt import finish

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.slow  # a fresh process for each

HEADER = """
import asyncio, signal, sys, time
from pathlib import Path
from envs.errors import SandboxRefused
from recipes.interrupt import run_until_interrupted
from recipes.run import Run
directory = Path(sys.argv[1])
"""

WAITING = """
async def main():
    with Run.open(directory, {}) as run:
        try:
            for step in run.steps(10**6):
                run.log(step, {"loss": 1.0})
                if step == 3:
                    print("ready", flush=True)
                await asyncio.sleep(0.01)
        finally:
            run.summary({"finalised": True})
            {last}
sys.exit(run_until_interrupted(main()))
"""


def _program(last: str = "pass") -> str:
    return HEADER + WAITING.replace("{last}", last)


def _start(program: str, directory: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", program, str(directory)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _run(body: str, directory: Path) -> subprocess.CompletedProcess[str]:
    program = f"{HEADER}\nasync def main():\n    {body}\nsys.exit(run_until_interrupted(main()))\n"
    return subprocess.run(
        [sys.executable, "-c", program, str(directory)], cwd=ROOT, capture_output=True, text=True, timeout=60
    )


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_ends_a_run_cleanly_with_everything_saved(tmp_path: Path, number: signal.Signals):
    process = _start(_program(), tmp_path)
    assert _line(process) == "ready\n"
    process.send_signal(number)
    _, stderr = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "stopping: saving what is done" in stderr
    assert f"interrupted: what is done so far is saved in {tmp_path}" in stderr
    assert "Traceback" not in stderr
    assert "finalised" in (tmp_path / "summary.json").read_text()
    assert (tmp_path / "metrics.jsonl").read_text().count("\n") >= 4


def test_the_second_signal_ends_even_a_run_whose_finalisation_is_stuck(tmp_path: Path):
    process = _start(_program(last="print('stuck', flush=True); time.sleep(60)"), tmp_path)
    assert _line(process) == "ready\n"
    process.send_signal(signal.SIGINT)
    assert _line(process) == "stuck\n"
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=10)
    assert process.returncode == -signal.SIGINT


def test_a_signal_handler_that_a_library_replaced_still_ends_cleanly(tmp_path: Path):
    replaced = _program().replace("try:", "signal.signal(signal.SIGTERM, lambda n, f: sys.exit(n))\n        try:", 1)
    process = _start(replaced, tmp_path)
    assert _line(process) == "ready\n"
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    assert process.returncode == 130
    assert "finalised" in (tmp_path / "summary.json").read_text()


@pytest.mark.parametrize(
    ("body", "line"),
    [
        ("raise ValueError('group_size must be >= 2,\\n got 1')", "error: group_size must be >= 2, got 1\n"),
        ("raise SandboxRefused('no user namespaces: sysctl ...')", "error: no user namespaces: sysctl ...\n"),
        ("raise ExceptionGroup('g', [ValueError('a'), ExceptionGroup('h', [ValueError('a')])])", "error: a\n"),
    ],
)
def test_an_expected_error_is_one_line(tmp_path: Path, body: str, line: str):
    done = _run(body, tmp_path)
    assert (done.returncode, done.stderr) == (2, line)


@pytest.mark.parametrize(
    "body", ["raise KeyError('bug')", "raise ExceptionGroup('g', [ValueError('a'), KeyError('bug')])"]
)
def test_a_bug_is_a_traceback(tmp_path: Path, body: str):
    done = _run(body, tmp_path)
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert "KeyError: 'bug'" in done.stderr


def test_a_run_that_ends_returns_zero(tmp_path: Path):
    assert _run("pass", tmp_path).returncode == 0


def test_on_a_terminal_progress_is_a_bar_with_rate_and_eta(tmp_path: Path):
    program = f"""{HEADER}
import logging
async def main():
    with Run.open(directory, {{}}) as run, run.progress("harvesting", total=20) as bar:
        for index in range(20):
            await asyncio.sleep(0.05)
            bar.advance(note="solved 0.5")
            if index == 10:
                logging.getLogger("recipes").info("a log line")
sys.exit(run_until_interrupted(main()))
"""
    parent, child = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)], cwd=ROOT, stderr=child, env={**os.environ, "TERM": "xterm"}
    )
    os.close(child)
    shown = b""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            shown += os.read(parent, 65536)
        except OSError:  # the other end is closed
            break
    os.close(parent)
    assert process.wait(timeout=10) == 0
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown.decode())
    assert re.search(r"harvesting .*\d+/20 .*/s .*solved 0.5", text)
    assert "INFO recipes: a log line\r\n" in text, "log lines pass above the bar, whole"
    assert "harvesting 20/20 (100%)" in text


async def test_finish_lets_work_end_before_a_cancellation_takes_effect() -> None:
    done = []

    async def work() -> None:
        await asyncio.sleep(0.05)
        done.append("work")

    caller = asyncio.create_task(finish(work()))
    await asyncio.sleep(0.01)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert done == ["work"]
