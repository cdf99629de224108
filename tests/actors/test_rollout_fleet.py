"""The fleet over fake workers that die: what is played again, what is found in the store, when it gives up."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray.exceptions

from actors import rollout_fleet
from actors.errors import ActorDied, ClusterError
from actors.rollout_fleet import RolloutFleet
from envs.task import Environment, Limits, Provenance, Task, VerifierSpec
from trajectories.handle import GroupHandle, Location

TASK = Task(
    id="t",
    instruction="do",
    environment=Environment(),
    verifier=VerifierSpec(),
    limits=Limits(),
    provenance=Provenance(),
    path=Path("t"),
)


class MortalWorker:
    """A worker whose process dies with the Groups named in `deadly`, before or after it stored them.

    As a Ray actor that restarts: calls fail while it is down, then a new process answers with a new pid.
    """

    def __init__(self, pid: int, *, deadly: dict[str, int] | None = None, comes_back: bool = True) -> None:
        self.process = pid
        self.deadly = deadly or {}
        """Group id -> how many processes die of it."""
        self.stores_first = False
        self.comes_back = comes_back
        self.is_down = False
        self.segment: list[GroupHandle] = []
        self.played: list[str] = []
        self.play, self.pid, self.ready, self.find = (
            SimpleNamespace(remote=method) for method in (self._play, self._pid, self._ready, self._find)
        )

    async def _play(self, task: Task, group_id: str, size: int) -> GroupHandle:
        self._check()
        self.played.append(group_id)
        if self.deadly.get(group_id, 0):
            self.deadly[group_id] -= 1
            if self.stores_first:
                self._store(group_id)
            self.is_down = True
            self._check()
        process = self.process
        await asyncio.sleep(0.01)
        self._check(process)
        return self._store(group_id)

    async def _pid(self) -> int:
        if self.is_down and self.comes_back:
            self.is_down, self.process = False, self.process + 1000
        self._check()
        return self.process

    async def _ready(self) -> dict[str, str]:
        self._check()
        return {}

    async def _find(self, starts: dict[str, int]) -> list[GroupHandle]:
        self._check()
        (start,) = starts.values()
        return [handle for handle in self.segment if handle.location.offset >= start]

    def _store(self, group_id: str) -> GroupHandle:
        location = Location(segment="w.seg", offset=10 * len(self.segment), length=10)
        self.segment.append(GroupHandle(group_id=group_id, task_id="t", location=location, members=()))
        return self.segment[-1]

    def _check(self, process: int | None = None) -> None:
        if self.is_down or (process is not None and process != self.process):
            raise ray.exceptions.ActorUnavailableError("restarting", None)


def fleet_of(*workers: MortalWorker, start_deadline_s: float = 2.0) -> RolloutFleet:
    return RolloutFleet(
        workers,
        segments=["w.seg"] * len(workers),
        pids=[worker.process for worker in workers],
        start_deadline_s=start_deadline_s,
        play_deadline_s=5,
        max_reissues=2,
    )


async def play(fleet: RolloutFleet, *group_ids: str) -> list[Any]:
    return await asyncio.gather(*(fleet.play(TASK, group_id, 2) for group_id in group_ids))


async def test_groups_of_a_dead_worker_are_played_again_under_their_ids() -> None:
    worker = MortalWorker(1, deadly={"b": 1})
    fleet = fleet_of(worker)
    handles = await play(fleet, "a", "b", "c")
    assert [handle.group_id for handle in handles] == ["a", "b", "c"]
    stored = [handle.group_id for handle in worker.segment]
    assert sorted(stored) == ["a", "b", "c"], "each is stored once"
    assert (fleet.num_restarts, fleet.num_lost) == (1, 0)
    assert fleet.num_reissued == 3, "all three were on it"


async def test_a_group_that_was_stored_before_its_worker_died_is_found_and_not_played_again() -> None:
    worker = MortalWorker(1, deadly={"b": 1})
    worker.stores_first = True
    fleet = fleet_of(worker)
    await play(fleet, "a")
    (handle,) = await play(fleet, "b")
    assert (handle.group_id, handle.location.offset) == ("b", 10)
    assert worker.played == ["a", "b"]
    assert (fleet.num_found, fleet.num_reissued) == (1, 0)


async def test_a_group_sent_to_a_worker_that_is_coming_back_does_not_end_it_again() -> None:
    worker = MortalWorker(1, deadly={"a": 1})
    fleet = fleet_of(worker)
    first = asyncio.create_task(fleet.play(TASK, "a", 2))
    for _ in range(3):
        await asyncio.sleep(0)
    assert worker.is_down
    handles = await asyncio.gather(first, fleet.play(TASK, "b", 2))
    assert [handle.group_id for handle in handles] == ["a", "b"]
    assert (fleet.num_restarts, worker.process) == (1, 1001), "one death, one new process"


async def test_a_worker_that_does_not_come_back_leaves_its_groups_to_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rollout_fleet, "_RETRY_S", 0.01)
    dead, living = MortalWorker(1, deadly={"a": 1}, comes_back=False), MortalWorker(2)
    fleet = fleet_of(dead, living, start_deadline_s=0.05)
    (handle,) = await play(fleet, "a")
    assert handle.group_id == "a" and living.played == ["a"]
    assert (fleet.num_restarts, fleet.num_lost, fleet.num_reissued) == (0, 1, 1)
    assert await play(fleet, "b") and living.played == ["a", "b"]


async def test_a_group_that_kills_every_worker_ends_the_run_naming_its_task() -> None:
    fleet = fleet_of(MortalWorker(1, deadly={"a": 99}))
    with pytest.raises(ActorDied, match="group a was played 3 times and its worker died each time: run the Task t"):
        await play(fleet, "a")


async def test_without_a_worker_left_the_run_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout_fleet, "_RETRY_S", 0.01)
    fleet = fleet_of(MortalWorker(1, deadly={"a": 1}, comes_back=False), start_deadline_s=0.05)
    with pytest.raises(ActorDied, match="no rollout worker is left"):
        await play(fleet, "a")


async def test_a_worker_that_was_only_out_of_reach_is_ended_before_its_groups_are_played_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else it would store them too, later."""
    worker = MortalWorker(1, deadly={"a": 1})
    killed: list[int] = []

    def kill(actor: MortalWorker, *, no_restart: bool) -> None:
        assert not no_restart
        killed.append(actor.process)
        actor.process += 1000

    async def same_process() -> int:
        worker.is_down = False
        return worker.process

    worker.pid = SimpleNamespace(remote=same_process)
    monkeypatch.setattr(rollout_fleet.ray, "kill", kill)
    await play(fleet_of(worker), "a")
    assert killed == [1]


async def test_what_a_worker_was_asked_to_read_when_it_went_is_read_by_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when a run shrinks while a restore reads its Groups."""
    monkeypatch.setattr(rollout_fleet, "_RETRY_S", 0.001)
    gone, living = MortalWorker(1, comes_back=False), MortalWorker(2)
    gone.is_down = True
    assert await fleet_of(gone, living).call_any("find", {"w.seg": 0}, deadline_s=2) == []
    with pytest.raises(ClusterError, match="find on rollout worker 0"):
        await fleet_of(gone).call_any("find", {"w.seg": 0}, deadline_s=0.01)


async def test_a_worker_that_dies_while_it_searches_for_the_groups_of_another_costs_no_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rollout_fleet, "_RETRY_S", 0.001)
    first, second = MortalWorker(1, deadly={"a": 1}), MortalWorker(2)
    first.stores_first = second.is_down = True
    second.segment = first.segment
    fleet = fleet_of(first, second)
    assert [handle.group_id for handle in await play(fleet, "a")] == ["a"]
    assert (first.played, fleet.num_found) == (["a"], 1), "it was in the store, and is there once"
