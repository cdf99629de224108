"""The watchdog: quiet while anything moves, and the end of a run in which nothing does."""

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from recipes.watchdog import STALLED, Stalled, Watchdog

ROOT = Path(__file__).parents[2]


async def test_a_run_that_stands_still_ends_and_names_who_is_stuck_after_its_handlers_ran() -> None:
    saved = []
    dog = Watchdog(0.1, progress=lambda: 1, describe=lambda: "g1 (running since version 0:2, 31 s)")
    with pytest.raises(Stalled, match=r"no progress for 0.1 s while at: taking step 3; g1 \(running since"):
        async with dog:
            dog.doing = "taking step 3"
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                await asyncio.sleep(0)
                saved.append("state")
                raise
    assert saved == ["state"]
    task = asyncio.current_task()
    assert task is not None and task.cancelling() == 0


async def test_a_run_that_moves_goes_on_whatever_it_takes() -> None:
    count = 0
    async with Watchdog(0.2, progress=lambda: count, describe=str):
        for _ in range(8):
            await asyncio.sleep(0.05)
            count += 1
    assert count == 8


async def test_other_ends_pass_through() -> None:
    with pytest.raises(KeyError):
        async with Watchdog(5, progress=lambda: 0, describe=str):
            raise KeyError("bug")


def test_a_stuck_event_loop_is_ended_with_its_stacks() -> None:
    program = """
import asyncio, sys, time
from recipes.watchdog import Watchdog
async def main():
    async with Watchdog(0.2, progress=lambda: 0, describe=str, grace_s=0.2) as dog:
        dog.doing = "training step 7"
        time.sleep(60)
asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=50)
    assert done.returncode == STALLED
    assert "the event loop is stuck at: training step 7" in done.stderr and "in main" in done.stderr
