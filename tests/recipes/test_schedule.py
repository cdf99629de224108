"""The order of Groups: fixed by the seed, without holes, over restarts and restores."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from envs.task import Environment, Limits, Provenance, Task, VerifierSpec
from recipes.schedule import Schedule
from trajectories.handle import Location
from trajectories.ledger import Ledger
from trajectories.schema import PolicyVersion


def task(name: str) -> Task:
    return Task(
        id=name,
        instruction="do",
        environment=Environment(),
        verifier=VerifierSpec(),
        limits=Limits(),
        provenance=Provenance(),
        path=Path(name),
    )


TASKS = [task(name) for name in "abcd"]


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    with Ledger(tmp_path) as opened:
        opened.fork(None)
        yield opened


def schedule(ledger: Ledger, epochs: int | None = None) -> Schedule:
    return Schedule(TASKS, ledger, seed=0, epochs=epochs)


def take(requests: Iterator, count: int) -> list[str]:
    return [next(requests).group_id for _ in range(count)]


def store(ledger: Ledger, *group_ids: str) -> None:
    for group_id in group_ids:
        ledger.run(group_id)
        ledger.finish(group_id, Location(segment="w.seg", offset=0, length=1))


def step(n: int, lineage: int = 0) -> PolicyVersion:
    return PolicyVersion(lineage=lineage, n=n)


def test_passes_are_shuffled_differently_and_the_same_on_each_start(tmp_path: Path):
    orders = []
    for name in ("one", "two"):
        with Ledger(tmp_path / name) as ledger:
            orders.append(take(iter(schedule(ledger)), 8))
    assert orders[0] == orders[1]
    first, second = orders[0][:4], orders[0][4:]
    assert {id_[0] for id_ in first} == {id_[0] for id_ in second} == set("abcd")
    assert [id_[1:] for id_ in first] == ["@0.0"] * 4 and [id_[1:] for id_ in second] == ["@1.0"] * 4
    assert [id_[0] for id_ in first] != [id_[0] for id_ in second]


def test_epochs_end_the_order_and_what_is_given_back_later_still_comes(ledger: Ledger):
    requests = schedule(ledger, epochs=1)
    ids = [request.group_id for request in requests]
    assert len(ids) == 4 and list(requests) == []
    store(ledger, *ids)
    requests.give_back(ids[2], "stale")
    requests.give_back(ids[3], "zero_variance")
    assert [request.group_id for request in requests] == [ids[2].replace(".0", ".1")]


def test_a_group_names_its_slot(ledger: Ledger):
    plan = schedule(ledger)
    ids = take(iter(plan), 6)
    assert [plan.slot_of(group_id) for group_id in ids] == [0, 1, 2, 3, 4, 5]
    assert plan.slot_of(ids[5].replace(".0", ".3")) == 5
    assert plan.slot_of("z@0.0") is None and plan.slot_of("a") is None


def test_after_a_kill_what_ran_comes_first_then_the_order_goes_on_without_a_hole(ledger: Ledger):
    ids = take(iter(schedule(ledger)), 5)
    ledger.run(ids[1])
    store(ledger, ids[0], ids[2])
    ledger.consume([ids[0]], step(0))
    ledger.fork(step(1))
    again = schedule(ledger)
    assert again.go_on(1 + 1) == [ids[2]], "it is in the store and may be fresh"
    following = take(iter(again), 4)
    assert following[:3] == [ids[1], ids[3], ids[4]], "under their own ids"
    assert again.slot_of(following[3]) == 5


def test_what_was_trained_on_after_the_checkpoint_is_used_again_or_played_again(ledger: Ledger):
    ids = take(iter(schedule(ledger)), 3)
    store(ledger, *ids)
    for n, group_id in enumerate(ids):
        ledger.consume([group_id], step(n))
    ledger.fork(step(1))  # the steps at 1 and 2 are lost; what was consumed at 2 cannot be fresh under staleness 0
    again = schedule(ledger)
    assert again.go_on(1) == [ids[1]]
    assert take(iter(again), 1) == [ids[2].replace(".0", ".1")]


def test_after_a_restore_in_this_process_only_what_is_not_alive_is_looked_at(ledger: Ledger):
    plan = schedule(ledger)
    ids = take(iter(plan), 4)
    store(ledger, ids[0], ids[1], ids[2])
    ledger.consume([ids[0]], step(0))
    ledger.fork(step(0))
    alive = {ids[2], ids[3]}
    assert plan.go_back(1, alive.__contains__) == [ids[0], ids[1]], "one trained on, one taken for the step that failed"
    assert plan.slot_of(take(iter(plan), 1)[0]) == 4, "what is alive is not issued again"


def test_a_slot_whose_issue_a_power_failure_took_is_not_skipped(ledger: Ledger, tmp_path: Path):
    with Ledger(tmp_path / "before") as lost:
        ids = take(iter(schedule(lost)), 3)
    ledger.finish(ids[2], Location(segment="w.seg", offset=0, length=1), slot=2)  # all that is left, in the store
    plan = schedule(ledger)
    assert plan.go_on(0) == [ids[2]]
    requests = iter(plan)
    assert take(requests, 2) == ids[:2]
    assert plan.slot_of(take(requests, 1)[0]) == 3
