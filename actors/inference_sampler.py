"""The pool as a Sampler, inside the process of a rollout worker.

Invariant: a trajectory stays on one server while that server lives (its prefix cache is there), and a sample fails only
when its deadline or its attempts are over. Made by InferencePool.sampler, pickled to workers; connects on first use.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from actors.calls import call
from actors.errors import ClusterError
from actors.inference_config import InferencePoolConfig
from actors.inference_errors import ServerGone, ServerNotReady
from actors.inference_wire import Address, Channel, Request
from envs.errors import SamplerError
from envs.sampler import Completion, SamplingParams

logger = logging.getLogger(__name__)

STICKY_KEYS = 65_536
"""Trajectories remembered; the oldest are forgotten first."""
RETRY_S = 0.5
"""Pause before a server that failed is asked again."""


Locator = Callable[[], Awaitable[Address | None]]
"""Gives a server's address, or None while it samples nothing."""


class PoolSampler:
    """A Sampler. Sticky by key, least loaded for new keys, elsewhere when a server dies."""

    def __init__(self, config: InferencePoolConfig, locators: Mapping[str, Locator]) -> None:
        """`locators`: server names to what tells where that server listens; picklable."""
        self._config = config
        self._locators = dict(locators)
        self._routes: list[Route] = []
        self._sticky: dict[str, Route] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return PoolSampler, (self._config, self._locators)

    async def sample(
        self, prompt_ids: Sequence[int], params: SamplingParams, *, stop_ids: Sequence[int], key: str
    ) -> Completion:
        """Raises SamplerError, naming the servers, after `request_timeout_s` seconds or `max_attempts` failures."""
        if not self._routes:
            self._routes = [Route(name, locate) for name, locate in self._locators.items()]
        request = Request(prompt_ids=prompt_ids, params=params, stop_ids=stop_ids)
        failures: list[str] = []
        try:
            async with asyncio.timeout(self._config.request_timeout_s):
                return await self._sample(request, key, failures)
        except TimeoutError as error:
            asked = self._sticky[key].name if key in self._sticky else ", ".join(self._locators)
            detail = f"; before that: {'; '.join(failures)}" if failures else ""
            raise SamplerError(
                f"no completion from {asked} within {self._config.request_timeout_s:g} s{detail}"
            ) from error

    async def _sample(self, request: Request, key: str, failures: list[str]) -> Completion:
        while len(failures) < self._config.max_attempts:
            route = await self._route(key)
            channel = route.channel
            try:
                return await channel.request(request)
            except (ServerGone, ServerNotReady) as error:
                failures.append(str(error))
                route.rest(channel)
                self._sticky.pop(key, None)
        raise SamplerError(f"gave up after {len(failures)} attempts: {'; '.join(failures)}")

    async def _route(self, key: str) -> "Route":
        """The open route of `key`, else the least loaded one that opens."""
        sticky = self._sticky.get(key)
        if sticky is not None and await sticky.open():
            return sticky
        while True:
            opened = await asyncio.gather(*(route.open() for route in self._routes))
            usable = [route for route, is_open in zip(self._routes, opened, strict=True) if is_open]
            if usable:
                return self._remember(key, min(usable, key=lambda route: route.load))
            await asyncio.sleep(RETRY_S / 2)

    def _remember(self, key: str, route: "Route") -> "Route":
        self._sticky[key] = route
        if len(self._sticky) > STICKY_KEYS:
            del self._sticky[next(iter(self._sticky))]
        return route


class Route:
    """The way to one server: a connection that is made when needed, and made anew after the server came back."""

    def __init__(self, name: str, locate: Locator) -> None:
        self.name = name
        self._locate = locate
        self._opening = asyncio.Lock()
        self._channel: Channel | None = None
        self._rests_until = 0.0

    @property
    def channel(self) -> Channel:
        """The open connection."""
        assert self._channel is not None, "open() came first"
        return self._channel

    @property
    def load(self) -> int:
        """Requests on the server, as far as this process knows."""
        return max(self.channel.num_pending, self.channel.server_load)

    def rest(self, failed: Channel | None) -> None:
        """Drops the channel that failed, and leaves the server alone for a moment before asking where it is."""
        if failed is not self._channel:
            return
        self._rests_until = asyncio.get_running_loop().time() + RETRY_S
        if failed is not None:
            failed.close()
        self._channel = None

    async def open(self) -> bool:
        """Whether requests may be sent; connects when there is no connection."""
        if self._channel is not None and not self._channel.is_closed:
            return True
        async with self._opening:
            if self._channel is not None and not self._channel.is_closed:
                return True
            if asyncio.get_running_loop().time() < self._rests_until:
                return False
            return await self._connect()

    async def _connect(self) -> bool:
        address = await self._locate()
        try:
            self._channel = None if address is None else await Channel.open(self.name, address)
        except ServerGone as error:
            logger.warning("%s", error)
            self._channel = None
        if self._channel is None:
            self.rest(None)
        return self._channel is not None


class ActorLocator:
    """Asks a server's actor where it listens."""

    def __init__(self, name: str, actor: Any) -> None:
        self._name = name
        self._actor = actor

    async def __call__(self) -> Address | None:
        """None while the actor is dead, restarting or without weights."""
        try:
            health = await call(self._actor.health, deadline_s=30, what=f"address of {self._name}")
        except (ClusterError, ServerNotReady) as error:
            logger.warning("server=%s has no address: %s", self._name, str(error).splitlines()[-1])
            return None
        return health.address if health.is_ready else None
