"""Admission by server load: the rule, and the loop around it."""

import asyncio

import pytest

from actors.admission import AdmissionConfig, adapt, next_limit
from actors.slots import Slots


@pytest.mark.parametrize(
    ("running", "waiting", "is_full", "expected"),
    [
        (30, 20, True, 90),  # 20 > 0.5 * 30: a tenth less
        (30, 10, True, 119),  # slots are short and the queue is not: (200 - 8) // 10 more
        (30, 10, False, 100),  # nobody waits for a slot
        (0, 1, True, 90),  # servers that sample nothing only queue
    ],
)
def test_the_limit_falls_with_the_queue_and_rises_where_slots_are_short(
    running: float, waiting: float, is_full: bool, expected: int
) -> None:
    config = AdmissionConfig(least_rollouts=8)
    assert next_limit(100, running=running, waiting=waiting, is_full=is_full, most=200, config=config) == expected


def test_the_limit_stays_in_its_range() -> None:
    config = AdmissionConfig(least_rollouts=8)
    assert next_limit(8, running=1, waiting=9, is_full=True, most=200, config=config) == 8
    assert next_limit(199, running=9, waiting=0, is_full=True, most=200, config=config) == 200
    assert next_limit(4, running=1, waiting=9, is_full=True, most=4, config=config) == 4, "most is below the floor"


async def test_a_queue_at_the_servers_lowers_the_slots_and_its_end_raises_them() -> None:
    slots, loads = Slots(100), [(10.0, 90.0)] * 2 + [(10.0, 0.0)] * 9
    seen: list[int] = []

    def load() -> tuple[float, float]:
        seen.append(slots.limit)
        return loads[len(seen) - 1]

    await slots.take(100)
    waiting = asyncio.create_task(slots.take(8))
    with pytest.raises(IndexError):  # the loads are over
        await adapt(slots, AdmissionConfig(every_s=1e-4, least_rollouts=10), load)
    assert seen == [100, 90, 81, 90, 99, 100, 100, 100, 100, 100, 100, 100]
    waiting.cancel()


@pytest.mark.parametrize("wrong", [{"every_s": -1.0}, {"least_rollouts": 0}, {"queue_share": 0.0}])
def test_an_impossible_admission_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="every_s must be >= 0"):
        AdmissionConfig(**wrong)  # pyright: ignore[reportArgumentType]
