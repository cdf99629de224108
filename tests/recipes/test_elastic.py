"""Runs that grow and shrink: wishes, who fulfils them, and a real harvest that gets a worker and gives it back."""

import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from actors.errors import PlacementError
from envs.errors import SandboxRefused
from envs.tasksets.shell import write_task_set
from recipes import elastic, harvest, scale
from recipes.audit import audit_store
from recipes.elastic import Fleet, Wish, ask, asked, fixed_fleet, scaling, server_fleet
from recipes.run import Run
from trajectories.ledger_index import GroupState
from trajectories.store import scan


def events(run: Path) -> list[dict[str, Any]]:
    path = run / "events.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


class Counted:
    """A fleet that is a number."""

    def __init__(self, count: int, most: int = 99) -> None:
        self.count, self.most = count, most
        self.error: Exception | None = None
        self.fleet = Fleet(
            name="workers",
            wished=lambda wish: wish.workers,
            count=lambda: self.count,
            grow=self._grow,
            shrink=self._shrink,
        )

    async def _grow(self) -> None:
        if self.error is not None:
            raise self.error
        if self.count == self.most:
            raise PlacementError("missing: 1 CPU (0 free of 2 in the cluster)")
        self.count += 1

    async def _shrink(self) -> None:
        self.count -= 1


async def until(is_true: Callable[[], bool], limit_s: float = 5.0) -> None:
    deadline = time.monotonic() + limit_s
    while not is_true():
        assert time.monotonic() < deadline, "it never came true"
        await asyncio.sleep(0.005)


def test_wishes_add_up_and_are_read_as_written(tmp_path: Path) -> None:
    assert asked(tmp_path) == Wish()
    ask(tmp_path, Wish(workers=4))
    assert ask(tmp_path, Wish(servers=2)) == asked(tmp_path) == Wish(workers=4, servers=2)
    assert ask(tmp_path, Wish(workers=1)) == Wish(workers=1, servers=2)
    assert [path.name for path in tmp_path.iterdir()] == ["scale.json"]


@pytest.mark.parametrize("text", ["{", '{"workers": 0}', '{"workers": 2.5}', '{"workers": "2"}', '{"wokers": 1}', "[]"])
def test_what_is_no_wish_is_refused_with_the_command_that_writes_one(tmp_path: Path, text: str) -> None:
    (tmp_path / "scale.json").write_text(text)
    with pytest.raises(ValueError, match=r"scale\.json is no wish .* write it with python -m recipes\.scale"):
        asked(tmp_path)


async def test_the_command_refuses_less_than_one_and_a_directory_without_rollouts(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="workers must be >= 1, got 0"):
        scale.Config(run=tmp_path, workers=0)
    with pytest.raises(ValueError, match="nothing to change"):
        scale.Config(run=tmp_path)
    with pytest.raises(ValueError, match="is no run with rollouts"):
        await scale.main(scale.Config(run=tmp_path, workers=2))
    (tmp_path / "config.json").write_text('{"config": {"rollouts": {}}}')
    await scale.main(scale.Config(run=tmp_path, workers=2))
    assert asked(tmp_path) == Wish(workers=2)


async def test_a_fleet_follows_its_wish_one_by_one_and_a_later_wish_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(elastic, "POLL_S", 0.001)
    workers = Counted(1)
    with Run.open(tmp_path, {"seed": 0}) as run:
        async with scaling(run, workers.fleet):
            ask(tmp_path, Wish(workers=3))
            await until(lambda: workers.count == 3)
            ask(tmp_path, Wish(workers=1))
            await until(lambda: workers.count == 1)
    assert [(event["event"], event["now"]) for event in events(tmp_path)] == [("scaled", n) for n in (2, 3, 2, 1)]


async def test_what_the_cluster_lacks_is_told_once_and_the_run_stays_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(elastic, "POLL_S", 0.001)
    workers = Counted(1, most=2)
    with Run.open(tmp_path, {"seed": 0}) as run:
        async with scaling(run, workers.fleet, fixed_fleet("servers", lambda wish: wish.servers, 0, "serves none")):
            ask(tmp_path, Wish(workers=4, servers=1))
            await until(lambda: len(events(tmp_path)) == 3)
            await asyncio.sleep(0.02)
            told = {event["why"] for event in events(tmp_path) if event["event"] == "not scaled"}
            assert told == {"missing: 1 CPU (0 free of 2 in the cluster)", "serves none"}
            assert (workers.count, len(events(tmp_path))) == (2, 3)
            workers.most = 9
            ask(tmp_path, Wish(workers=3))
            await until(lambda: workers.count == 3)
            assert len(events(tmp_path)) == 4, "the servers' wish is as it was"


async def test_a_server_that_is_down_goes_before_one_that_samples() -> None:
    """While a server is healed, the others may be all that samples."""
    down, sampling = SimpleNamespace(name="s0", version=None), SimpleNamespace(name="s1", version=0)
    removed: list[str] = []

    async def remove(name: str, deadline_s: float) -> None:
        removed.append(name)

    for servers in ((down, sampling), (sampling, down), (sampling, SimpleNamespace(name="s2", version=0))):
        await server_fleet(cast(Any, SimpleNamespace(servers=servers, add=None, remove=remove))).shrink()
    assert removed == ["s0", "s0", "s2"], "among those that sample the youngest"


@pytest.mark.parametrize(
    "error", [SandboxRefused("isolate: ENOENT: no bubblewrap on this node"), OSError("stale file")]
)
async def test_a_node_that_cannot_play_is_told_of_and_a_later_wish_is_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    monkeypatch.setattr(elastic, "POLL_S", 0.001)
    workers = Counted(1)
    workers.error = error
    with Run.open(tmp_path, {"seed": 0}) as run:
        async with scaling(run, workers.fleet):
            ask(tmp_path, Wish(workers=2))
            await until(lambda: len(events(tmp_path)) == 1)
            workers.error = None
            ask(tmp_path, Wish(workers=3))
            await until(lambda: workers.count == 3)
    assert [event["event"] for event in events(tmp_path)] == ["not scaled", "scaled", "scaled"]


async def test_a_file_that_is_no_wish_is_told_of_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elastic, "POLL_S", 0.001)
    (tmp_path / "scale.json").write_text("{")
    with Run.open(tmp_path, {"seed": 0}) as run:
        async with scaling(run, Counted(1).fleet):
            await asyncio.sleep(0.03)
    assert [event["event"] for event in events(tmp_path)] == ["not scaled"]


@pytest.mark.ray
@pytest.mark.sandbox
@pytest.mark.timeout(300)
async def test_a_harvest_gets_a_second_worker_and_gives_it_back_with_nothing_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(elastic, "POLL_S", 0.1)
    run, tasks = tmp_path / "run", tmp_path / "tasks"
    write_task_set(tasks, split="train", count=300, seed=0)
    config = harvest.Config(run=run, tasks=str(tasks), rollouts=harvest.RolloutPoolConfig(max_rollouts=2))
    playing = asyncio.create_task(harvest.main(config))
    try:
        await until(lambda: (run / "config.json").exists() and any((run / "store").glob("*.seg")), 120)
        ask(run, Wish(workers=2, servers=1))
        await until(lambda: playing.done() or "scaled" in [event["event"] for event in events(run)], 120)
        ask(run, Wish(workers=1))
        summary = await playing
    finally:
        playing.cancel()
    audit, states = audit_store(run, "store")
    assert (audit.num_findings, summary["harvested"], states[GroupState.FINISHED]) == (0, 300, 300)
    told = [(event["event"], event["now"]) for event in events(run)]
    assert sorted(told) == [("not scaled", 0), ("scaled", 1), ("scaled", 2)], events(run)
    writers = {location.segment for location, _ in scan(run / "store")}
    assert writers == {"part-0-0.seg", "part-0-1.seg"}, "both played"
