"""The audit: zeros for a run that is right, and each kind of wrong found where it was made by hand."""

import json
from pathlib import Path

import pytest

from recipes.audit import KINDS, Config, audit_store, main
from tests.trajectories.records import scored_group
from trajectories.handle import Location
from trajectories.ledger import Ledger
from trajectories.schema import PolicyVersion
from trajectories.store import StoreWriter


def step(n: int, lineage: int = 0) -> PolicyVersion:
    return PolicyVersion(lineage=lineage, n=n)


def make_run(run: Path, *, max_staleness: int = 1) -> Path:
    """A run of two steps of one Group each, its third Group played and not consumed, and a checkpoint after step 2."""
    run.mkdir()
    (run / "config.json").write_text(json.dumps({"config": {"max_staleness": max_staleness}}))
    with Ledger(run / "ledger" / "store") as ledger, StoreWriter(run / "store", "w0") as store:
        ledger.fork(None)
        for slot, n in enumerate((0, 0, 1)):
            ledger.issue(f"g{slot}", slot)
            ledger.run(f"g{slot}")
            ledger.finish(f"g{slot}", store.append(scored_group([1.0, 0.0], group_id=f"g{slot}", n=n)))
        ledger.consume(["g0"], step(0))
        ledger.consume(["g1"], step(1))
        frontier = ledger.frontier(step(2))
    (run / "checkpoints" / "0-000002").mkdir(parents=True)
    (run / "checkpoints" / "0-000002" / "COMPLETE").write_text("{}")
    numbers = {"journal_bytes": frontier.journal_bytes, "num_consumed": frontier.num_consumed}
    (run / "state.json").write_text(json.dumps({"checkpoint": "0-000002", "lineage": 0, "n": 2, "frontier": numbers}))
    return run


def kinds(run: Path) -> dict[str, int]:
    audit, _ = audit_store(run, "store")
    found = {name: len(getattr(audit, name)) for name in KINDS}
    return {name: count for name, count in found.items() if count}


async def test_a_run_that_is_right_has_zeros_and_exits_with_0(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    await main(Config(run=make_run(tmp_path / "run")))
    out = capsys.readouterr().out
    assert "3 Groups: 0 pending, 0 running, 1 finished, 2 consumed, 0 dropped" in out
    assert [line.split()[-1] for line in out.splitlines()[1:]] == ["0"] * 5


async def test_anything_wrong_exits_with_1_and_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run = make_run(tmp_path / "run", max_staleness=0)
    with pytest.raises(SystemExit) as stop:
        await main(Config(run=run))
    assert stop.value.code == 1
    assert "group g1 of version 0:0 was consumed at version 0:1" in capsys.readouterr().out
    assert kinds(run) == {"too_stale": 1}


def test_a_segment_that_is_gone_is_lost_groups(tmp_path: Path):
    run = make_run(tmp_path / "run")
    (run / "store" / "w0.seg").unlink()
    assert kinds(run) == {"lost": 3}


def test_a_skipped_slot_a_broken_checkpoint_and_a_miscount_are_lost(tmp_path: Path):
    run = make_run(tmp_path / "run")
    with Ledger(run / "ledger" / "store") as ledger:
        ledger.issue("g4", 4)
    (run / "checkpoints" / "0-000002" / "COMPLETE").unlink()
    state = json.loads((run / "state.json").read_text())
    state["frontier"]["num_consumed"] = 4
    (run / "state.json").write_text(json.dumps(state))
    assert kinds(run) == {"lost": 1 + 1 + 2}


def test_a_group_stored_twice_is_duplicated_and_a_strange_one_is_unaccounted(tmp_path: Path):
    run = make_run(tmp_path / "run")
    with StoreWriter(run / "store", "w1") as store:
        store.append(scored_group([1.0, 0.0], group_id="g1"))
        store.append(scored_group([1.0, 0.0], group_id="stranger"))
    assert kinds(run) == {"duplicated": 1, "unaccounted": 1}


def test_two_groups_of_one_slot_behind_the_same_weights_are_trained_twice(tmp_path: Path):
    run = make_run(tmp_path / "run")
    with Ledger(run / "ledger" / "store") as ledger, StoreWriter(run / "store", "w1") as store:
        ledger.issue("g0-again", 0)
        ledger.finish("g0-again", store.append(scored_group([1.0, 0.0], group_id="g0-again", n=2)))
        ledger.consume(["g0-again"], step(2))
    assert kinds(run) == {"trained_twice": 1}


def test_the_same_group_in_two_lineages_is_right(tmp_path: Path):
    run = make_run(tmp_path / "run")
    with Ledger(run / "ledger" / "store") as ledger:
        ledger.consume(["g2"], step(2))
        ledger.fork(step(2))
        ledger.consume(["g2"], step(2, lineage=1))
    assert kinds(run) == {}


def test_tokens_of_weights_that_a_restore_threw_away_are_too_stale(tmp_path: Path):
    run = make_run(tmp_path / "run")
    with Ledger(run / "ledger" / "store") as ledger, StoreWriter(run / "store", "w1") as store:
        ledger.fork(step(2))
        ledger.issue("g3", 3)
        ledger.finish("g3", store.append(scored_group([1.0, 0.0], group_id="g3", n=3, lineage=0)))
        ledger.consume(["g3"], step(3, lineage=1))
    assert kinds(run) == {"too_stale": 1}


def test_a_run_that_is_going_on_and_a_directory_without_a_ledger_are_refused(tmp_path: Path):
    run = make_run(tmp_path / "run")
    with Ledger(run / "ledger" / "store"), pytest.raises(ValueError, match="when its run has ended"):
        audit_store(run, "store")


def test_a_location_that_holds_nothing_is_lost(tmp_path: Path):
    run = make_run(tmp_path / "run")
    with Ledger(run / "ledger" / "store") as ledger:
        ledger.issue("g3", 3)
        ledger.finish("g3", Location(segment="w0.seg", offset=10**6, length=9))
    assert kinds(run) == {"lost": 1}


async def test_pruned_payloads_are_counted_and_nothing_is_wrong_with_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    run = make_run(tmp_path / "run")
    with Ledger(run / "ledger" / "store") as ledger:
        ledger.prune(["w0.seg"])
    (run / "store" / "w0.seg").unlink()
    await main(Config(run=run))
    assert "0 dropped; 3 payloads pruned" in capsys.readouterr().out
    assert kinds(run) == {}
