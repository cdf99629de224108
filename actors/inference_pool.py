"""The pool of inference servers, as the driver sees it: starts them, watches them, and gives out Samplers.

Invariant: a server that died comes back with the weights last published, proven, before it samples again.
Called by recipes (`start_inference_pool`) and by actors/weight_sync.py, whose target it is.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import ray

from actors.calls import call
from actors.errors import ActorDied, ClusterError
from actors.inference_config import DType, InferencePoolConfig, UpdateMode, check_model, saved_dtype
from actors.inference_engine import LoadReport
from actors.inference_errors import ServerNotReady, ServerStartError
from actors.inference_sampler import ActorLocator, PoolSampler
from actors.inference_server import InferenceServer, ServerHealth
from actors.weight_noise import Noise
from actors.weight_stage import Manifest
from trajectories.schema import PolicyVersion

logger = logging.getLogger(__name__)

_POLL_S = 0.2
FIRST_VERSION = PolicyVersion(lineage=0, n=0)


class ServerHandle:
    """One server: its actor's methods as awaitables with deadlines, and what the driver last heard of it."""

    def __init__(self, name: str, actor: Any) -> None:
        self.name = name
        self.actor = actor
        self.health: ServerHealth | None = None
        """None while it starts or restarts."""

    @property
    def version(self) -> PolicyVersion | None:
        """Version that it samples with; None while it samples nothing."""
        return self.health.version if self.health is not None and self.health.is_ready else None

    async def start(self, version: PolicyVersion | None, deadline_s: float) -> None:
        """Loads the model; `version` names the weights on disk, None samples nothing before the first load."""
        self.health = await self._call("start", version, deadline_s=deadline_s)

    async def refresh(self, deadline_s: float) -> None:
        """Asks how it is."""
        self.health = await self._call("health", deadline_s=deadline_s)

    async def load(
        self, manifest: Manifest, mode: UpdateMode, max_columns: int, admits: bool, deadline_s: float
    ) -> LoadReport:
        """Replaces the weights and reads them back; see Engine.load."""
        report = await self._call("load", manifest, mode, max_columns, admits, deadline_s=deadline_s)
        await self.refresh(deadline_s)
        return report

    async def admit(self, deadline_s: float) -> None:
        """Lets requests in after a load that kept them out."""
        await self._call("admit", deadline_s=deadline_s)
        await self.refresh(deadline_s)

    async def load_disturbed(self, manifest: Manifest, noise: Noise, deadline_s: float) -> None:
        """Pushes the stage with noise; nothing is sampled until the next load."""
        await self._call("load_disturbed", manifest, noise, deadline_s=deadline_s)

    async def probe(self, ids: Sequence[int], deadline_s: float) -> list[float]:
        """Log-probability of each of `ids` after the first."""
        return await self._call("probe", ids, deadline_s=deadline_s)

    async def quarantine(self, reason: str, deadline_s: float) -> None:
        """Stops it from sampling until a later load succeeds."""
        await self._call("quarantine", reason, deadline_s=deadline_s)
        await self.refresh(deadline_s)

    async def _call(self, method: str, *args: Any, deadline_s: float) -> Any:
        try:
            return await call(
                getattr(self.actor, method), *args, deadline_s=deadline_s, what=f"{method} on {self.name}"
            )
        except ActorDied:
            self.health = None  # what it served last counts no more: it may come back with anything
            raise


class InferencePool:
    """Servers of one policy; made by `start_inference_pool`."""

    def __init__(self, config: InferencePoolConfig, servers: Sequence[ServerHandle], model: Path) -> None:
        self._config = config
        self.servers = tuple(servers)
        self.is_exact = (
            saved_dtype(model) if config.server.dtype is DType.AUTO else config.server.dtype
        ) is DType.FLOAT32
        """True where servers compute in float32, so that a probe must match the learner's."""
        self.engine = ", ".join(sorted({server.health.engine for server in servers if server.health is not None}))
        """Class of the engine that serves, as the servers reported it."""
        self._heal: Callable[[ServerHandle], Awaitable[None]] | None = None
        self.num_restarts = 0
        """Servers that died and are back."""

    def sampler(self) -> PoolSampler:
        """A Sampler over these servers; picklable, and each process that gets one connects on its own."""
        return PoolSampler(
            self._config, {server.name: ActorLocator(server.name, server.actor) for server in self.servers}
        )

    def oldest_version(self) -> PolicyVersion | None:
        """The oldest version that a server still samples with; None while none samples."""
        return min((server.version for server in self.servers if server.version is not None), default=None)

    async def until_one_serves(self) -> None:
        """Returns when a server samples; ServerStartError naming all when none does within `start_timeout_s`."""
        limit = self._config.start_timeout_s
        deadline = time.monotonic() + limit
        while self.oldest_version() is None:
            if time.monotonic() > deadline:
                names = ", ".join(server.name for server in self.servers)
                raise ServerStartError(f"all servers died ({names}) and none came back within {limit:g} s")
            await asyncio.sleep(_POLL_S)

    def heal_with(self, heal: Callable[[ServerHandle], Awaitable[None]]) -> None:
        """`heal` gives a restarted server its weights and proves them; without it the weights on disk serve."""
        self._heal = heal

    async def stats(self) -> dict[str, float]:
        """Sums over the servers that answer."""
        await asyncio.gather(
            *(server.refresh(self._config.health_timeout_s) for server in self.servers if server.health)
        )
        healths = [server.health for server in self.servers if server.health is not None]
        prompt = sum(health.num_prompt_tokens for health in healths)
        return {
            "servers": float(len(healths)),
            "restarts": float(self.num_restarts),
            "running": float(sum(health.num_running for health in healths)),
            "waiting": float(sum(health.num_waiting for health in healths)),
            "sampled_tokens": float(sum(health.num_sampled_tokens for health in healths)),
            "prompt_tokens": float(prompt),
            "prefix_hit_rate": sum(health.num_cached_tokens for health in healths) / prompt if prompt else 0.0,
        }

    async def watch(self) -> None:
        """Checks every server for ever, and brings back those that died."""
        await asyncio.gather(*(self._watch(server) for server in self.servers))

    async def _watch(self, server: ServerHandle) -> None:
        pid = server.health.pid if server.health else 0
        while True:
            await asyncio.sleep(self._config.health_interval_s)
            try:
                await server.refresh(self._config.health_timeout_s)
            except (ClusterError, ServerNotReady) as error:
                logger.warning("server=%s does not answer: %s", server.name, _last_line(error))
                server.health = None
            if server.health is None or server.health.pid != pid:
                pid = await self._bring_back(server) or pid

    async def _bring_back(self, server: ServerHandle) -> int:
        """Waits for the actor that Ray starts anew, and gives it its weights; returns its process, 0 when it failed."""
        try:
            await server.start(None if self._heal else FIRST_VERSION, self._config.start_timeout_s)
            if self._heal is not None:
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
    config: InferencePoolConfig, *, model: Path, version: PolicyVersion | None = FIRST_VERSION
) -> AsyncIterator[InferencePool]:
    """A pool that serves the weights in directory `model` as `version`; with None it samples nothing before a publish.

    Raises ValueError for a path without a model and ServerStartError for a server that did not come up in time.
    """
    model = check_model(model)
    servers = [
        ServerHandle(name, _actor(config).remote(name, model, config.server))
        for name in (f"server-{index}" for index in range(config.num_servers))
    ]
    try:
        await asyncio.gather(*(_start(server, version, config.start_timeout_s) for server in servers))
        pool = InferencePool(config, servers, model)
        async with _in_background(pool.watch()):
            yield pool
    finally:
        for server in servers:
            ray.kill(server.actor)


@asynccontextmanager
async def _in_background(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Runs `work` for the length of the block. Not a TaskGroup, which would wrap the errors of the block in a group."""
    task = asyncio.create_task(work)
    task.add_done_callback(lambda task: task.cancelled() or logger.error("the watch ended", exc_info=task.exception()))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


def _actor(config: InferencePoolConfig) -> Any:
    return ray.remote(InferenceServer).options(
        num_cpus=config.server.num_cpus,
        num_gpus=config.server.num_gpus,
        max_concurrency=256,
        max_restarts=config.max_restarts,
        runtime_env={"env_vars": config.server.environment()},
    )


async def _start(server: ServerHandle, version: PolicyVersion | None, deadline_s: float) -> None:
    try:
        await server.start(version, deadline_s)
    except ClusterError as error:
        raise ServerStartError(f"{server.name} did not come up: {_last_line(error)}") from error


def _last_line(error: Exception) -> str:
    """What an error says; one that came through Ray has its traceback before it."""
    return (str(error).splitlines() or [repr(error)])[-1]
