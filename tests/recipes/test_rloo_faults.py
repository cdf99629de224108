"""The loop of RLOO over fakes that die. Ledger, store, buffer, schedule, pool and audit are the real ones."""

import asyncio
import json
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from actors.errors import CheckpointFailed, LearnerLost
from actors.inference_errors import NoServerLeft
from actors.rollout_pool import RolloutPool, RolloutPoolConfig
from envs.task import Task
from learners.plan import BatchPlan
from recipes import rloo, rloo_parts
from recipes.audit import audit_store
from recipes.disk import DiskConfig
from recipes.event_log import read_history
from recipes.policies import PolicyConfig
from tests.recipes.test_schedule import task
from tests.trajectories.records import scored_group
from trajectories.handle import GroupHandle, Location, summarize
from trajectories.ledger_index import GroupState
from trajectories.schema import PolicyVersion
from trajectories.segments import SegmentedWriter
from trajectories.store import read_group, scan, scan_tails

TASKS = [task(f"t{index}") for index in range(5)]


class Killed(Exception):
    """Ends the run where it stands, as `kill -9` does: nothing catches it, nothing is saved."""


class Bed:
    """What outlives a process here: who dies when, and what was trained."""

    def __init__(self) -> None:
        self.learner_dies_at: list[int] = []
        """Optimizer steps, counted over all processes, at which a rank dies."""
        self.restores_die_at: list[str] = []
        """Where ranks die while they are made good, one after the other: in their "load" or at the "publish"."""
        self.driver_dies_at: list[int] = []
        self.servers_die_at: list[int] = []
        self.save_takes = 0
        """Optimizer steps that a checkpoint is being written for."""
        self.full_from: int | None = None
        """The optimizer step from which on the disk is full."""
        self.num_steps = 0
        self.version: PolicyVersion | None = None
        """What the servers serve."""


class FakeLearner:
    """Counts steps; a checkpoint is a directory with their number."""

    sharding, world_size, num_shares = "Fake", 1, 1

    def __init__(self, bed: Bed) -> None:
        self._bed = bed
        self.n = 0
        self.num_restarts = 0
        self._writing: tuple[Path, int, int] | None = None
        """Directory, the number that goes there, the step at which it is whole."""

    async def forward_backward(self, plan: BatchPlan, loss: Any) -> dict[str, float]:
        self._bed.num_steps += 1
        if self._bed.num_steps in self._bed.driver_dies_at:
            raise Killed
        if self._bed.num_steps in self._bed.learner_dies_at:
            self.n = -100
            raise LearnerLost("rank 0 died")
        return {}

    async def optim_step(self) -> dict[str, float]:
        self.n += 1
        return {"lr": 0.1}

    async def restart(self) -> None:
        self.n = 0
        self.num_restarts += 1
        self._writing = None

    async def begin_save(self, directory: Path) -> None:
        assert self._writing is None
        directory.with_name(directory.name + ".partial").mkdir(parents=True)
        self._writing = directory, self.n, self._bed.num_steps + self._bed.save_takes

    async def is_saved(self) -> bool:
        if self._writing is not None and self._bed.num_steps >= self._writing[2]:
            await self.finish_save()
        return self._writing is None

    async def finish_save(self) -> None:
        assert self._writing is not None
        (directory, n, _), self._writing = self._writing, None
        if self._bed.full_from is not None and self._bed.num_steps >= self._bed.full_from:
            raise CheckpointFailed("the checkpoint could not be written: disk full")
        partial = directory.with_name(directory.name + ".partial")
        (partial / "COMPLETE").write_text(str(n))
        partial.rename(directory)

    def dies_at(self, verb: str) -> None:
        """Raises LearnerLost if that is where the next rank dies."""
        if self.num_restarts and self._bed.restores_die_at[:1] == [verb]:
            self._bed.restores_die_at.pop(0)
            self.n = -100
            raise LearnerLost(f"rank 0 died in {verb}")

    async def load(self, directory: Path) -> None:
        self.dies_at("load")
        self.n = int((directory / "COMPLETE").read_text())

    async def save_pretrained(self, directory: Path) -> None:
        directory.mkdir(exist_ok=True)
        (directory / "n").write_text(str(self.n))


class FakeServers:
    """One server that is always healthy, but for the moments at which it has just died."""

    engine = "Fake"
    num_restarts = 0

    def __init__(self, bed: Bed) -> None:
        self._bed = bed

    def sampler(self) -> None:
        return None

    def oldest_version(self) -> PolicyVersion | None:
        return self._bed.version

    def metrics(self) -> dict[str, float]:
        return {}

    async def add(self) -> None:
        raise AssertionError("nobody wished for another server")

    async def until_one_is_up(self) -> None:
        self.num_restarts += 1


class FakeSync:
    """Publishes at once, and checks that the learner holds what it says."""

    num_syncs = num_syncs_in_flight = 0
    probe_gap_mean = 0.0

    def __init__(self, config: Any, *, source: FakeLearner, target: FakeServers, on_served: Callable[[], None]) -> None:
        self._source, self._bed, self._on_served = source, target._bed, on_served

    async def publish(self, version: PolicyVersion, *, barrier: bool = False) -> dict[str, float]:
        self._source.dies_at("publish")
        assert self._source.n == version.n, "the learner's weights are those of the version"
        if self._bed.servers_die_at and self._bed.num_steps >= self._bed.servers_die_at[0]:
            self._bed.servers_die_at.pop(0)
            raise NoServerLeft("all are down")
        self._bed.version = version
        self.num_syncs += 1
        self._on_served()
        return {}

    async def close(self) -> None:
        return None


class FakeWorker:
    """Writes Groups of the served version to a real segment."""

    def __init__(self, bed: Bed, store: Path, name: str) -> None:
        self._bed, self._store = bed, store
        self._writer = SegmentedWriter(store, name, segment_mb=0.0016)  # four Groups
        self.play, self.pid, self.find, self.read, self.close = (
            SimpleNamespace(remote=method) for method in (self._play, self._pid, self._find, self._read, self._close)
        )

    async def _play(self, task: Task, group_id: str, size: int) -> GroupHandle:
        await asyncio.sleep(0.002)
        version = self._bed.version
        assert version is not None
        group = scored_group([1.0, 0.0], group_id=group_id, n=version.n, lineage=version.lineage, task_id=task.id)
        return summarize(group, self._writer.append(group))

    async def _pid(self) -> int:
        return 1

    async def _find(self, starts: dict[str, int]) -> list[GroupHandle]:
        return [summarize(group, location) for location, group in scan_tails(self._store, starts)]

    async def _read(self, locations: list[Location]) -> list[GroupHandle]:
        return [summarize(read_group(self._store, location), location) for location in locations]

    async def _close(self) -> None:
        self._writer.close()


@pytest.fixture
def bed(monkeypatch: pytest.MonkeyPatch) -> Bed:
    bed = Bed()

    @asynccontextmanager
    async def nothing(*_: Any) -> AsyncIterator[None]:
        yield

    @asynccontextmanager
    async def learner(*_: Any, **__: Any) -> AsyncIterator[FakeLearner]:
        yield FakeLearner(bed)

    @asynccontextmanager
    async def servers(*_: Any, **__: Any) -> AsyncIterator[FakeServers]:
        yield FakeServers(bed)

    @asynccontextmanager
    async def rollouts(config: RolloutPoolConfig, *_: Any, store: Path, prefix: str, **__: Any) -> AsyncIterator[Any]:
        worker = FakeWorker(bed, store, prefix)
        pool = RolloutPool(config, [worker], sandbox={}, group_deadline_s=5, segments=[f"{prefix}.seg"], pids=[1])
        try:
            yield pool
        finally:
            await worker._close()

    monkeypatch.setattr(os, "fsync", lambda fd: None)  # nothing here loses power, and a busy disk takes seconds
    monkeypatch.setattr(rloo_parts, "start_cluster", nothing)
    monkeypatch.setattr(rloo_parts, "require", lambda demands: None)
    monkeypatch.setattr(rloo_parts, "start_learner_group", learner)
    monkeypatch.setattr(rloo_parts, "start_inference_pool", servers)
    monkeypatch.setattr(rloo_parts, "start_rollout_pool", rollouts)
    monkeypatch.setattr(rloo_parts, "make_sync", FakeSync)
    monkeypatch.setattr(rloo_parts, "resolve_tasks", lambda name, limit: TASKS)
    monkeypatch.setattr(rloo_parts, "resolve_policy", lambda name: Path("model"))
    return bed


def config_of(tmp_path: Path, **changes: Any) -> rloo.Config:
    values = {"steps": 6, "groups_per_step": 2, "group_size": 2, "checkpoint_every": 2, "policy": PolicyConfig()}
    return rloo.Config(run=tmp_path / "run", **values | changes)


def run_to_its_end(config: rloo.Config) -> tuple[dict[str, Any], int]:
    """The summary, and how many processes it took."""
    for num_starts in range(1, 10):
        try:
            return asyncio.run(rloo.main(config)), num_starts
        except Killed:
            continue
    raise AssertionError("it never ended")


def check_books(config: rloo.Config) -> None:
    audit, _ = audit_store(config.run, "store")
    assert audit.num_findings == 0, audit
    assert (config.run / "model" / "n").read_text() == str(config.steps)


def events(config: rloo.Config) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (config.run / "events.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("max_staleness", [0, 1])
@pytest.mark.parametrize("deaths", [[1], [4], [3, 4, 8], [6, 7, 8]])
def test_a_driver_that_dies_at_any_step_goes_on_and_its_books_agree(
    bed: Bed, tmp_path: Path, deaths: list[int], max_staleness: int
) -> None:
    bed.driver_dies_at = deaths
    config = config_of(tmp_path, max_staleness=max_staleness)
    summary, num_starts = run_to_its_end(config)
    assert (summary["rl_steps"], num_starts) == (6, 1 + len(deaths))
    assert summary["lineages"] == num_starts
    assert summary["max_staleness_seen"] <= max_staleness
    check_books(config)


@pytest.mark.parametrize("max_staleness", [0, 2])
@pytest.mark.parametrize("deaths", [[1], [5, 6], [3, 7]])
def test_a_learner_that_dies_is_restored_in_the_same_process_and_the_books_agree(
    bed: Bed, tmp_path: Path, deaths: list[int], max_staleness: int
) -> None:
    bed.learner_dies_at = deaths
    config = config_of(tmp_path, max_staleness=max_staleness)
    summary, num_starts = run_to_its_end(config)
    assert (summary["rl_steps"], num_starts, summary["lineages"]) == (6, 1, 1 + len(deaths))
    assert [event["event"] for event in events(config)].count("learner restored") == len(deaths)
    check_books(config)


@pytest.mark.parametrize("deaths", [["load"], ["publish"], ["publish", "load"]])
def test_a_learner_that_dies_while_it_is_restored_is_restored_again(
    bed: Bed, tmp_path: Path, deaths: list[str]
) -> None:
    bed.learner_dies_at, bed.restores_die_at = [4], list(deaths)
    summary, num_starts = run_to_its_end(config := config_of(tmp_path, max_staleness=1))
    assert (summary["rl_steps"], num_starts, bed.restores_die_at) == (6, 1, [])
    assert [event["event"] for event in events(config)].count("learner restored") == 1
    check_books(config)


def test_a_learner_that_can_never_be_restored_ends_the_run(bed: Bed, tmp_path: Path) -> None:
    bed.learner_dies_at, bed.restores_die_at = [4], ["load"] * 4
    with pytest.raises(LearnerLost, match="died in load"):
        run_to_its_end(config := config_of(tmp_path))
    assert bed.restores_die_at == ["load"], "three restores, as many as are allowed between two checkpoints"
    assert run_to_its_end(config)[0]["rl_steps"] == 6
    check_books(config)


@pytest.mark.parametrize("deaths", [[4], [5], [6, 8, 9]])
def test_deaths_between_the_beginning_and_the_end_of_a_checkpoint_leave_the_one_before(
    bed: Bed, tmp_path: Path, deaths: list[int]
) -> None:
    """Steps 2 and 4 begin checkpoints that are whole two steps later: a death at 4 finds none, later ones that of 2."""
    bed.driver_dies_at, bed.save_takes = deaths, 2
    config = config_of(tmp_path, max_staleness=1)
    summary, num_starts = run_to_its_end(config)
    assert (summary["rl_steps"], num_starts, summary["lineages"]) == (6, 1 + len(deaths), 1 + len(deaths))
    assert bed.num_steps == {4: 4 + 6, 5: 5 + 4, 6: 9 + 4}[deaths[0]], "steps till the last death, and from 0 or 2 to 6"
    assert not list((config.run / "checkpoints").glob("*.partial"))
    check_books(config)


def test_a_learner_that_dies_while_it_writes_is_restored_from_the_checkpoint_before(bed: Bed, tmp_path: Path) -> None:
    bed.learner_dies_at, bed.save_takes = [6], 2
    summary, num_starts = run_to_its_end(config := config_of(tmp_path))
    assert (summary["rl_steps"], num_starts, bed.num_steps) == (6, 1, 10)
    check_books(config)


def test_a_checkpoint_that_cannot_be_written_ends_the_run_and_the_same_command_goes_on(
    bed: Bed, tmp_path: Path
) -> None:
    bed.save_takes, bed.full_from = 1, 5
    config = config_of(tmp_path)
    with pytest.raises(CheckpointFailed, match="disk full"):
        run_to_its_end(config)
    assert json.loads((config.run / "state.json").read_text())["n"] == 2
    bed.full_from = None
    assert run_to_its_end(config)[0]["rl_steps"] == 6
    check_books(config)


def test_a_learner_that_dies_again_and_again_ends_the_run(bed: Bed, tmp_path: Path) -> None:
    bed.learner_dies_at = list(range(3, 20))
    with pytest.raises(LearnerLost):
        run_to_its_end(config_of(tmp_path))
    assert (tmp_path / "run" / "error.txt").exists()


def test_servers_that_all_die_at_a_publish_are_waited_for(bed: Bed, tmp_path: Path) -> None:
    bed.servers_die_at = [2, 4]
    config = config_of(tmp_path)
    assert run_to_its_end(config)[0]["rl_steps"] == 6
    assert [event["event"] for event in events(config)].count("inference_servers") == 2
    check_books(config)


def test_all_at_once(bed: Bed, tmp_path: Path) -> None:
    bed.learner_dies_at, bed.driver_dies_at, bed.servers_die_at = [3, 9], [5, 8], [4]
    config = config_of(tmp_path, max_staleness=1)
    summary, num_starts = run_to_its_end(config)
    assert (summary["rl_steps"], num_starts) == (6, 3)
    check_books(config)


def test_a_finished_run_says_so_and_more_steps_go_on(
    bed: Bed, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_of(tmp_path, steps=2)
    first, _ = run_to_its_end(config)
    before = {path: path.read_bytes() for path in config.run.rglob("*") if path.is_file()}
    assert run_to_its_end(config)[0]["rl_steps"] == 2
    assert "is finished: 2 steps, ended by steps; nothing to do" in capsys.readouterr().out
    assert {path: path.read_bytes() for path in config.run.rglob("*") if path.is_file()} == before
    second, _ = run_to_its_end(config_of(tmp_path, steps=4))
    assert second["weight_syncs"] == first["weight_syncs"] + 3, "one at its start and one for each step"
    logged = dict(read_history(config.run))
    assert logged[4]["total/seconds"] > logged[2]["total/seconds"], "the second process counts on from the first"
    check_books(config_of(tmp_path, steps=4))


@pytest.mark.parametrize("deaths", [[], [7, 15, 16]])
def test_a_run_that_keeps_few_trajectories_has_books_that_agree(bed: Bed, tmp_path: Path, deaths: list[int]) -> None:
    bed.driver_dies_at = deaths
    config = config_of(tmp_path, steps=20, max_staleness=1, disk=DiskConfig(keep_steps=2))
    assert run_to_its_end(config)[0]["rl_steps"] == 20
    check_books(config)
    audit, states = audit_store(config.run, "store")
    num_left = sum(1 for _ in scan(config.run / "store"))
    # Segments have 13 Groups here. The newest of each process stays, and where a process dies its segment ends short.
    least, most = (13, 37) if deaths else (20, 24)
    assert audit.num_pruned >= least and num_left <= most and states[GroupState.CONSUMED] >= 40


def test_the_end_of_the_tasks_ends_the_run(bed: Bed, tmp_path: Path) -> None:
    summary, _ = run_to_its_end(config_of(tmp_path, steps=100, epochs=2))
    assert (summary["ended_by"], summary["rl_steps"]) == ("tasks", 5), "ten Groups, two a step"


def test_other_tasks_are_refused_with_what_differs(bed: Bed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_to_its_end(config_of(tmp_path, steps=2))
    monkeypatch.setattr(rloo_parts, "resolve_tasks", lambda name, limit: TASKS[:4])
    with pytest.raises(ValueError, match="made with other tasks: count was 5, is 4"):
        run_to_its_end(config_of(tmp_path, steps=4))
