"""Two contexts entered at once: both end with the stack, and a failure leaves none running."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from recipes.together import enter_both


@asynccontextmanager
async def part(log: list[str], name: str, *, meets: asyncio.Barrier | None = None) -> AsyncIterator[str]:
    try:
        if meets is not None:
            await asyncio.wait_for(meets.wait(), 5)
        yield name
    finally:
        log.append(f"{name} ended")


async def test_both_start_at_once_and_end_with_the_stack() -> None:
    log: list[str] = []
    both = asyncio.Barrier(2)
    async with AsyncExitStack() as stack:
        found = await enter_both(stack, part(log, "learner", meets=both), part(log, "servers", meets=both))
        assert found == ("learner", "servers") and log == []
    assert sorted(log) == ["learner ended", "servers ended"]


@pytest.mark.parametrize("has_entered", [True, False])
async def test_a_failure_is_raised_as_it_was_and_ends_the_other(has_entered: bool) -> None:
    log: list[str] = []
    never = asyncio.Barrier(2)

    @asynccontextmanager
    async def failing() -> AsyncIterator[None]:
        await asyncio.sleep(0.01)
        raise ValueError("no GPU for the learner") from TimeoutError()
        yield

    with pytest.raises(ValueError, match="no GPU") as raised:
        async with AsyncExitStack() as stack:
            await enter_both(stack, failing(), part(log, "servers", meets=None if has_entered else never))
    assert log == ["servers ended"]
    assert isinstance(raised.value.__cause__, TimeoutError)
