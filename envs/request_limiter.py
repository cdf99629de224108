"""How many requests a process has at an endpoint at once: as many as it bears, found out by its 429s.

Invariant: never more than the limit run, and none begins during a pause that was asked for.
Called by envs/remote_sampler.py.
"""

import asyncio
import email.utils
import logging
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

logger = logging.getLogger(__name__)

_FIRST_LIMIT = 8.0
_DEFAULT_PAUSE_S = 1.0
"""After a 429 that names no time."""


class Limiter:
    """How many requests run at once: one more for each round that went well, half as many after a 429 (AIMD)."""

    def __init__(self, highest: int) -> None:
        self.limit = min(_FIRST_LIMIT, float(highest))
        self._highest = float(highest)
        self._running = 0
        self._changed = asyncio.Condition()
        self._throttled = 0.0
        self._paused_until = 0.0

    @asynccontextmanager
    async def slot(self) -> AsyncGenerator[float]:
        """Holds one of the slots; gives the time at which it was taken."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._running < int(self.limit))
            self._running += 1
        try:
            while (left_s := self._paused_until - time.monotonic()) > 0:  # noqa: ASYNC110  it may have grown
                await asyncio.sleep(left_s)
            yield time.monotonic()
        finally:
            self._running -= 1
            async with self._changed:
                self._changed.notify_all()

    def succeed(self) -> None:
        """A request went well: the limit rises by one over a whole round of them."""
        self.limit = min(self._highest, self.limit + 1 / self.limit)

    def throttle(self, began: float, pause_s: float) -> None:
        """A 429 to a request that `began` then: halves the limit, once for all that were under way, and pauses."""
        if began > self._throttled:
            self.limit = max(1.0, self.limit / 2)
            self._throttled = time.monotonic()
            logger.info("teacher answers 429: at most %d requests at once, after %.1f s", int(self.limit), pause_s)
        self._paused_until = max(self._paused_until, time.monotonic() + pause_s)


def retry_after_s(header: str | None) -> float:
    """Seconds that a Retry-After header asks for: a number, or a date."""
    if not header:
        return _DEFAULT_PAUSE_S
    try:
        return max(0.0, float(header))
    except ValueError:
        pass
    try:
        return max(0.0, email.utils.parsedate_to_datetime(header).timestamp() - time.time())
    except ValueError:
        return _DEFAULT_PAUSE_S
