"""A rollout worker: an actor that plays whole Groups and stores them; only handles leave it.

Invariant: a Group is on disk before its handle is returned. Called by actors/rollout_{pool,fleet}.py.
"""

import asyncio
import gc
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol, TypeVar

import ray

from envs.build import EpisodeConfig, build_episode
from envs.creation import CreationGate
from envs.episode import Episode
from envs.group import run_group
from envs.remote_sampler import Teacher
from envs.sampler import Sampler
from envs.task import Task
from trajectories.handle import GroupHandle, Location, summarize
from trajectories.segments import SegmentedWriter, later_segments
from trajectories.store import read_group, scan_tails

T = TypeVar("T")

COLLECT_AFTER = (20_000, 50, 1_000)
"""When this process collects garbage. A full collection walks the records of every running rollout: at Python's default
one stopped the event loop of 5,200 rollouts for up to 1.1 s and all took 16% of its time; like this 3%."""


class EpisodeBuilder(Protocol):
    """What makes a worker's Episode; picklable. `build_episode`, or timed parts in a benchmark."""

    def __call__(
        self,
        config: EpisodeConfig,
        *,
        model: Path | None,
        sampler: Sampler | Teacher | None,
        run: str,
        gate: CreationGate | None,
    ) -> Episode:
        """The Episode that the worker plays; `run` names the Leases of its Sandboxes."""
        ...


class RolloutWorker:
    """Plays Groups with one Episode config, writing to segments of its own."""

    def __init__(
        self,
        name: str,
        config: EpisodeConfig,
        *,
        store: Path,
        model: Path | None,
        sampler: Sampler | Teacher | None,
        gate: CreationGate | None = None,
        build: EpisodeBuilder = build_episode,
        segment_mb: float = 256.0,
    ) -> None:
        gc.freeze()
        gc.set_threshold(*COLLECT_AFTER)
        self._config = config
        self._episode = build(config, model=model, sampler=sampler, run=store.parent.name, gate=gate)
        self._store = store
        self._writer = SegmentedWriter(store, name, segment_mb=segment_mb)
        self._writing = ThreadPoolExecutor(max_workers=1, thread_name_prefix="store")

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
        location = await self._write(self._writer.append, group)
        return summarize(group, location)

    async def find(self, starts: Mapping[str, int]) -> list[GroupHandle]:
        """Groups in the named segments of the store, each read from the byte given, and in those that came after."""
        return await asyncio.to_thread(self._find, starts)

    async def read(self, locations: Sequence[Location]) -> list[GroupHandle]:
        """Handles of stored Groups."""
        return await asyncio.to_thread(
            lambda: [summarize(read_group(self._store, location), location) for location in locations]
        )

    async def close(self) -> None:
        """Flushes the segment to disk and frees what the sandbox provider keeps."""
        await self._write(self._writer.close)
        await self._episode.provider.close()

    def _find(self, starts: Mapping[str, int]) -> list[GroupHandle]:
        later = dict.fromkeys(later_segments(self._store, starts), 0)
        return [summarize(group, location) for location, group in scan_tails(self._store, {**starts, **later})]

    async def _write(self, method: Callable[..., T], *args: Any) -> T:
        """Off the loop, since encoding takes milliseconds and the disk any time; in one thread, so in order."""
        return await asyncio.get_running_loop().run_in_executor(self._writing, method, *args)


RolloutWorkerActor = ray.remote(RolloutWorker)
