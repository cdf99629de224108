"""One inference server as the driver sees it: its actor's methods with deadlines, and what was last heard of it.

Invariant: a server whose actor died counts as serving nothing until it answers again.
Made by actors/inference_pool.py; weight sync (actors/weight_sync.py, actors/transfer_sync.py) gets it from there.
"""

from collections.abc import Sequence
from typing import Any

from actors.calls import call
from actors.engine_weights import LoadReport
from actors.errors import ActorDied
from actors.inference_config import UpdateMode
from actors.inference_server import ServerHealth
from actors.weight_noise import Noise
from actors.weight_stage import Manifest
from trajectories.schema import PolicyVersion


class ServerHandle:
    """See the module. Methods raise DeadlineMissed after `deadline_s` seconds, ActorDied when the process is gone."""

    def __init__(self, name: str, actor: Any) -> None:
        self.name = name
        self.actor = actor
        self.health: ServerHealth | None = None
        """None while it starts or restarts."""

    @property
    def version(self) -> PolicyVersion | None:
        """Version that it samples with; None while it samples nothing."""
        return self.health.version if self.health is not None and self.health.is_ready else None

    @property
    def pid(self) -> int:
        """Its process; 0 while it starts or restarts."""
        return self.health.pid if self.health is not None else 0

    @property
    def num_running(self) -> int:
        """Requests that it was sampling, as last heard of."""
        return self.health.num_running if self.health is not None else 0

    async def start(self, version: PolicyVersion | None, deadline_s: float) -> None:
        """Loads the model; `version` names the weights on disk, None samples nothing before the first load."""
        self.health = await self._call("start", version, deadline_s=deadline_s)

    async def refresh(self, deadline_s: float) -> None:
        """Asks how it is."""
        self.health = await self._call("health", deadline_s=deadline_s)

    async def load(
        self, manifest: Manifest, mode: UpdateMode, max_columns: int, admits: bool, deadline_s: float
    ) -> LoadReport:
        """Replaces the weights and reads them back; see EngineWeights.load."""
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

    async def sleep(self, deadline_s: float) -> None:
        """Has it leave GPU and cores to the learner until the next weights come."""
        await self._call("sleep", deadline_s=deadline_s)

    async def close_transfer(self, deadline_s: float) -> None:
        """Has it leave the group in which learner ranks sent weights (actors/vllm_transfer.py)."""
        await self._call("close_transfer", deadline_s=deadline_s)

    async def drain(self, deadline_s: float) -> None:
        """Has it take no further request."""
        await self._call("drain", deadline_s=deadline_s)
        await self.refresh(deadline_s)

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
