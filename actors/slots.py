"""Slots: how many rollouts may run at once, as a number that may change while they run.

Invariant: at most `limit` slots are taken, but for one taker that wants more than all and then has them alone; takers
are served whole and in order, so none holds a part of what it needs. Called by actors/rollout_pool.py; one event loop.
"""

import asyncio
from collections import deque


class Slots:
    """A resizable count of slots with a queue of takers."""

    def __init__(self, limit: int) -> None:
        if limit < 1:
            raise ValueError(f"limit must be >= 1, got {limit}")
        self.limit = limit
        self.num_taken = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @property
    def num_waiting(self) -> int:
        """Takers in the queue."""
        return len(self._waiting)

    async def take(self, count: int) -> None:
        """Returns once `count` slots are the caller's, after everybody who came before; takes none when cancelled.

        Without a deadline of its own: whoever holds slots gives them back by its own deadline.
        """
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((count, granted))
        self._serve()
        try:
            await granted
        except asyncio.CancelledError:
            if granted.done() and not granted.cancelled():
                self.give(count)
            else:
                if (count, granted) in self._waiting:  # `_serve` passes over a taker that is gone
                    self._waiting.remove((count, granted))
                self._serve()
            raise

    def give(self, count: int) -> None:
        """Takes `count` slots back."""
        self.num_taken -= count
        self._serve()

    def resize(self, limit: int) -> None:
        """Changes how many slots there are; with fewer, those taken beyond the new limit run to their end."""
        if limit < 1:
            raise ValueError(f"limit must be >= 1, got {limit}")
        self.limit = limit
        self._serve()

    def _serve(self) -> None:
        while self._waiting:
            count, granted = self._waiting[0]
            if self.num_taken and self.num_taken + count > self.limit:
                return
            self._waiting.popleft()
            if not granted.cancelled():
                self.num_taken += count
                granted.set_result(None)
