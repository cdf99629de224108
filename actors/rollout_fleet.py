"""The fleet of rollout workers: plays each Group on a living one, whatever dies meanwhile.

Invariant: a Group is played again only after its dead worker's segment was read and does not hold it, so the store has
each Group once. Ray starts a dead worker anew, elsewhere if need be; one that does not come back leaves the fleet.
Called by actors/rollout_pool.py, which bounds how much runs.
"""

import asyncio
import logging
import time
from collections.abc import Collection, Sequence
from typing import Any

import ray

from actors.calls import call
from actors.errors import ActorDied, ClusterError, DeadlineMissed
from envs.task import Task
from trajectories.handle import GroupHandle, Location

logger = logging.getLogger(__name__)

_RETRY_S = 0.5
_FIND_DEADLINE_S = 300.0


class RolloutFleet:
    """The workers of a pool."""

    def __init__(
        self,
        workers: Sequence[Any],
        *,
        segments: Sequence[str],
        pids: Sequence[int],
        start_deadline_s: float,
        play_deadline_s: float,
        max_reissues: int,
    ) -> None:
        self.workers = list(workers)
        """Those in service and those that left."""
        self.num_restarts = 0
        """Workers that died and are back."""
        self.num_lost = 0
        """Workers that died and did not come back."""
        self.num_reissued = 0
        """Groups that were played again because their worker died."""
        self.num_found = 0
        """Groups of a dead worker that it had stored; they were not played again."""
        self._ended = asyncio.Event()
        """Set whenever a Group ends."""
        self._states = [_WorkerState(segment, pid) for segment, pid in zip(segments, pids, strict=True)]
        self._start_deadline_s = start_deadline_s
        self._play_deadline_s = play_deadline_s
        self._max_reissues = max_reissues

    async def play(self, task: Task, group_id: str, size: int) -> GroupHandle:
        """Plays one Group on the least loaded worker.

        A worker that does not answer in time is ended like a dead one. Raises ActorDied when none is left, or when the
        Group outlived too many.
        """
        for _ in range(self._max_reissues + 1):
            index = self._least_loaded()
            state, life = self._states[index], self._states[index].life
            state.running[group_id] = size
            try:
                handle = await call(
                    self.workers[index].play,
                    task,
                    group_id,
                    size,
                    deadline_s=self._play_deadline_s,
                    what=f"group {group_id} on rollout worker {index}",
                )
                state.reported(handle.location)
                return handle
            except (ActorDied, DeadlineMissed) as failure:
                logger.warning("group=%s worker=%d %s", group_id, index, _first_line(failure))
                await self._bring_back(index, life, is_stuck=isinstance(failure, DeadlineMissed))
                if (found := state.found.pop(group_id, None)) is not None:
                    self.num_found += 1
                    return found
                self.num_reissued += 1
            finally:
                state.running.pop(group_id, None)
                self._ended.set()
        raise ActorDied(
            f"group {group_id} was played {self._max_reissues + 1} times and its worker died each time: run the Task "
            f"{task.id} alone to see why, or leave it out"
        )

    def add(self, worker: Any, segment: str, pid: int) -> int:
        """Takes one more worker into service; returns its index."""
        self.workers.append(worker)
        self._states.append(_WorkerState(segment, pid))
        return len(self.workers) - 1

    async def retire(self, index: int, deadline_s: float) -> Any:
        """Takes a worker out of service and returns it once its last Group ended; ValueError for the last one."""
        serving = [served for served, _ in self.serving()]
        if index not in serving or len(serving) == 1:
            raise ValueError(f"cannot remove rollout worker {index} of {serving}: one must be left")
        state = self._states[index]
        state.is_out = True
        try:
            async with asyncio.timeout(deadline_s):
                while state.running:
                    self._ended.clear()
                    await self._ended.wait()
        except TimeoutError:
            names = ", ".join(state.running)
            raise DeadlineMissed(f"rollout worker {index} did not end {names} within {deadline_s:.0f} s") from None
        return self.workers[index]

    def serving(self) -> list[tuple[int, Any]]:
        """(index, worker) of those that take Groups."""
        return [(index, self.workers[index]) for index, state in enumerate(self._states) if not state.is_out]

    async def call_any(self, verb: str, *args: Any, deadline_s: float) -> Any:
        """The result of a method that only reads, of the least loaded worker; when that one goes, of another."""
        deadline = time.monotonic() + deadline_s
        asked: set[int] = set()
        while True:
            index = self._least_loaded(asked)
            asked.add(index)
            what, left = f"{verb} on rollout worker {index}", max(0.0, deadline - time.monotonic())
            try:
                return await call(getattr(self.workers[index], verb), *args, deadline_s=left, what=what)
            except ActorDied as death:
                if time.monotonic() + _RETRY_S > deadline:
                    raise
                logger.warning("worker=%d %s", index, _first_line(death))
            await asyncio.sleep(_RETRY_S)

    def metrics(self) -> dict[str, float]:
        """Totals of what died and was made good."""
        return {
            "recovery/rollout_workers": float(self.num_restarts),
            "recovery/rollout_workers_lost": float(self.num_lost),
            "recovery/groups_reissued": float(self.num_reissued),
            "recovery/groups_found": float(self.num_found),
        }

    def _least_loaded(self, asked: Collection[int] = ()) -> int:
        """Of those that serve; one that is being brought back, or was `asked` before, only where there is no other."""
        living = [index for index, _ in self.serving()]
        if not living:
            raise ActorDied("no rollout worker is left: all died and did not come back; add nodes and start again")
        whole = [index for index in living if not self._states[index].mending.locked()]
        best = [index for index in whole if index not in asked] or [index for index in living if index not in asked]
        return min(best or whole or living, key=lambda index: sum(self._states[index].running.values()))

    async def _bring_back(self, index: int, life: int, *, is_stuck: bool) -> None:
        """Returns when the worker is back, or out of the fleet, and what its dead process had stored is known."""
        state = self._states[index]
        async with state.mending:  # the first of its Groups to notice does it for all
            if state.life != life:
                return
            if is_stuck:
                ray.kill(self.workers[index], no_restart=False)
            if await self._is_back(index):
                self.num_restarts += 1
            else:
                state.is_out = True
                self.num_lost += 1
                logger.error("worker=%d did not come back; its Groups go to the others", index)
            state.life += 1  # only now: who was sent to the dead process meanwhile need not end the new one
            handles = await self.call_any("find", dict(state.reported_to), deadline_s=_FIND_DEADLINE_S)
            for handle in handles:
                state.reported(handle.location)
            state.found |= {handle.group_id: handle for handle in handles if handle.group_id in state.running}

    async def _is_back(self, index: int) -> bool:
        """Waits for the process that Ray starts in its place."""
        worker, state = self.workers[index], self._states[index]
        deadline = time.monotonic() + self._start_deadline_s
        while (left := deadline - time.monotonic()) > 0:
            try:
                pid = await call(worker.pid, deadline_s=left, what=f"restart of rollout worker {index}")
                if pid == state.pid:  # it was out of reach and still plays; what it may store later must not come
                    ray.kill(worker, no_restart=False)
                    state.pid = 0
                    continue
                await call(worker.ready, deadline_s=left, what=f"restart of rollout worker {index}")
            except ClusterError as error:
                logger.info("worker=%d is not back yet: %s", index, _first_line(error))
                await asyncio.sleep(_RETRY_S)
            else:
                state.pid = pid
                logger.warning("worker=%d is back, pid=%d", index, pid)
                return True
        return False


class _WorkerState:
    """One worker, over all the processes that it had."""

    def __init__(self, segment: str, pid: int) -> None:
        self.pid = pid
        self.life = 0
        """Processes before this one."""
        self.is_out = False
        """Whether it takes no more Groups: lost, or retired."""
        self.mending = asyncio.Lock()
        self.running: dict[str, int] = {}
        """Group id -> rollouts."""
        self.found: dict[str, GroupHandle] = {}
        """Groups of the last dead process that are in the store and that nobody has picked up yet."""
        self.reported_to = {segment: 0}
        """Segment that it wrote -> byte up to which every frame was reported."""
        self._ahead: dict[tuple[str, int], int] = {}
        """Frames reported behind those bytes: (segment, offset) -> length."""

    def reported(self, location: Location) -> None:
        """A frame's handle has come."""
        segment = location.segment
        self._ahead[segment, location.offset] = location.length
        end = self.reported_to.setdefault(segment, 0)
        while (length := self._ahead.pop((segment, end), None)) is not None:
            end += length
        self.reported_to[segment] = end


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [repr(error)])[0]
