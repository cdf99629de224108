"""The inference server: a Ray actor around one Engine.

Invariant: the actor is a shell; the Engine holds the state, and when it dies the actor's process ends with it, so that
Ray starts it anew. Started and called by actors/inference_pool.py; rollout workers reach it by its socket.
"""

import asyncio
import logging
import os
import secrets
import socket
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from actors.engine_weights import LoadReport
from actors.inference_config import ServerConfig, UpdateMode
from actors.inference_engine import Engine
from actors.inference_errors import ServerNotReady
from actors.inference_request import Part, Request
from actors.inference_wire import Address, serve
from actors.weight_noise import Noise
from actors.weight_objects import localize
from actors.weight_stage import Manifest
from trajectories.schema import PolicyVersion

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerHealth:
    """How a server is; counters since its process began."""

    address: Address
    """Differs after every restart."""
    pid: int
    version: PolicyVersion | None
    is_ready: bool
    engine: str
    """Class of the engine."""
    at_s: float
    """time.monotonic() of the server's node."""
    num_running: int
    num_waiting: int
    kv_usage: float
    """Share of the KV cache in use."""
    num_preemptions: int
    """Requests that a full KV cache put back."""
    num_sampled_tokens: int
    num_requests: int
    num_prompt_tokens: int
    num_cached_tokens: int
    first_token_s: float
    """Seconds from arrival to first token, summed over `num_requests`."""
    pause_s: float
    """Seconds in which weight updates stopped sampling."""


class InferenceServer:
    """Methods of the actor. `start` loads the engine; calling it again tells where the server listens."""

    def __init__(self, name: str, model: Path, config: ServerConfig) -> None:
        self._name = name
        self._model = model
        self._config = config
        self._starting = asyncio.Lock()
        self._engine: Engine | None = None
        self._address: Address | None = None

    async def start(self, version: PolicyVersion | None) -> ServerHealth:
        """Loads the model and listens, unless that is done.

        `version` names the weights on disk; None samples nothing before the first `load`.
        """
        async with self._starting:
            if self._engine is None:
                self._engine = await Engine.start(self._model, self._config, name=self._name, version=version)
                self._listener, self._address = await serve(
                    self._handle, _own_host(), secrets.token_hex(16), load=self._load
                )
        return await self.health()

    async def health(self) -> ServerHealth:
        """How it is; ends the process when the engine is dead."""
        engine, address = self._started(), self._address
        assert address is not None, "set where the engine is"
        if engine.is_dead:
            self._exit()
        return ServerHealth(
            address=address,
            pid=os.getpid(),
            version=engine.version,
            is_ready=engine.is_ready,
            engine=engine.class_name,
            at_s=time.monotonic(),
            num_running=engine.num_running,
            num_waiting=engine.num_waiting,
            kv_usage=engine.kv_usage,
            num_preemptions=engine.num_preemptions,
            num_sampled_tokens=engine.stats.num_sampled_tokens,
            num_requests=engine.stats.num_requests,
            num_prompt_tokens=engine.stats.num_prompt_tokens,
            num_cached_tokens=engine.stats.num_cached_tokens,
            first_token_s=engine.stats.first_token_s,
            pause_s=engine.stats.pause_s,
        )

    async def load(self, manifest: Manifest, mode: UpdateMode, max_columns: int, admits: bool) -> LoadReport:
        """See EngineWeights.load."""
        here = await asyncio.to_thread(localize, manifest)
        with self._living() as engine:
            return await engine.weights.load(here, mode=mode, max_columns=max_columns, admits=admits)

    async def admit(self) -> None:
        """See EngineWeights.admit."""
        self._started().weights.admit()

    async def load_disturbed(self, manifest: Manifest, noise: Noise) -> None:
        """See EngineWeights.load_disturbed."""
        here = await asyncio.to_thread(localize, manifest)
        with self._living() as engine:
            await engine.weights.load_disturbed(here, noise)

    async def probe(self, ids: Sequence[int]) -> list[float]:
        """See Engine.probe."""
        with self._living() as engine:
            return await engine.probe(ids)

    async def quarantine(self, reason: str) -> None:
        """See EngineWeights.quarantine."""
        self._started().weights.quarantine(reason)

    async def sleep(self) -> None:
        """See EngineWeights.sleep."""
        with self._living() as engine:
            await engine.weights.sleep()

    async def open_transfer(self, init_info: dict[str, Any]) -> None:
        """See EngineWeights.open_transfer."""
        with self._living() as engine:
            await engine.weights.open_transfer(init_info)

    async def close_transfer(self) -> None:
        """See EngineWeights.close_transfer."""
        with self._living() as engine:
            await engine.weights.close_transfer()

    async def begin_transfer(self, mode: UpdateMode) -> None:
        """See EngineWeights.begin_transfer."""
        with self._living() as engine:
            await engine.weights.begin_transfer(mode)

    async def receive(self, update_info: Any) -> None:
        """See EngineWeights.receive."""
        with self._living() as engine:
            await engine.weights.receive(update_info)

    async def end_transfer(self, version: PolicyVersion, admits: bool) -> None:
        """See EngineWeights.end_transfer."""
        with self._living() as engine:
            await engine.weights.end_transfer(version, admits)

    async def drain(self) -> None:
        """See Engine.drain."""
        self._started().drain()

    async def _handle(self, request: Request, request_id: str) -> AsyncGenerator[Part]:
        with self._living() as engine:
            async with aclosing(engine.generate(request, request_id)) as parts:
                async for part in parts:
                    yield part

    @contextmanager
    def _living(self) -> Iterator[Engine]:
        """The engine; one that died meanwhile takes the process with it, so that the caller sees a dead server."""
        engine = self._started()
        try:
            yield engine
        finally:
            if engine.is_dead:
                self._exit()

    def _started(self) -> Engine:
        if self._engine is None:
            raise ServerNotReady(f"{self._name} is still starting")
        return self._engine

    def _load(self) -> int:
        engine = self._started()
        return engine.num_running + engine.num_waiting

    def _exit(self) -> None:
        logger.error("server=%s engine died: ending the process", self._name)
        os._exit(1)


def _own_host() -> str:
    """Address of this node that other nodes reach; the loopback one where the cluster is this machine alone."""
    import ray

    nodes = [node for node in ray.nodes() if node["Alive"]]
    if len(nodes) == 1:
        return "127.0.0.1"
    return socket.gethostbyname(ray.util.get_node_ip_address())
