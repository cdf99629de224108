"""A rollout worker: an actor that plays whole Groups and stores them; only handles leave it.

Invariant: a Group is on disk before its handle is returned. Called by actors/rollout_pool.py alone.
"""

import asyncio
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import ray

from envs.build import EpisodeConfig, build_episode
from envs.creation import CreationGate
from envs.group import run_group
from envs.remote_sampler import Teacher
from envs.sampler import Sampler
from envs.task import Task
from trajectories.handle import GroupHandle, Location, summarize
from trajectories.store import StoreWriter, read_group, scan_tails


class RolloutWorker:
    """Plays Groups with one Episode config, writing to a segment of its own."""

    def __init__(
        self,
        name: str,
        config: EpisodeConfig,
        *,
        store: Path,
        model: Path | None,
        sampler: Sampler | Teacher | None,
        gate: CreationGate | None = None,
    ) -> None:
        self._config = config
        self._episode = build_episode(config, model=model, sampler=sampler, run=store.parent.name, gate=gate)
        self._store = store
        self._writer = StoreWriter(store, name)

    async def ready(self) -> dict[str, str]:
        """What isolates the rollouts, once this worker can play; SandboxRefused where nothing can."""
        return dict(await self._episode.provider.provenance())

    async def pid(self) -> int:
        """Number of its process."""
        return os.getpid()

    async def play(self, task: Task, group_id: str, size: int) -> GroupHandle:
        """Plays one Group, stores it and returns its handle."""
        group = await run_group(
            task, size=size, episode=self._episode, group_id=group_id, deadline_s=self._config.group_deadline_s
        )
        return summarize(group, self._writer.append(group))

    async def find(self, starts: Mapping[str, int]) -> list[GroupHandle]:
        """Groups in the named segments of the store, each read from the byte given."""
        return await asyncio.to_thread(
            lambda: [summarize(group, location) for location, group in scan_tails(self._store, starts)]
        )

    async def read(self, locations: Sequence[Location]) -> list[GroupHandle]:
        """Handles of stored Groups."""
        return await asyncio.to_thread(
            lambda: [summarize(read_group(self._store, location), location) for location in locations]
        )

    async def close(self) -> None:
        """Flushes the segment to disk and frees what the sandbox provider keeps."""
        self._writer.close()
        await self._episode.provider.close()


RolloutWorkerActor = ray.remote(RolloutWorker)
