"""The warm pool: boxes that were started before anybody asked, of the size that is asked for now.

Invariant: at most `most` boxes wait, each under a lease; one that ended while it waited is given to nobody. They are
started after a start that was served, one at a time, and never for a size that was asked for only once: Tasks of many
sizes would end each other's. Called by envs/local/provider.py.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, ExitStack

from envs.errors import SandboxError
from envs.local.boxes import BoxSize
from envs.local.sandbox import LocalSandbox

logger = logging.getLogger(__name__)


class WarmPool:
    """`start` makes a bare box, within the provider's limits; `lease` holds it while it waits."""

    def __init__(
        self,
        start: Callable[[BoxSize], Awaitable[LocalSandbox]],
        lease: Callable[[LocalSandbox], AbstractContextManager[None]],
        *,
        most: int,
    ) -> None:
        self._start = start
        self._lease = lease
        self._most = most
        self._waiting: list[tuple[BoxSize, LocalSandbox, ExitStack]] = []
        self._last: BoxSize | None = None
        self._filling: asyncio.Task[None] | None = None

    async def take(self, size: BoxSize) -> LocalSandbox | None:
        """A box of that size that still lives, the caller's to stop; None when none waits."""
        while waiting := next((each for each in self._waiting if each[0] == size), None):
            self._waiting.remove(waiting)  # before anything is awaited: others take too
            _, sandbox, lease = waiting
            lease.close()
            if sandbox.connection.is_open:
                return sandbox
            await sandbox.stop()
        return None

    def refill(self, size: BoxSize) -> None:
        """Has boxes of that size started in the background, if the start before asked for the same."""
        is_repeated, self._last = size == self._last, size
        is_busy = self._filling is not None and not self._filling.done()
        if self._most and is_repeated and not is_busy:
            self._filling = asyncio.create_task(self._fill())

    async def close(self) -> None:
        """Ends every box that waits."""
        if self._filling is not None:
            self._filling.cancel()
            await asyncio.gather(self._filling, return_exceptions=True)
        while self._waiting:
            await self._end_oldest()

    async def _fill(self) -> None:
        """Goes on while the size that is wanted changes or its boxes are taken."""
        while (size := self._last) and sum(each[0] == size for each in self._waiting) < self._most:
            if len(self._waiting) >= self._most:
                await self._end_oldest(but=size)
            try:
                self._waiting.append((size, *await self._start_leased(size)))
            except SandboxError as error:
                logger.warning("no box was started ahead: %s", error)  # whoever starts one next is told
                return

    async def _start_leased(self, size: BoxSize) -> tuple[LocalSandbox, ExitStack]:
        sandbox, lease = await self._start(size), ExitStack()
        try:
            lease.enter_context(self._lease(sandbox))
        except BaseException:
            await sandbox.stop()
            raise
        return sandbox, lease

    async def _end_oldest(self, *, but: BoxSize | None = None) -> None:
        oldest = next(each for each in self._waiting if each[0] != but)
        self._waiting.remove(oldest)
        try:
            await oldest[1].stop()
        finally:
            oldest[2].close()
