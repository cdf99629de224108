"""How a training run goes on, over a fake learner and fake workers that read a real store."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from shutil import copytree
from typing import Any, cast

import pytest

from actors.errors import CheckpointFailed, DeadlineMissed
from learners.retention import RetentionConfig, retain
from recipes import resume
from recipes.checkpoints import Checkpoints
from recipes.resume import (
    begin_checkpoint,
    learn_of_stored_groups,
    restore,
    reuse_groups,
    task_set_facts,
    wait_for_writers,
)
from recipes.run import Run
from recipes.schedule import Schedule
from tests.recipes.test_schedule import TASKS, task
from tests.trajectories.records import scored_group
from trajectories.buffer import GroupBuffer
from trajectories.handle import GroupHandle, Location, summarize
from trajectories.ledger import Ledger, LedgerError
from trajectories.ledger_index import GroupState
from trajectories.schema import PolicyVersion
from trajectories.store import StoreWriter, read_group, scan_tails


class FakeLearner:
    """Saves by making a directory, at once or when asked for the `num_asks`-th time; tells what it did."""

    def __init__(self, num_asks: int = 1, error: Exception | None = None) -> None:
        self.done: list[tuple[str, str]] = []
        self._num_asks, self._error = num_asks, error
        self._asked = 0
        self._writing: Path | None = None

    async def begin_save(self, directory: Path) -> None:
        assert self._writing is None
        directory.with_name(directory.name + ".partial").mkdir(parents=True)
        self._writing, self._asked = directory, 0
        self.done.append(("begin", directory.name))

    async def is_saved(self) -> bool:
        self._asked += 1
        if self._asked >= self._num_asks:
            await self.finish_save()
        return self._writing is None

    async def finish_save(self) -> None:
        writing, self._writing = self._writing, None
        assert writing is not None
        if self._error is not None:
            raise self._error
        writing.with_name(writing.name + ".partial").rename(writing)
        self.done.append(("save", writing.name))

    async def load(self, directory: Path) -> None:
        self.done.append(("load", directory.name))


class StoreReader:
    """What a pool of rollout workers reads from a store."""

    def __init__(self, store: Path) -> None:
        self._store = store

    async def find(self, starts: Mapping[str, int]) -> list[GroupHandle]:
        return [summarize(group, location) for location, group in scan_tails(self._store, starts)]

    async def read(self, locations: Sequence[Location]) -> list[GroupHandle]:
        return [summarize(read_group(self._store, location), location) for location in locations]


def version(n: int, lineage: int = 0) -> PolicyVersion:
    return PolicyVersion(lineage=lineage, n=n)


def open_run(tmp_path: Path) -> Any:
    return Run.open(tmp_path / "run", {"seed": 0})


def open_ledger(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path / "run" / "ledger" / "store")


async def checkpoint(run: Run, learner: Any, ledger: Ledger, at: PolicyVersion) -> None:
    """A checkpoint that is waited for."""
    checkpoints = Checkpoints(run, learner)
    await begin_checkpoint(checkpoints, ledger, at)
    await checkpoints.finish()


async def test_a_run_goes_on_from_its_checkpoint_under_a_new_lineage(tmp_path: Path):
    learner: Any = FakeLearner()
    with open_run(tmp_path) as run, open_ledger(tmp_path) as ledger:
        assert await restore(run, learner, ledger) == version(0)
        ledger.finish("a@0.0", Location(segment="w.seg", offset=0, length=1), slot=0)
        ledger.consume(["a@0.0"], version(0))
        await checkpoint(run, learner, ledger, version(1))
        await checkpoint(run, learner, ledger, version(1))
    assert learner.done == [("begin", "0-000001"), ("save", "0-000001")], "one that is there is kept"
    with open_run(tmp_path) as run, open_ledger(tmp_path) as ledger:
        assert await restore(run, learner, ledger) == version(1, lineage=1)
        assert learner.done[-1] == ("load", "0-000001")
        assert ledger.is_consumed("a@0.0")
    with open_run(tmp_path) as run, open_ledger(tmp_path) as ledger:
        assert await restore(run, learner, ledger) == version(1, lineage=2)
        assert ledger.ancestry.forks == {0: 1, 1: 1}


def consume(ledger: Ledger, slot: int, n: int) -> None:
    ledger.finish(f"g{slot}", Location(segment="w.seg", offset=slot, length=1), slot=slot)
    ledger.consume([f"g{slot}"], version(n))


async def test_a_checkpoint_counts_when_it_is_whole_with_the_ledger_of_when_it_began(tmp_path: Path):
    learner: Any = FakeLearner(num_asks=2)
    counted: list[str] = []
    with open_run(tmp_path) as run, open_ledger(tmp_path) as ledger:
        await restore(run, learner, ledger)
        checkpoints = Checkpoints(run, learner)
        consume(ledger, 0, 0)
        await begin_checkpoint(checkpoints, ledger, version(1), lambda: counted.append("first"))
        consume(ledger, 1, 1)
        await checkpoints.poll()
        assert (run.load_state(), counted) == (None, []), "its files are not there yet"
        await checkpoints.poll()
        state = run.load_state()
        assert state is not None and (state["n"], state["frontier"]["num_consumed"], counted) == (1, 1, ["first"])
        await begin_checkpoint(checkpoints, ledger, version(2))
        await begin_checkpoint(checkpoints, ledger, version(3))
        assert run.load_state()["n"] == 2, "the one before is waited for"
    # killed while the third is written
    with open_run(tmp_path) as run, open_ledger(tmp_path) as ledger:
        assert await restore(run, learner, ledger) == version(2, lineage=1)
        assert learner.done[-1] == ("load", "0-000002")
        assert sorted(path.name for path in (run.directory / "checkpoints").iterdir()) == ["0-000001", "0-000002"]


async def test_a_checkpoint_that_was_whole_but_not_named_when_the_run_was_killed_is_removed(tmp_path: Path):
    learner: Any = FakeLearner()
    with open_run(tmp_path) as run, open_ledger(tmp_path) as ledger:
        await restore(run, learner, ledger)
        await checkpoint(run, learner, ledger, version(1))
        await begin_checkpoint(Checkpoints(run, learner), ledger, version(2))
        await learner.finish_save()
        assert (run.directory / "checkpoints" / "0-000002").is_dir()
    with open_run(tmp_path) as run, open_ledger(tmp_path) as ledger:
        assert await restore(run, learner, ledger) == version(1, lineage=1)
        assert [path.name for path in (run.directory / "checkpoints").iterdir()] == ["0-000001"]


async def test_what_a_user_keeps_beside_the_checkpoints_is_left_alone(tmp_path: Path):
    learner: Any = FakeLearner()
    with open_run(tmp_path) as run, open_ledger(tmp_path) as ledger:
        await restore(run, learner, ledger)
        await checkpoint(run, learner, ledger, version(1))
    for name in ("0-000001-copy", "notes"):
        copytree(tmp_path / "run" / "checkpoints" / "0-000001", tmp_path / "run" / "checkpoints" / name)
        (tmp_path / "run" / "checkpoints" / name / "COMPLETE").touch()
    with open_run(tmp_path) as run, open_ledger(tmp_path) as ledger:
        assert await restore(run, learner, ledger) == version(1, lineage=1)
        retain(RetentionConfig(last=1), run.directory / "checkpoints", {})
        found = sorted(path.name for path in (run.directory / "checkpoints").iterdir())
        assert found == ["0-000001", "0-000001-copy", "notes"]


async def test_a_checkpoint_that_cannot_be_written_is_an_error_and_the_one_before_counts(tmp_path: Path):
    learner: Any = FakeLearner(error=CheckpointFailed("disk full"))
    with open_run(tmp_path) as run, open_ledger(tmp_path) as ledger:
        await restore(run, learner, ledger)
        checkpoints = Checkpoints(run, learner)
        await begin_checkpoint(checkpoints, ledger, version(1))
        with pytest.raises(CheckpointFailed, match="disk full"):
            await checkpoints.poll()
        assert (run.load_state(), checkpoints.newest_state) == (None, None)
        await checkpoints.poll()  # it was told once


async def test_a_run_killed_before_its_first_checkpoint_begins_anew_under_a_new_lineage(tmp_path: Path):
    learner: Any = FakeLearner()
    for lineage in (0, 1):
        with open_run(tmp_path) as run, open_ledger(tmp_path) as ledger:
            assert await restore(run, learner, ledger) == version(0, lineage)
    assert learner.done == []


async def test_a_journal_that_is_older_than_the_checkpoint_is_refused(tmp_path: Path):
    learner: Any = FakeLearner()
    with open_run(tmp_path) as run, open_ledger(tmp_path) as ledger:
        await restore(run, learner, ledger)
        await checkpoint(run, learner, ledger, version(1))
    journal = tmp_path / "run" / "ledger" / "store" / "journal.seg"
    journal.unlink()
    with (
        open_run(tmp_path) as run,
        open_ledger(tmp_path) as ledger,
        pytest.raises(LedgerError, match="restore the journal"),
    ):
        await restore(run, learner, ledger)


async def test_a_run_of_before_ledgers_is_refused(tmp_path: Path):
    learner: Any = FakeLearner()
    with open_run(tmp_path) as run, open_ledger(tmp_path) as ledger:
        run.save_state({"checkpoint": "0-000001", "lineage": 0, "n": 1, "consumed": []})
        with pytest.raises(ValueError, match="made before runs kept a ledger"):
            await restore(run, learner, ledger)


async def test_stored_groups_that_nobody_reported_are_learnt_of_and_strange_ones_refused(tmp_path: Path):
    store = tmp_path / "store"
    with Ledger(tmp_path / "ledger") as ledger:
        ledger.fork(None)
        schedule = Schedule(TASKS, ledger, seed=0, epochs=None)
        ids = [request.group_id for request, _ in zip(schedule, range(3), strict=False)]
        with StoreWriter(store, "w0") as writer:
            locations = [writer.append(scored_group([1.0, 0.0], group_id=group_id)) for group_id in ids]
        ledger.run(ids[0])
        ledger.finish(ids[0], locations[0])
        ledger.run(ids[1])
        rollouts = cast(Any, StoreReader(store))
        assert await learn_of_stored_groups(store, rollouts, ledger, schedule) == 2
        assert [ledger.index.locations(group_id) for group_id in ids] == [[location] for location in locations]
        assert await learn_of_stored_groups(store, rollouts, ledger, schedule) == 0
        with StoreWriter(store, "w1") as writer:
            writer.append(scored_group([1.0, 0.0], group_id="stranger"))
        with pytest.raises(LedgerError, match="holds group stranger, which this run did not play"):
            await learn_of_stored_groups(store, rollouts, ledger, schedule)


async def test_stored_groups_are_used_again_the_oldest_first_and_the_rest_is_due_again(tmp_path: Path):
    store = tmp_path / "store"
    with Ledger(tmp_path / "ledger") as ledger:
        ledger.fork(None)
        schedule = Schedule(TASKS, ledger, seed=0, epochs=None)
        ids = [request.group_id for request, _ in zip(schedule, range(3), strict=False)]
        with StoreWriter(store, "w0") as writer:
            for group_id, n in zip(ids, (2, 1, 3), strict=True):
                ledger.finish(group_id, writer.append(scored_group([1.0, 0.0], group_id=group_id, n=n)))
        lineage = ledger.fork(version(2))
        buffer = GroupBuffer(
            groups_per_step=1,
            max_staleness=1,
            version=version(2, lineage),
            forks=ledger.ancestry.forks,
            on_given_back=schedule.give_back,
        )
        counts = await reuse_groups(ids, cast(Any, StoreReader(store)), ledger, buffer)
        assert counts == {"groups_reused": 2.0, "groups_given_back": 1.0}
        (first,) = await buffer.take(version(2, lineage), 1)
        assert first.group_id == ids[1]
        row = ledger.index.group(ids[2])
        assert row is not None and (row.state, row.reason) == (GroupState.DROPPED, "abandoned_lineage")
        assert next(iter(schedule)).group_id == ids[2].replace(".0", ".1")


async def test_a_run_waits_for_the_workers_of_its_predecessor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(resume, "_POLL_S", 0.01)
    with StoreWriter(tmp_path, "w0"), pytest.raises(DeadlineMissed, match=r"w0\.seg is still being written"):
        await wait_for_writers(tmp_path, deadline_s=0.05)
    await wait_for_writers(tmp_path)
    await wait_for_writers(tmp_path / "nothing yet")


def test_another_set_of_tasks_has_another_digest():
    assert task_set_facts(TASKS) == task_set_facts([task(name) for name in "abcd"])
    assert task_set_facts(TASKS)["count"] == 4
    digests = {json.dumps(task_set_facts(tasks)) for tasks in (TASKS, TASKS[::-1], TASKS[:3], [*TASKS[:3], task("e")])}
    assert len(digests) == 4
