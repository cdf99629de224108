"""Terminals: what starting one and playing a Turn in it costs, with many sandboxes alive at once.

    python -m benchmarks.terminal --boxes 64

Prints seconds, Turns a second, and how many views were not whole (which must be 0).
"""

import argparse
import asyncio
import time
from collections.abc import Awaitable, Iterable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TypeVar

from envs.local.provider import LocalProvider
from envs.task import Environment, Limits, Provenance, Task, VerifierSpec
from envs.terminus2.parser import Command
from envs.terminus2.prompts import COMPACT
from envs.terminus2.terminal import Terminal, start_terminal

T = TypeVar("T")

COMMANDS = {"true": "", "echo hi > a.txt": "", "grep -c hi a.txt": "\n1", "sleep 0.05; echo done": "\ndone"}
"""Command to what it prints."""
TASK = Task(
    id="benchmark",
    instruction="",
    environment=Environment(network_mode="no-network"),
    verifier=VerifierSpec(),
    limits=Limits(),
    provenance=Provenance(),
    path=Path("/nonexistent"),
)


async def main(num_boxes: int, num_turns: int) -> None:
    """Starts the boxes, then plays each command in all of them at once."""
    provider = LocalProvider()
    async with AsyncExitStack() as stack:
        stack.push_async_callback(provider.close)
        boxes, seconds = await _timed(
            stack.enter_async_context(provider.start(TASK, owner=f"b{k}")) for k in range(num_boxes)
        )
        print(f"{num_boxes} boxes started in {seconds:.2f} s")
        started, seconds = await _timed(start_terminal(box, COMPACT.terminal) for box in boxes)
        print(f"{num_boxes} terminals started in {seconds:.2f} s: {seconds * 1000 / num_boxes:.1f} ms each")
        for command, output in COMMANDS.items():
            broken, seconds = await _timed(_play(terminal, command, output, num_turns) for terminal, _ in started)
            rate = num_boxes * num_turns / seconds
            print(f"{command:24} {rate:6.0f} turns/s, {sum(broken)} of {num_boxes * num_turns} views not whole")


async def _play(terminal: Terminal, command: str, output: str, num_turns: int) -> int:
    """How many of the Turns showed anything but the command and its whole output."""
    expected = f"$ {command}{output}\n$"
    views = [await terminal.type([Command(keystrokes=f"{command}\n", duration_s=1.0)]) for _ in range(num_turns)]
    return sum(view.new != expected for view in views)


async def _timed(calls: Iterable[Awaitable[T]]) -> tuple[list[T], float]:
    began = time.monotonic()
    return list(await asyncio.gather(*calls)), time.monotonic() - began


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--boxes", type=int, default=64, help="sandboxes alive at once")
    parser.add_argument("--turns", type=int, default=5, help="turns of each command in each")
    arguments = parser.parse_args()
    asyncio.run(main(arguments.boxes, arguments.turns))
