"""How fast Sandboxes are created: so many a second, so many at once, and a pause when a provider asks for one.

Invariant: at most `max_at_once` permits are out and no more than `burst` + `per_s` * t were given in any t seconds;
after `pause` none is given before it is over, whoever asks. A permit that is never released ends by itself.
Asked by every provider before it creates; shared by all rollout workers through actors/creation_gate.py.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Protocol
from uuid import uuid4

from envs.errors import SandboxError


@dataclass(frozen=True, slots=True, kw_only=True)
class CreationConfig:
    """Limits on creating Sandboxes, over all rollout workers of a run together."""

    per_s: float | None = None
    """Creations a second; None: as fast as the provider goes."""
    burst: int = 10
    """Creations that may come at once after a quiet time."""
    max_at_once: int | None = None
    """Creations under way at once; None: any number."""
    wait_s: float = 600.0
    """A creation that is not admitted by then fails as a sandbox_error."""
    permit_s: float = 900.0
    """A permit whose worker died is given to another after this."""

    def __post_init__(self) -> None:
        for name in ("per_s", "burst", "max_at_once", "wait_s", "permit_s"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"creation {name} must be > 0, got {value}")


class CreationGate(Protocol):
    """Admits creations. `admit` raises SandboxError when none is admitted in time."""

    def admit(self) -> AbstractAsyncContextManager[None]:
        """Waits for a permit and holds it for the length of the block."""
        ...

    async def pause(self, seconds: float) -> None:
        """Holds every creation back for so long, as a provider asked with Retry-After."""
        ...


class RateGate:
    """The gate of one process, and what the shared one is made of. `clock` gives seconds and never goes back."""

    def __init__(self, config: CreationConfig | None = None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.config = config or CreationConfig()
        self._clock = clock
        self._tokens = float(self.config.burst)
        self._counted_at = clock()
        self._paused_until = clock()
        self._held: dict[str, float] = {}
        self._released = asyncio.Event()

    @asynccontextmanager
    async def admit(self) -> AsyncGenerator[None]:
        """See CreationGate."""
        permit = uuid4().hex
        try:
            await self.acquire(permit)
            yield
        finally:
            self.release(permit)

    async def acquire(self, permit: str) -> None:
        """Returns once `permit` (a name of the caller's choice) is given. Raises SandboxError after `wait_s`."""
        try:
            async with asyncio.timeout(self.config.wait_s):
                while (wait_s := self.try_acquire(permit)) > 0:
                    self._released.clear()
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(wait_s):
                            await self._released.wait()
        except TimeoutError:
            raise SandboxError(
                f"create sandbox: not admitted within {self.config.wait_s:g} s; raise creation.wait_s or the limits"
            ) from None

    def try_acquire(self, permit: str) -> float:
        """0 when the permit is given now, else the seconds after which to ask again."""
        now = self._clock()
        for name in [name for name, until in self._held.items() if until <= now]:
            del self._held[name]
        wait_s = max(self._paused_until - now, self._token_wait_s(now), self._slot_wait_s(now))
        if wait_s <= 0:
            self._tokens -= self.config.per_s is not None
            self._held[permit] = now + self.config.permit_s
        return max(0.0, wait_s)

    def release(self, permit: str) -> None:
        """Gives a permit back; one that was never given is no error, since its owner may have been cancelled."""
        self._held.pop(permit, None)
        self._released.set()

    async def pause(self, seconds: float) -> None:
        """See CreationGate."""
        self._paused_until = max(self._paused_until, self._clock() + seconds)

    def _token_wait_s(self, now: float) -> float:
        if self.config.per_s is None:
            return 0.0
        self._tokens = min(self.config.burst, self._tokens + (now - self._counted_at) * self.config.per_s)
        self._counted_at = now
        # A billionth is forgiven: sums of binary fractions end a little below the whole token that they stand for.
        return 0.0 if self._tokens >= 1 - 1e-9 else (1 - self._tokens) / self.config.per_s

    def _slot_wait_s(self, now: float) -> float:
        """Until the first permit runs out by itself; a release wakes earlier."""
        if self.config.max_at_once is None or len(self._held) < self.config.max_at_once:
            return 0.0
        return min(self._held.values()) - now
