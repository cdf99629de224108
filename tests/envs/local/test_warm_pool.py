"""The warm pool over boxes that are none: what it leaves when it is closed at a bad moment, or cannot write a lease."""

import asyncio
import logging
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, cast

import pytest

from envs.errors import SandboxError
from envs.local.boxes import BoxSize
from envs.local.cgroups import BoxLimits
from envs.local.warm import WarmPool

SMALL, LARGE = (
    BoxSize(disk_bytes=size, limits=BoxLimits(memory_bytes=size, pids=1, cpus=1.0)) for size in (1 << 20, 2 << 20)
)


class Box:
    def __init__(self) -> None:
        self.is_stopped = False

    async def stop(self) -> None:
        self.is_stopped = True
        await asyncio.sleep(0)


class Machine:
    """Starts boxes and holds their leases."""

    def __init__(self) -> None:
        self.boxes: list[Box] = []
        self.leased: list[Box] = []
        self.is_full = False

    async def start(self, size: BoxSize) -> Any:
        self.boxes.append(Box())
        return self.boxes[-1]

    @contextmanager
    def lease(self, box: Any) -> Generator[None]:
        if self.is_full:
            raise SandboxError("write lease: No space left on device; give a writable cache_dir")
        self.leased.append(box)
        yield
        self.leased.remove(box)


async def test_a_pool_that_is_closed_while_a_box_makes_room_leaves_no_lease() -> None:
    machine = Machine()
    pool = WarmPool(machine.start, machine.lease, most=1)
    for size in (SMALL, SMALL, LARGE, LARGE):
        pool.refill(size)
        for _ in range(3):
            await asyncio.sleep(0)
            if machine.boxes and machine.boxes[0].is_stopped:
                break  # the small one is being stopped for a large one
    assert machine.boxes[0].is_stopped and machine.leased
    await pool.close()
    assert machine.leased == [] and all(box.is_stopped for box in machine.boxes)


async def test_a_box_whose_lease_cannot_be_written_is_ended_and_told_of(caplog: pytest.LogCaptureFixture) -> None:
    machine = Machine()
    machine.is_full = True
    pool = WarmPool(machine.start, machine.lease, most=2)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            pool.refill(SMALL)
        filling = cast(Any, pool)._filling
        await asyncio.wait({filling})
    assert filling.exception() is None and [box.is_stopped for box in machine.boxes] == [True]
    assert "no box was started ahead: write lease: No space left" in caplog.text
    await pool.close()
