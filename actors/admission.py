"""Admission by server load: how many rollouts run at once, between a floor and `max_rollouts`.

Invariant: the limit moves by one rule, additive up and multiplicative down, and never leaves its range. Called by
recipes beside a run; `next_limit` is pure.

The buffer's permits bound how many Groups are ahead of the learner; this bounds how many of those run. More rollouts
than the servers can hold gain nothing: each waits longer for every Turn, so whole Groups come later and older. With
timed stages, 192 rollouts on 12 busy slots made a step 1.14 times its bound at staleness 2, and 108 made it 1.06.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from actors.slots import Slots

logger = logging.getLogger(__name__)

DOWN = 0.9
"""Factor of the limit while requests queue."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionConfig:
    """How the number of running rollouts follows the servers' queue."""

    every_s: float = 0.0
    """Seconds between looks at the servers; 0 keeps the number at max_rollouts."""
    least_rollouts: int = 8
    """Never fewer than these."""
    queue_share: float = 0.5
    """Requests may queue up to this share of those that run; beyond it, fewer rollouts run."""

    def __post_init__(self) -> None:
        if self.every_s < 0 or self.least_rollouts < 1 or self.queue_share <= 0:
            raise ValueError(
                f"every_s must be >= 0, least_rollouts >= 1 and queue_share > 0, got {self.every_s}, "
                f"{self.least_rollouts}, {self.queue_share}"
            )


def next_limit(limit: int, *, running: float, waiting: float, is_full: bool, most: int, config: AdmissionConfig) -> int:
    """The limit after one look: a tenth less while more than the share of `running` is `waiting`, else a tenth of the
    range more where every slot `is_full`, else what it was.

    limit 100 of 8 to 200: 30 running and 20 waiting -> 90; 30 and 10, full -> 119; 30 and 10, not full -> 100.
    """
    least = min(config.least_rollouts, most)
    if waiting > config.queue_share * running:
        return max(least, int(limit * DOWN))
    return min(most, limit + max(1, (most - least) // 10)) if is_full else limit


@asynccontextmanager
async def adapting(
    slots: Slots, config: AdmissionConfig, load: Callable[[], tuple[float, float]]
) -> AsyncIterator[None]:
    """Adapts the slots for the length of the block; what breaks that is logged when it happens."""
    task = asyncio.create_task(adapt(slots, config, load))
    task.add_done_callback(
        lambda task: task.cancelled() or logger.error("admission no longer adapts", exc_info=task.exception())
    )
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait({task})


async def adapt(slots: Slots, config: AdmissionConfig, load: Callable[[], tuple[float, float]]) -> None:
    """Looks at the servers for ever; `load` gives the requests that they (run, keep waiting)."""
    most = slots.limit
    while True:
        await asyncio.sleep(config.every_s)
        running, waiting = load()
        limit = next_limit(
            slots.limit, running=running, waiting=waiting, is_full=slots.num_waiting > 0, most=most, config=config
        )
        if limit != slots.limit:
            logger.info("rollouts=%d, were %d: %g run and %g wait", limit, slots.limit, running, waiting)
            slots.resize(limit)
