"""Admission to an engine: how many requests decode at once, and which of those that wait comes next.

Invariant: a request enters when a slot is free and the KV cache has room for its prompt, lowest priority number first;
an idle engine admits anything. Held by actors/inference_engine.py; pure asyncio, told of the cache by `observe`.
"""

import asyncio
import heapq
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

KV_HIGH = 0.95
"""Share of the KV cache up to which prompts are admitted; the rest is for the tokens that running requests add."""
KV_LOW = 0.8
"""Below this share the limit that preemptions lowered rises again."""


class Admission:
    """Slots of one engine."""

    def __init__(self, max_running: int, kv_tokens: int) -> None:
        """`kv_tokens`: capacity of the KV cache, in tokens."""
        self._max_running = max_running
        self._kv_tokens = kv_tokens
        self._numbers = itertools.count()
        self._waiting: list[tuple[int, int, int, asyncio.Future[None]]] = []
        """A heap of (priority, arrival, tokens, admitted)."""
        self._unseen = [0, 0]
        """Prompt tokens admitted before and since the last report, which may not be in its usage yet."""
        self.num_running = 0
        self.limit = max_running
        """Requests that may run at once: what preemptions left of `max_running`."""
        self.kv_usage = 0.0
        """Share of the KV cache in use, as last reported."""
        self.num_preemptions = 0

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a slot."""
        return sum(not admitted.done() for _, _, _, admitted in self._waiting)

    @asynccontextmanager
    async def slot(self, priority: int, num_tokens: int) -> AsyncIterator[None]:
        """Waits for a slot for a prompt of `num_tokens`, and holds it for the length of the block."""
        admitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (priority, next(self._numbers), num_tokens, admitted))
        self._admit()
        try:
            await admitted
            yield
        finally:
            if admitted.done() and not admitted.cancelled():
                self.num_running -= 1
            admitted.cancel()
            self._admit()

    def observe(self, kv_usage: float, num_preempted: int) -> None:
        """One engine step: the share of the KV cache in use, and how many requests it had to put back."""
        self.kv_usage = kv_usage
        self.num_preemptions += num_preempted
        self._unseen = [self._unseen[1], 0]
        if num_preempted:
            self.limit = max(1, self.num_running - num_preempted)
        elif kv_usage < KV_LOW and self.limit < self._max_running:
            self.limit += 1
        self._admit()

    def _admit(self) -> None:
        while self._waiting:
            _, _, num_tokens, admitted = self._waiting[0]
            if not admitted.done():
                if not self._has_room(num_tokens):
                    return
                self.num_running += 1
                self._unseen[1] += num_tokens
                admitted.set_result(None)
            heapq.heappop(self._waiting)

    def _has_room(self, num_tokens: int) -> bool:
        if self.num_running == 0:
            return True
        wanted = self.kv_usage * self._kv_tokens + sum(self._unseen) + num_tokens
        return self.num_running < self.limit and wanted <= KV_HIGH * self._kv_tokens
