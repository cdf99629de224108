"""The gate in front of creating Sandboxes, on a clock that the tests set."""

import asyncio

import pytest

from envs.creation import CreationConfig, RateGate
from envs.errors import SandboxError


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def gate(clock: Clock, **config: float | int) -> RateGate:
    return RateGate(CreationConfig(**config), clock=clock)  # pyright: ignore[reportArgumentType]


def test_a_burst_passes_and_the_rest_comes_at_the_rate() -> None:
    clock = Clock()
    limited = gate(clock, per_s=2.0, burst=3)
    assert [limited.try_acquire(f"p{k}") for k in range(4)] == [0, 0, 0, 0.5]
    clock.now += 0.25
    assert limited.try_acquire("p4") == 0.25
    clock.now += 0.25
    assert [limited.try_acquire("p4"), limited.try_acquire("p5")] == [0, 0.5]
    clock.now += 100
    assert [limited.try_acquire(f"q{k}") for k in range(4)] == [0, 0, 0, 0.5], "a quiet time saves up the burst only"


def test_so_many_at_once_and_a_release_admits_the_next() -> None:
    clock = Clock()
    limited = gate(clock, max_at_once=2, permit_s=60.0)
    assert [limited.try_acquire(name) for name in "abc"] == [0, 0, 60]
    limited.release("a")
    assert limited.try_acquire("c") == 0


def test_the_permit_of_a_dead_worker_ends_by_itself() -> None:
    clock = Clock()
    limited = gate(clock, max_at_once=1, permit_s=60.0)
    assert [limited.try_acquire("dead"), limited.try_acquire("next")] == [0, 60]
    clock.now += 60
    assert limited.try_acquire("next") == 0


async def test_a_pause_holds_everybody_and_a_shorter_one_does_not_end_it() -> None:
    clock = Clock()
    limited = gate(clock)
    await limited.pause(30)
    await limited.pause(5)
    assert [limited.try_acquire("a"), limited.try_acquire("b")] == [30, 30]
    clock.now += 30
    assert [limited.try_acquire("a"), limited.try_acquire("b")] == [0, 0]


async def test_a_release_wakes_who_waits() -> None:
    limited = RateGate(CreationConfig(max_at_once=1, permit_s=1000.0))
    order: list[str] = []

    async def create(name: str) -> None:
        async with limited.admit():
            order.append(f"{name} in")
            await asyncio.sleep(0)
            order.append(f"{name} out")

    async with asyncio.timeout(10):
        await asyncio.gather(create("a"), create("b"), create("c"))
    assert order == ["a in", "a out", "b in", "b out", "c in", "c out"]


async def test_a_creation_that_is_never_admitted_is_a_sandbox_error() -> None:
    limited = RateGate(CreationConfig(wait_s=0.01))
    await limited.pause(60)
    with pytest.raises(SandboxError, match=r"not admitted within 0\.01 s"):
        async with limited.admit():
            raise AssertionError("was admitted")


async def test_a_creation_cancelled_while_it_waits_holds_nothing() -> None:
    limited = RateGate(CreationConfig(max_at_once=1))
    async with limited.admit():
        waiting = asyncio.create_task(limited.acquire("cancelled"))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
    assert limited.try_acquire("next") == 0


def test_limits_must_be_positive() -> None:
    with pytest.raises(ValueError, match="creation per_s must be > 0, got 0"):
        CreationConfig(per_s=0)
