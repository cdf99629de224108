"""The pool as a Sampler, inside the process of a rollout worker.

Invariant: a trajectory stays on one server while that server lives and has room (its prefix cache is there); when it
dies, the reply goes on elsewhere after the tokens that came; a sample fails only when its deadline or its attempts are
over. Made by InferencePool.sampler, pickled to workers; connects on first use.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from actors.inference_config import InferencePoolConfig, KvReuse
from actors.inference_errors import RequestDropped, ServerGone, ServerNotReady
from actors.inference_request import Part, Request, join_parts, rest_of
from actors.inference_route import Locator, Route
from envs.errors import SamplerError
from envs.sampler import Completion, SamplingParams

logger = logging.getLogger(__name__)

KEYS_KEPT = 65_536
"""Trajectories and Groups remembered; the oldest are forgotten first."""
RETRY_S = 0.25
"""Pause before servers are looked for again while none takes requests."""
CONNECT_S = 1.0
"""How long connections are waited for while no server takes requests."""
LIST_S = 5.0
"""How long the list of servers is believed."""

ENDED_AT_LIMIT = Part(ids=(), logprobs=(), spans=(), finish_reason="length")
"""What a server that died with the last token on its way would have said."""

Directory = Callable[[], Awaitable[Mapping[str, Locator]]]
"""Lists the servers of the pool, by name, as of now; picklable."""


class PoolSampler:
    """A Sampler. Sticky by key, least loaded for new keys, elsewhere when a server is full, leaves or dies."""

    def __init__(self, config: InferencePoolConfig, directory: Directory) -> None:
        self._config = config
        self._directory = directory
        self._listing = asyncio.Lock()
        self._listed = -LIST_S
        self._routes: dict[str, Route] = {}
        self._sticky: dict[str, Route] = {}
        self._first_seen: dict[str, int] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return PoolSampler, (self._config, self._directory)

    async def sample(
        self, prompt_ids: Sequence[int], params: SamplingParams, *, stop_ids: Sequence[int], key: str
    ) -> Completion:
        """Raises SamplerError, naming the servers, after `request_timeout_s` seconds or `max_attempts` failures."""
        request = Request(
            prompt_ids=prompt_ids,
            params=params,
            stop_ids=stop_ids,
            priority=self._priority(key),
            salt=key if self._config.kv_reuse is KvReuse.TRAJECTORY else "",
        )
        failures: list[str] = []
        try:
            async with asyncio.timeout(self._config.request_timeout_s):
                return await self._sample(request, key, failures)
        except TimeoutError as error:
            sticky = self._sticky.pop(key, None)  # the next attempt may find a server that answers
            asked = sticky.name if sticky is not None else ", ".join(self._routes) or "any server"
            detail = f"; before that: {'; '.join(failures)}" if failures else ""
            raise SamplerError(
                f"no completion from {asked} within {self._config.request_timeout_s:g} s{detail}"
            ) from error

    async def _sample(self, request: Request, key: str, failures: list[str]) -> Completion:
        parts: list[Part] = []
        while len(failures) < self._config.max_attempts:
            route = await self._route(key)
            channel, num_parts = route.channel, len(parts)
            try:
                await channel.request(rest_of(request, parts), parts)
                return join_parts(parts)
            except (ServerGone, ServerNotReady) as error:
                if sum(len(part.ids) for part in parts) == request.params.max_tokens:
                    return join_parts([*parts, ENDED_AT_LIMIT])
                if len(parts) > num_parts:
                    failures.clear()  # it got on: only attempts that bring nothing count
                failures.append(str(error))
                if not isinstance(error, RequestDropped):
                    route.rest(channel, is_gone=isinstance(error, ServerGone))
                    self._sticky.pop(key, None)
        raise SamplerError(f"gave up after {len(failures)} attempts: {'; '.join(failures)}")

    async def _route(self, key: str) -> Route:
        """The open route of `key` unless its server is full and another is far from it; else the least loaded."""
        while True:
            await self._list()
            sticky = self._sticky.get(key)
            if sticky is not None and sticky.is_open and not self._is_full(sticky):
                return sticky
            connecting = [task for route in self._routes.values() if (task := route.connect()) is not None]
            usable = [route for route in self._routes.values() if route.is_open]
            if usable:
                least = min(usable, key=lambda route: route.load)
                if sticky is not None and sticky.is_open and 2 * least.load >= sticky.load:
                    return sticky
                return self._remember(key, least)
            # All of them, so that the first requests spread; not for long, since one may be starting.
            await (asyncio.wait(connecting, timeout=CONNECT_S) if connecting else asyncio.sleep(RETRY_S))

    def _is_full(self, route: Route) -> bool:
        return route.load >= self._config.server.max_num_seqs

    async def _list(self) -> None:
        """Learns which servers were added and removed, every LIST_S seconds."""
        async with self._listing:
            if time.monotonic() - self._listed < LIST_S:
                return
            locators = await self._directory()
            for name in self._routes.keys() - locators.keys():
                self._routes.pop(name).retire()
            for name in locators.keys() - self._routes.keys():
                self._routes[name] = Route(name, locators[name])
            self._listed = time.monotonic()

    def _remember(self, key: str, route: Route) -> Route:
        self._sticky[key] = route
        _forget_oldest(self._sticky)
        return route

    def _priority(self, key: str) -> int:
        """Milliseconds at which the Group of `key` was first seen; members are named GROUP.MEMBER (envs/group.py)."""
        since = self._first_seen.setdefault(key.rpartition(".")[0] or key, int(time.time() * 1000))
        _forget_oldest(self._first_seen)
        return since


def _forget_oldest(kept: dict[str, Any]) -> None:
    if len(kept) > KEYS_KEPT:
        del kept[next(iter(kept))]
