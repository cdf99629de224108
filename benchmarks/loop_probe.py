"""How late an event loop wakes a sleeper: what a control plane that shares the loop costs everybody else.

Invariant: each look at the loop is kept, so that whoever reads them chooses the window.
Called by benchmarks/control_plane.py for its driver and by benchmarks/timed_parts.py for rollout workers.
"""

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

TICK_S = 0.02
"""How often a worker's event loop is timed."""


class Tick(NamedTuple):
    """One look at an event loop; a plain tuple in JSON."""

    at: float
    """time.time()"""
    late_s: float
    """How much later than asked the sleeper woke."""
    count: int
    cpu_s: float
    """Processor time of the process until now."""


class LoopProbe:
    """Times how late the running event loop wakes a sleeper."""

    def __init__(self, count: Callable[[], int]) -> None:
        """`count()` is recorded beside each tick."""
        self._count = count
        self._ticks: list[Tick] = []
        self._task: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Starts timing, unless it has begun."""
        self._task = self._task or asyncio.create_task(self._tick())

    def end(self) -> list[Tick]:
        """Every tick."""
        if self._task is not None:
            self._task.cancel()
        return self._ticks

    async def _tick(self) -> None:
        while True:
            began = time.monotonic()
            await asyncio.sleep(TICK_S)
            late_s = time.monotonic() - began - TICK_S
            self._ticks.append(Tick(time.time(), late_s, self._count(), time.process_time()))


def percentile(values: Sequence[float], share: float) -> float:
    """The value that `share` of all are at or below: ([1, 2, 3, 4], 0.5) -> 2."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]
