"""The rollout pool: spreads Groups over rollout workers and hands back their handles.

Invariant: every Group that was started ends as one handle or as one raised error, whatever dies meanwhile; the pool is
the one place that bounds how many rollouts run. Called by recipes: `stream` feeds a learner, `play_all` harvests and
evaluates. A ledger, where one is given, learns of a Group before a worker does and of its end before anyone else.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray

from actors.calls import call
from actors.cluster import Resources
from actors.creation_gate import start_creation_gate
from actors.errors import ClusterError, DeadlineMissed
from actors.placement import unplaced
from actors.rollout_fleet import RolloutFleet
from actors.rollout_stream import GroupRequest, RolloutStream, cancel_all
from actors.rollout_worker import EpisodeBuilder, RolloutWorkerActor
from actors.slots import Slots
from envs.build import EpisodeConfig, build_episode
from envs.remote_sampler import Teacher
from envs.sampler import Sampler
from trajectories.buffer import GroupBuffer
from trajectories.handle import GroupHandle, Location
from trajectories.ledger import Ledger
from trajectories.schema import PolicyVersion
from trajectories.store import SUFFIX

logger = logging.getLogger(__name__)

WorkerStarter = Callable[[int], tuple[Any, str]]
"""From the index of a worker to its actor and the segment that it writes."""

_READ_DEADLINE_S = 600.0
"""For a worker that reads Groups back from the store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutPoolConfig:
    """How many rollouts run, and where."""

    num_workers: int = 1
    max_rollouts: int = 256
    """Rollouts that may run at once over all workers."""
    start_deadline_s: float = 120.0
    max_reissues: int = 3
    """How often a Group is played again because its worker died; one more death ends the run."""
    segment_mb: float = 256.0
    """A worker's segment of the store that holds so much is full, and the next begun."""
    resources: Resources = field(default_factory=Resources)

    def __post_init__(self) -> None:
        if self.num_workers < 1 or self.max_rollouts < 1:
            raise ValueError(f"num_workers and max_rollouts must be >= 1, got {self.num_workers}, {self.max_rollouts}")
        if self.segment_mb <= 0:
            raise ValueError(f"segment_mb must be > 0, got {self.segment_mb}")


class RolloutPool:
    """A fleet of rollout workers; made by `start_rollout_pool`."""

    def __init__(
        self,
        config: RolloutPoolConfig,
        workers: list,
        *,
        sandbox: dict[str, str],
        group_deadline_s: float,
        segments: Sequence[str],
        pids: Sequence[int],
        start_worker: WorkerStarter | None = None,
        end_worker: Callable[[Any], None] = ray.kill,
    ) -> None:
        """`segments`: the first file that each worker writes, by which the Groups of a dead one are found again.

        `start_worker` makes the worker with a given index, for `add_worker`; `end_worker` ends its process.
        """
        self._config = config
        self._start_worker = start_worker
        self._end_worker = end_worker
        self._group_deadline_s = group_deadline_s
        self.fleet = RolloutFleet(
            workers,
            segments=segments,
            pids=pids,
            start_deadline_s=config.start_deadline_s,
            play_deadline_s=group_deadline_s + 60,
            max_reissues=config.max_reissues,
        )
        """The workers, and what became of them."""
        self.slots = Slots(config.max_rollouts)
        """Resized to run more or fewer rollouts at once."""
        self.sandbox = sandbox
        """What isolates the rollouts, as the workers report it."""
        self.num_played = 0
        """Groups that came to their end."""

    async def play(self, request: GroupRequest, size: int, ledger: Ledger | None = None) -> GroupHandle:
        """Plays one Group of `size` rollouts on the least loaded worker, once there are slots for all of them."""
        await self.slots.take(size)
        try:
            if ledger is not None:
                ledger.run(request.group_id)
            handle = await self.fleet.play(request.task, request.group_id, size)
            self.num_played += 1
            if ledger is not None:
                ledger.finish(handle.group_id, handle.location)
            return handle
        finally:
            self.slots.give(size)

    async def add_worker(self) -> int:
        """Starts one more worker, which takes Groups from now on; returns its index.

        PlacementError naming what is missing when the cluster has no room for it within `start_deadline_s`.
        """
        if self._start_worker is None:
            raise ValueError("this pool was given no way to start workers; make it with start_rollout_pool")
        index = len(self.fleet.workers)
        worker, segment = self._start_worker(index)
        try:
            limit = self._config.start_deadline_s
            await call(worker.ready, deadline_s=limit, what=f"start of rollout worker {index}")
            pid = await call(worker.pid, deadline_s=limit, what=f"process of rollout worker {index}")
        except DeadlineMissed as error:
            self._end_worker(worker)
            raise unplaced(error, self._config.resources) from error
        except BaseException:
            self._end_worker(worker)
            raise
        return self.fleet.add(worker, segment, pid)

    async def remove_worker(self, index: int) -> None:
        """Ends a worker after its last Group; it takes no more of them from now on. ValueError for the last one."""
        worker = await self.fleet.retire(index, deadline_s=self._group_deadline_s + 60)
        try:
            await call(worker.close, deadline_s=30, what=f"closing rollout worker {index}")
        finally:
            self._end_worker(worker)

    async def find(self, starts: Mapping[str, int]) -> list[GroupHandle]:
        """Groups in the named segments of the store, each read from the byte given; a worker reads them."""
        return await self.fleet.call_any("find", dict(starts), deadline_s=_READ_DEADLINE_S)

    async def read(self, locations: Sequence[Location]) -> list[GroupHandle]:
        """Handles of stored Groups; a worker reads them."""
        return await self.fleet.call_any("read", list(locations), deadline_s=_READ_DEADLINE_S) if locations else []

    async def play_all(
        self, requests: Iterable[GroupRequest], size: int, ledger: Ledger | None = None
    ) -> AsyncIterator[GroupHandle]:
        """Handles of all Groups, each as it finishes; at most one more in flight than there are slots for."""
        ahead = max(1, self._config.max_rollouts // size) + 1
        running: set[asyncio.Task[GroupHandle]] = set()
        waiting = iter(requests)
        try:
            while True:
                while len(running) < ahead and (request := next(waiting, None)) is not None:
                    running.add(asyncio.create_task(self.play(request, size, ledger)))
                if not running:
                    return
                done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for finished in done:
                    yield finished.result()
        finally:
            await cancel_all(running)

    @asynccontextmanager
    async def stream(
        self,
        requests: Iterable[GroupRequest],
        size: int,
        buffer: GroupBuffer,
        oldest_served: Callable[[], PolicyVersion | None],
        ledger: Ledger | None = None,
    ) -> AsyncIterator[RolloutStream]:
        """A stream of Groups that feeds a learner, paced by the buffer's admission, for the length of the block."""
        stream = RolloutStream(requests, lambda request: self.play(request, size, ledger), buffer, oldest_served)
        issuing = asyncio.create_task(stream.issue())
        try:
            yield stream
        finally:
            await cancel_all({issuing})

    async def close(self) -> None:
        """Flushes every worker's segment; one that cannot be reached is logged, and its segment holds what it wrote."""
        for index, worker in self.fleet.serving():
            try:
                await call(worker.close, deadline_s=30, what=f"closing rollout worker {index}")
            except ClusterError as error:
                logger.warning("%s", error)


@asynccontextmanager
async def start_rollout_pool(
    config: RolloutPoolConfig,
    episode: EpisodeConfig,
    *,
    store: Path,
    prefix: str,
    model: Path | None = None,
    sampler: Sampler | Teacher | None = None,
    build: EpisodeBuilder = build_episode,
) -> AsyncIterator[RolloutPool]:
    """A pool of rollout workers that write to `store`, their segments named `prefix`-0, `prefix`-1, ...

    A harness that needs a policy takes its tokenizer from the directory `model` and its replies from `sampler`; a
    Teacher in its place needs no model. `build` makes each worker's Episode from the config.
    """
    gate = start_creation_gate(episode.sandbox.creation) if episode.sandbox.is_gated else None
    # A call that waits for room in an actor costs its caller's deadline, so there is room for every rollout.
    actor = RolloutWorkerActor.options(
        max_concurrency=config.max_rollouts + 16, max_restarts=-1, **config.resources.options()
    )
    started: list[Any] = []

    def start_worker(index: int) -> tuple[Any, str]:
        name = f"{prefix}-{index}"
        parts: dict[str, Any] = {"model": model, "sampler": sampler, "gate": gate, "build": build}
        started.append(actor.remote(name, episode, store=store, segment_mb=config.segment_mb, **parts))
        return started[-1], f"{name}{SUFFIX}"

    try:
        workers, segments = zip(*map(start_worker, range(config.num_workers)), strict=True)
        provenances = [
            await call(worker.ready, deadline_s=config.start_deadline_s, what=f"start of rollout worker {index}")
            for index, worker in enumerate(workers)
        ]
        pool = RolloutPool(
            config,
            list(workers),
            sandbox=provenances[0],
            group_deadline_s=episode.group_deadline_s,
            segments=segments,
            pids=[await call(worker.pid, deadline_s=30, what="process of a rollout worker") for worker in workers],
            start_worker=start_worker,
        )
        try:
            yield pool
        finally:
            await pool.close()
    finally:
        for worker in started:
            ray.kill(worker)
        if gate is not None:
            gate.close()
