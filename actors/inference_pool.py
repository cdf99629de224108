"""The pool of inference servers, as the driver sees it: starts, watches, adds and removes them, gives out Samplers.

Invariant: a server that died comes back with the weights last published, proven, before it samples again.
Called by recipes (`start_inference_pool`) and by actors/weight_sync.py, whose target it is.
"""

import asyncio
import itertools
import logging
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import ray

from actors.errors import ActorDied, ClusterError, DeadlineMissed
from actors.gauges import Gauges
from actors.inference_config import InferencePoolConfig, ServerConfig, check_model, vocabulary_size
from actors.inference_directory import ActorDirectory
from actors.inference_errors import ServerNotReady, ServerStartError
from actors.inference_metrics import pool_metrics, server_metrics
from actors.inference_sampler import PoolSampler
from actors.inference_server import InferenceServer, ServerHealth
from actors.placement import SHARED_GPU, Place, give_back, reserve
from actors.server_handle import ServerHandle
from trajectories.schema import PolicyVersion

logger = logging.getLogger(__name__)

FIRST_VERSION = PolicyVersion(lineage=0, n=0)
POLL_S = 0.2


class InferencePool:
    """Servers of one policy; made by `start_inference_pool`."""

    def __init__(self, config: InferencePoolConfig, model: Path, places: Sequence[Place]) -> None:
        self._config = config
        self._lent = places
        self._model = model
        self.id = f"inference-{secrets.token_hex(4)}"
        """Its servers are actors named ID/SERVER."""
        self._numbers = itertools.count()
        self._heal: Callable[[ServerHandle], Awaitable[None]] | None = None
        self._watches: dict[str, asyncio.Task[None]] = {}
        self._last_seen: dict[str, ServerHealth] = {}
        self._gauges = Gauges()
        self._places: dict[str, Place] = {}
        """Those that it reserved, by the server that is there."""
        self.servers: tuple[ServerHandle, ...] = ()
        self.dtype = config.server.resolved_dtype(model)
        """In which the servers hold the weights and compute."""
        self.ranks_per_server = config.server.num_ranks
        """GPUs of each."""
        self.vocab_size = vocabulary_size(model)
        """Token ids of the policy."""
        self.num_restarts = 0
        """Servers that died and are back."""

    @property
    def engine(self) -> str:
        """Class of the engine that serves, as the servers reported it."""
        return ", ".join(sorted({server.health.engine for server in self.servers if server.health is not None}))

    def sampler(self) -> PoolSampler:
        """A Sampler over these servers; picklable, and each process that gets one connects on its own."""
        return PoolSampler(self._config, ActorDirectory(self.id))

    def oldest_version(self) -> PolicyVersion | None:
        """The oldest version that a server still samples with; None while none samples."""
        return min((server.version for server in self.servers if server.version is not None), default=None)

    async def sleep(self) -> None:
        """Puts every living server to sleep: the learner's turn. A server wakes with the weights that it gets next."""
        slept = await asyncio.gather(
            *(server.sleep(self._config.health_timeout_s) for server in self.servers), return_exceptions=True
        )
        for server, error in zip(self.servers, slept, strict=True):
            if isinstance(error, ActorDied | ServerNotReady):
                logger.warning("server=%s is down and does not sleep: %s", server.name, _last_line(error))
            elif error is not None:
                raise error

    async def until_one_is_up(self) -> None:
        """Returns when a server answers; ServerStartError naming all when none does within `start_timeout_s`."""
        limit = self._config.start_timeout_s
        deadline = time.monotonic() + limit
        while all(server.health is None for server in self.servers):
            if time.monotonic() > deadline:
                names = ", ".join(server.name for server in self.servers)
                raise ServerStartError(f"all servers died ({names}) and none came back within {limit:g} s")
            await asyncio.sleep(POLL_S)

    def heal_with(self, heal: Callable[[ServerHandle], Awaitable[None]]) -> None:
        """`heal` gives a restarted server its weights and proves them; without it the weights on disk serve."""
        self._heal = heal

    def load(self) -> tuple[float, float]:
        """Requests that the servers (sample, keep waiting), as of their last health checks."""
        healths = [server.health for server in self.servers if server.health is not None]
        return float(sum(h.num_running for h in healths)), float(sum(h.num_waiting for h in healths))

    def metrics(self) -> dict[str, float]:
        """Flat metrics under "inference/" since the last call, as of the servers' last health checks."""
        now = {server.name: server.health for server in self.servers if server.health is not None}
        metrics = pool_metrics(self._last_seen, now) | {"inference/restarts": float(self.num_restarts)}
        self._last_seen = now
        return metrics

    async def start(self, version: PolicyVersion | None) -> None:
        """Starts the configured servers, all at once; see `start_inference_pool`."""
        places = self._lent or await self._reserve(self._config.num_servers)
        self.servers = servers = tuple(self._new_server(place) for place in places)
        await asyncio.gather(*(_start(server, version, self._config.start_timeout_s) for server in servers))
        self._last_seen = {server.name: server.health for server in servers if server.health is not None}
        for server in servers:
            self._watch(server)

    async def add(self) -> ServerHandle:
        """One server more, with the published weights, proven; samplers find it within seconds."""
        (place,) = await self._reserve(1)
        server = self._new_server(place)
        self.servers = (*self.servers, server)
        try:
            await _start(server, None if self._heal else FIRST_VERSION, self._config.start_timeout_s)
            if self._heal is not None:
                await self._heal(server)
        except BaseException:
            self._forget(server)
            raise
        self._watch(server)
        return server

    async def remove(self, name: str, deadline_s: float) -> int:
        """Takes a server away once what it was sampling has ended, or at the deadline; returns how much had not.

        Requests that are cut off go on elsewhere on their tokens. ValueError for an unknown or the only server.
        """
        server = next((server for server in self.servers if server.name == name), None)
        if server is None or len(self.servers) == 1:
            raise ValueError(f"cannot remove {name}: the servers are {', '.join(s.name for s in self.servers)}")
        await _cancel(self._watches.pop(name, None))
        try:
            await server.drain(deadline_s)
            return await _until_idle(server, deadline_s)
        except (ActorDied, ServerNotReady):
            return 0
        finally:
            self._forget(server)

    async def close(self) -> None:
        """Ends every server."""
        for watch in self._watches.values():
            await _cancel(watch)
        for server in self.servers:
            self._forget(server)

    async def _reserve(self, num_servers: int) -> Sequence[Place | None]:
        """A place for each server; None where it reserves nothing, or where vLLM places its ranks itself."""
        server = self._config.server
        needs = {"CPU": server.num_cpus, "GPU": 0 if server.spans_nodes else server.num_gpus}
        bundle = {name: float(amount) for name, amount in needs.items() if amount}
        if not bundle:
            return [None] * num_servers
        what = f"{num_servers} inference server{'s' if num_servers > 1 else ''}"
        return await reserve([bundle] * num_servers, what=what, deadline_s=self._config.start_timeout_s)

    def _new_server(self, place: Place | None) -> ServerHandle:
        name = f"server-{next(self._numbers)}"
        if place is not None and place not in self._lent:
            self._places[name] = place
        actor = _actor(self._config, place, name=f"{self.id}/{name}")
        return ServerHandle(name, actor.remote(name, self._model, self._config.server))

    def _forget(self, server: ServerHandle) -> None:
        self.servers = tuple(other for other in self.servers if other is not server)
        ray.kill(server.actor)
        if (place := self._places.pop(server.name, None)) is not None:
            give_back(place)

    def _watch(self, server: ServerHandle) -> None:
        watch = self._watches[server.name] = asyncio.create_task(self._keep_alive(server))
        watch.add_done_callback(lambda t: t.cancelled() or logger.error("the watch ended", exc_info=t.exception()))

    async def _keep_alive(self, server: ServerHandle) -> None:
        """Checks one server for ever, and brings it back when it died."""
        pid = server.health.pid if server.health else 0
        while True:
            await asyncio.sleep(self._config.health_interval_s)
            try:
                await server.refresh(self._config.health_timeout_s)
            except (ClusterError, ServerNotReady) as error:
                logger.warning("server=%s does not answer: %s", server.name, _last_line(error))
                if isinstance(error, DeadlineMissed):
                    _end(server)
                server.health = None
            if server.health is None or server.health.pid != pid:
                pid = await self._bring_back(server, pid) or pid
            if server.health is not None:
                self._gauges.set(server_metrics(server.health), server=server.name)

    async def _bring_back(self, server: ServerHandle, pid: int) -> int:
        """Waits for the actor that Ray starts anew, and gives it its weights; returns its process, 0 when it failed."""
        try:
            await server.start(None if self._heal else FIRST_VERSION, self._config.start_timeout_s)
            if server.pid == pid:
                logger.warning("server=%s was only out of reach, pid=%d", server.name, pid)
                _end(server)
            elif self._heal is not None:
                await self._heal(server)
        except (ClusterError, ServerNotReady) as error:
            logger.warning("server=%s is not back yet: %s", server.name, _last_line(error))
            server.health = None
        if server.health is None:
            return 0
        self.num_restarts += 1
        logger.warning("server=%s is back, pid=%d", server.name, server.health.pid)
        return server.health.pid


@asynccontextmanager
async def start_inference_pool(
    config: InferencePoolConfig,
    *,
    model: Path,
    version: PolicyVersion | None = FIRST_VERSION,
    places: Sequence[Place] = (),
) -> AsyncIterator[InferencePool]:
    """A pool that serves the weights in directory `model` as `version`; with None it samples nothing before a publish.

    `places`: where each server goes, beside the learner rank whose GPU it shares; empty reserves places of their own.
    Raises ValueError for a path without a model, PlacementError naming the resource that is missing, and
    ServerStartError for a server that did not come up in time.
    """
    pool = InferencePool(config, check_model(model), places)
    try:
        await pool.start(version)
        yield pool
    finally:
        await pool.close()


def _end(server: ServerHandle) -> None:
    """Ends its process, or it might sample on with weights that all others have left behind; Ray starts a new one."""
    ray.kill(server.actor, no_restart=False)
    server.health = None


async def _until_idle(server: ServerHandle, deadline_s: float) -> int:
    """Requests still in the server when nothing is left to wait for, or the deadline is over."""
    until = time.monotonic() + deadline_s
    while server.health is not None and (busy := server.health.num_running + server.health.num_waiting):
        if time.monotonic() > until:
            return busy
        await asyncio.sleep(POLL_S)
        await server.refresh(deadline_s)
    return 0


async def _cancel(task: asyncio.Task[None] | None) -> None:
    if task is not None:
        task.cancel()
        await asyncio.wait([task])


def _actor(config: InferencePoolConfig, place: Place | None, *, name: str) -> Any:
    return ray.remote(InferenceServer).options(
        name=name,
        scheduling_strategy=place,
        num_cpus=config.server.num_cpus,
        num_gpus=_num_gpus(config.server),
        max_concurrency=256,
        max_restarts=config.max_restarts,
        runtime_env={"env_vars": config.server.environment()},
    )


def _num_gpus(server: ServerConfig) -> float:
    """What the server's own actor asks for."""
    if server.spans_nodes:
        return 0
    return server.num_gpus * SHARED_GPU if server.colocated else server.num_gpus


async def _start(server: ServerHandle, version: PolicyVersion | None, deadline_s: float) -> None:
    try:
        await server.start(version, deadline_s)
    except ClusterError as error:
        raise ServerStartError(f"{server.name} did not come up: {_last_line(error)}") from error


def _last_line(error: Exception) -> str:
    """What an error says; one that came through Ray has its traceback before it."""
    return (str(error).splitlines() or [repr(error)])[-1]
