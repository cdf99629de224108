"""The inference server: a Ray actor around one Engine.

Invariant: the actor is a shell; the Engine holds the state, and when it dies the actor's process ends with it, so that
Ray starts it anew. Started and called by actors/inference_pool.py; rollout workers reach it by its socket.
"""

import asyncio
import logging
import os
import secrets
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from actors.inference_config import ServerConfig, UpdateMode
from actors.inference_engine import Engine, LoadReport
from actors.inference_errors import ServerNotReady
from actors.inference_wire import Address, Request, serve
from actors.weight_noise import Noise
from actors.weight_stage import Manifest
from envs.sampler import Completion
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
    num_running: int
    num_waiting: int
    num_sampled_tokens: int
    num_prompt_tokens: int
    num_cached_tokens: int


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
            num_running=engine.num_running,
            num_waiting=engine.num_waiting,
            num_sampled_tokens=engine.num_sampled_tokens,
            num_prompt_tokens=engine.num_prompt_tokens,
            num_cached_tokens=engine.num_cached_tokens,
        )

    async def load(self, manifest: Manifest, mode: UpdateMode, max_columns: int, admits: bool) -> LoadReport:
        """See Engine.load."""
        return await self._started().load(manifest, mode=mode, max_columns=max_columns, admits=admits)

    async def admit(self) -> None:
        """See Engine.admit."""
        self._started().admit()

    async def load_disturbed(self, manifest: Manifest, noise: Noise) -> None:
        """See Engine.load_disturbed."""
        await self._started().load_disturbed(manifest, noise)

    async def probe(self, ids: Sequence[int]) -> list[float]:
        """See Engine.probe."""
        return await self._started().probe(ids)

    async def quarantine(self, reason: str) -> None:
        """See Engine.quarantine."""
        self._started().quarantine(reason)

    async def _handle(self, request: Request, request_id: str) -> Completion:
        engine = self._started()
        try:
            return await engine.generate(
                request.prompt_ids, request.params, stop_ids=request.stop_ids, request_id=request_id
            )
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
