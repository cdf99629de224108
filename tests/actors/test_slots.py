"""Slots: order, whole takes, cancellation, resizing."""

import asyncio

import pytest

from actors.slots import Slots


async def settle() -> None:
    for _ in range(4):
        await asyncio.sleep(0)


async def test_takers_are_served_whole_and_in_order() -> None:
    slots = Slots(5)
    await slots.take(3)
    large = asyncio.create_task(slots.take(4))
    small = asyncio.create_task(slots.take(1))
    await settle()
    assert not large.done() and not small.done(), "the small one would fit but came later"
    slots.give(3)
    await settle()
    assert large.done() and small.done() and slots.num_taken == 5


async def test_one_that_wants_more_than_all_runs_alone() -> None:
    slots = Slots(2)
    await slots.take(1)
    eight = asyncio.create_task(slots.take(8))
    await settle()
    assert not eight.done()
    slots.give(1)
    await settle()
    assert eight.done() and slots.num_taken == 8


async def test_a_cancelled_taker_leaves_nothing_taken_and_lets_the_next_one_in() -> None:
    slots = Slots(4)
    await slots.take(2)
    four, two = asyncio.create_task(slots.take(4)), asyncio.create_task(slots.take(2))
    await settle()
    four.cancel()
    await settle()
    assert two.done() and slots.num_taken == 4


async def test_a_taker_cancelled_after_its_grant_gives_it_back() -> None:
    slots = Slots(1)
    await slots.take(1)
    next_one = asyncio.create_task(slots.take(1))
    await settle()
    slots.give(1)  # grants it; the task has not run since
    next_one.cancel()
    await settle()
    assert slots.num_taken == 0


async def test_growing_serves_the_queue_and_shrinking_lets_takers_end() -> None:
    slots = Slots(1)
    await slots.take(1)
    waiting = asyncio.create_task(slots.take(2))
    await settle()
    slots.resize(3)
    await settle()
    assert waiting.done() and slots.num_taken == 3
    slots.resize(1)
    later = asyncio.create_task(slots.take(1))
    slots.give(2)
    await settle()
    assert not later.done()
    slots.give(1)
    await settle()
    assert later.done()


def test_a_limit_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="limit must be >= 1, got 0"):
        Slots(0)


async def test_takers_that_are_cancelled_at_once_all_end_as_cancelled() -> None:
    slots = Slots(1)
    await slots.take(1)
    takers = [asyncio.create_task(slots.take(1)) for _ in range(3)]
    await settle()
    for taker in takers:
        taker.cancel()
    assert [type(each) for each in await asyncio.gather(*takers, return_exceptions=True)] == [
        asyncio.CancelledError
    ] * 3
    assert (slots.num_taken, slots.num_waiting) == (1, 0)
