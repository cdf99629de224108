"""The creation gate that all rollout workers of a run share: one actor, and what a worker holds of it.

Invariant: the limits of a CreationConfig hold over the whole cluster, and a pause that one worker was asked for holds
them all. A worker that dies holding a permit loses it after `permit_s`. Started by actors/rollout_pool.py.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any
from uuid import uuid4

import ray

from actors.calls import call
from actors.errors import ClusterError
from envs.creation import CreationConfig, RateGate
from envs.errors import SandboxError

_ANSWER_S = 30.0


class CreationGateHost:
    """Forwards to a RateGate. A permit may be released before it was given: then it never is."""

    def __init__(self, config: CreationConfig) -> None:
        self._gate = RateGate(config)
        self._waiting: dict[str, asyncio.Future[None]] = {}

    async def acquire(self, permit: str) -> None:
        """See RateGate."""
        waiting = self._waiting[permit] = asyncio.ensure_future(self._gate.acquire(permit))
        await asyncio.wait({waiting})
        del self._waiting[permit]
        if not waiting.cancelled():
            waiting.result()

    async def release(self, permit: str) -> None:
        """See RateGate."""
        if (waiting := self._waiting.get(permit)) is not None:
            waiting.cancel()
        self._gate.release(permit)

    async def pause(self, seconds: float) -> None:
        """See RateGate."""
        await self._gate.pause(seconds)


class SharedGate:
    """Implements envs.creation.CreationGate over the actor; travels to workers."""

    def __init__(self, host: Any, config: CreationConfig) -> None:
        self._host = host
        self._config = config

    @asynccontextmanager
    async def admit(self) -> AsyncGenerator[None]:
        """See CreationGate."""
        permit = uuid4().hex
        try:
            await self._call("acquire", permit, deadline_s=self._config.wait_s + _ANSWER_S)
            yield
        finally:
            # A cancelled creation may be given its permit only now: the host hears of both, and drops it.
            await asyncio.shield(self._call("release", permit, deadline_s=_ANSWER_S))

    async def pause(self, seconds: float) -> None:
        """See CreationGate."""
        await self._call("pause", seconds, deadline_s=_ANSWER_S)

    def close(self) -> None:
        """Ends the actor."""
        ray.kill(self._host)

    async def _call(self, method: str, value: object, *, deadline_s: float) -> None:
        """A gate that cannot be reached is infrastructure, like the provider behind it."""
        try:
            await call(getattr(self._host, method), value, deadline_s=deadline_s, what=f"creation gate {method}")
        except ClusterError as error:
            raise SandboxError(f"create sandbox: {error}") from error


def start_creation_gate(config: CreationConfig) -> SharedGate:
    """A gate of its own actor, which takes no core."""
    actor = ray.remote(CreationGateHost)
    return SharedGate(actor.options(num_cpus=0, max_concurrency=4096).remote(config), config)
