"""An inference server that takes time and nothing else, behind the socket and the protocol of the real one.

Invariant: a reply is always the same ids, of the version that was served when its slot was taken.
Called by benchmarks/{control_plane,async_loop,usable_data}.py and by the test of what crosses the driver.
"""

import asyncio
import random
import secrets
import time
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from typing import Any

from actors.calls import call
from actors.inference_request import Part, Request
from actors.inference_route import Locator
from actors.inference_wire import Address, serve
from trajectories.schema import PolicyVersion, VersionSpan

REPLY_IDS = (*range(100, 115), 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerState:
    """What a TimedServer says of itself."""

    address: Address
    num_answered: int
    busy_s: float
    """Seconds that its slots were taken, summed over slots."""
    cpu_s: float
    """Processor time of its process."""


class TimedServer:
    """An inference server's socket with `num_slots` slots, each held `reply_s` seconds a reply; instant with 0."""

    def __init__(self, num_slots: int = 1, reply_s: float = 0.0, spread: float = 0.0) -> None:
        """`spread`: a reply takes `reply_s` give or take this share, so that rollouts do not march in step."""
        self._draw = random.Random(0)
        self._spread = spread
        self._slots = asyncio.Semaphore(num_slots)
        self._reply_s = reply_s
        self._address: Address | None = None
        self._num_answered = 0
        self._busy_s = 0.0
        self._spans: tuple[VersionSpan, ...] = ()
        self._set(PolicyVersion(lineage=0, n=0))

    async def health(self) -> ServerState:
        """Listens from the first call on."""
        if self._address is None:
            self._listener, self._address = await serve(
                self._answer, "127.0.0.1", secrets.token_hex(16), load=lambda: 0
            )
        return ServerState(
            address=self._address,
            num_answered=self._num_answered,
            busy_s=self._busy_s,
            cpu_s=time.process_time(),
        )

    async def serve_version(self, version: PolicyVersion) -> None:
        """Replies that begin from now on are of `version`."""
        self._set(version)

    def _set(self, version: PolicyVersion) -> None:
        self._spans = (VersionSpan(version=version, num_tokens=len(REPLY_IDS)),)

    async def _answer(self, request: Request, request_id: str) -> AsyncGenerator[Part]:
        spans = self._spans
        if self._reply_s:
            async with self._slots:
                began, spans = time.monotonic(), self._spans
                await asyncio.sleep(self._reply_s * (1 + self._draw.uniform(-self._spread, self._spread)))
                self._busy_s += time.monotonic() - began
        self._num_answered += 1
        yield Part(ids=REPLY_IDS, logprobs=(-0.5,) * len(REPLY_IDS), spans=spans, finish_reason="stop")


class OneServer:
    """A Directory of one TimedServer; picklable."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    async def __call__(self) -> Mapping[str, Locator]:
        """Its name and how to find it."""
        return {"server": self._locate}

    async def _locate(self) -> Address | None:
        state: ServerState = await call(self._actor.health, deadline_s=30, what="address of the timed server")
        return state.address
