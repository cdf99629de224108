"""The Group buffer: admission, the staleness bound, refill, deadlines, the end, restores. Stateful test at the end."""

import asyncio
from dataclasses import replace

import pytest

from tests.trajectories.records import LOCATION, scored_group, version
from trajectories.buffer import EndOfTasks, GiveBack, GroupBuffer, StalenessPolicy, TakeTimeout
from trajectories.handle import GroupHandle, summarize


def handle(
    group_id: str, *, n: int = 0, lineage: int = 0, rewards: tuple[float | None, ...] = (1.0, 0.0)
) -> GroupHandle:
    return summarize(scored_group(list(rewards), group_id=group_id, n=n, lineage=lineage), LOCATION)


async def admit_and_start(buffer: GroupBuffer, *group_ids: str) -> None:
    for group_id in group_ids:
        await asyncio.wait_for(buffer.admit(group_id), 1)
        buffer.start(group_id, buffer.version)


async def finish(buffer: GroupBuffer, *group_ids: str, n: int = 0) -> None:
    await admit_and_start(buffer, *group_ids)
    for group_id in group_ids:
        assert buffer.put(handle(group_id, n=n))


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def ids(handles: list[GroupHandle]) -> list[str]:
    return [each.group_id for each in handles]


async def test_on_policy_admits_one_step_of_groups_and_the_next_only_after_advance():
    buffer = GroupBuffer(groups_per_step=2, max_staleness=0, version=version(0))
    await finish(buffer, "a", "b")
    waiting = asyncio.create_task(buffer.admit("c"))
    await settle()
    assert buffer.num_permits == 0
    assert ids(await buffer.take(version(0), 1)) == ["a", "b"]
    await settle()
    assert not waiting.done(), "consumed Groups return no permit; the next version does"
    buffer.advance(version(1))
    await asyncio.wait_for(waiting, 1)
    assert buffer.num_permits == 1


@pytest.mark.parametrize(("max_staleness", "expected"), [(0, 3), (1, 6), (4, 15)])
async def test_admission_is_staleness_plus_one_steps_of_groups(max_staleness: int, expected: int):
    buffer = GroupBuffer(groups_per_step=3, max_staleness=max_staleness, version=version(0))
    assert buffer.num_permits == expected
    await admit_and_start(buffer, *(f"g{index}" for index in range(expected)))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(buffer.admit("one more"), 0.01)
    assert buffer.num_permits == 0, "a cancelled wait takes no permit"


async def test_a_restarted_run_counts_the_steps_behind_its_weights_as_consumed():
    buffer = GroupBuffer(groups_per_step=3, max_staleness=1, version=version(7))
    assert (buffer.num_consumed, buffer.num_permits) == (21, 6)


async def test_take_is_oldest_token_first_then_by_admission():
    buffer = GroupBuffer(groups_per_step=2, max_staleness=2, version=version(0))
    await admit_and_start(buffer, "a", "b", "c", "d")
    for group_id, n in [("d", 1), ("c", 0), ("b", 1), ("a", 1)]:
        buffer.put(handle(group_id, n=n))
    assert ids(await buffer.take(version(0), 1)) == ["c", "a"]
    assert ids(await buffer.take(version(1), 1)) == ["b", "d"]


async def test_take_waits_for_a_running_group_that_the_next_version_would_strand():
    buffer = GroupBuffer(groups_per_step=2, max_staleness=1, version=version(0))
    await admit_and_start(buffer, "slow")
    await finish(buffer, "a", "b", "c")
    assert ids(await buffer.take(version(0), 1)) == ["a", "b"], "at version 0 it may still come in time for 1"
    buffer.advance(version(1))
    await finish(buffer, "d", n=1)
    taking = asyncio.create_task(buffer.take(version(1), 1))
    await settle()
    assert not taking.done(), "c and d are there, but slow would be too old at version 2"
    buffer.put(handle("slow"))
    assert ids(await taking) == ["slow", "c"]
    assert buffer.max_staleness_seen == 1


async def test_drop_does_not_wait_and_counts_what_it_gives_back_by_length():
    buffer = GroupBuffer(groups_per_step=1, max_staleness=1, version=version(0), policy=StalenessPolicy.DROP)
    await admit_and_start(buffer, "slow")
    await finish(buffer, "a")
    assert ids(await buffer.take(version(0), 1)) == ["a"]
    buffer.advance(version(1))
    await finish(buffer, "b", n=1)
    assert ids(await buffer.take(version(1), 1)) == ["b"], "slow is still running"
    buffer.advance(version(2))
    buffer.put(handle("slow"))
    await finish(buffer, "c", n=2)
    before = buffer.num_permits
    assert ids(await buffer.take(version(2), 1)) == ["c"]
    assert buffer.num_permits == before + 1, "slow's permit came back; c's is consumed and a step is still to advance"
    metrics = buffer.metrics()
    assert metrics["buffer/given_back/stale"] == 1
    assert metrics["buffer/stale/tokens_le_8"] == 1, "its members have 2 prompt and 3 sampled tokens"


async def test_down_weight_neither_waits_nor_drops_and_counts_what_is_beyond_the_bound_by_length():
    buffer = GroupBuffer(groups_per_step=1, max_staleness=1, version=version(0), policy=StalenessPolicy.DOWN_WEIGHT)
    await admit_and_start(buffer, "slow")
    await finish(buffer, "a")
    assert ids(await buffer.take(version(0), 1)) == ["a"]
    buffer.advance(version(1))
    await finish(buffer, "b", n=1)
    assert ids(await buffer.take(version(1), 1)) == ["b"], "slow is still running, and nobody waits for it"
    buffer.advance(version(2))
    buffer.put(handle("slow"))
    assert ids(await buffer.take(version(2), 1)) == ["slow"], "at age 2, one beyond the bound"
    assert buffer.metrics()["buffer/beyond/tokens_le_8"] == 1
    assert (buffer.max_staleness_seen, buffer.num_consumed) == (2, 3)


async def test_tokens_of_excluded_members_do_not_age_a_group():
    buffer = GroupBuffer(groups_per_step=1, max_staleness=0, version=version(3))
    await admit_and_start(buffer, "a")
    fresh = handle("a", n=3, rewards=(1.0, 0.0, None))
    old = replace(fresh.members[2], min_version=version(0), max_version=version(0))
    buffer.put(replace(fresh, members=(*fresh.members[:2], old)))
    assert ids(await buffer.take(version(3), 1)) == ["a"]
    assert buffer.max_staleness_seen == 0


async def test_a_group_without_a_valid_member_is_never_too_old_because_nothing_of_it_is_trained():
    buffer = GroupBuffer(groups_per_step=1, max_staleness=0, version=version(0), policy=StalenessPolicy.DROP)
    await admit_and_start(buffer, "lost")
    buffer.put(handle("lost", rewards=(None, None)))
    buffer.advance(version(1))
    assert ids(await buffer.take(version(1), 1)) == ["lost"]
    assert buffer.max_staleness_seen == 0


async def test_tokens_older_than_the_start_are_refused():
    buffer = GroupBuffer(groups_per_step=1, max_staleness=0, version=version(3))
    await admit_and_start(buffer, "a")
    with pytest.raises(ValueError, match="group a holds tokens of version 0:2 but started at version 0:3"):
        buffer.put(handle("a", n=2))


async def test_a_start_behind_the_servers_version_is_refused():
    buffer = GroupBuffer(groups_per_step=1, max_staleness=0, version=version(3))
    await buffer.admit("a")
    with pytest.raises(ValueError, match="advance the buffer only when every routable server"):
        buffer.start("a", version(2))


@pytest.mark.parametrize(
    ("rewards", "reason"),
    [((1.0, 1.0), "zero_variance"), ((0.0, 0.0, None), "zero_variance"), ((1.0, None), "under_filled")],
)
async def test_refill_replaces_groups_without_gradient(rewards: tuple[float | None, ...], reason: str):
    buffer = GroupBuffer(groups_per_step=1, max_staleness=0, version=version(0), refill=True)
    await admit_and_start(buffer, "a")
    assert not buffer.put(handle("a", rewards=rewards))
    assert buffer.num_permits == 1
    assert buffer.metrics()[f"buffer/given_back/{reason}"] == 1
    await finish(buffer, "b")
    assert ids(await buffer.take(version(0), 1)) == ["b"]


async def test_without_refill_groups_without_gradient_are_consumed():
    buffer = GroupBuffer(groups_per_step=2, max_staleness=0, version=version(0))
    await admit_and_start(buffer, "a", "b")
    assert buffer.put(handle("a", rewards=(1.0, 1.0)))
    assert buffer.put(handle("b", rewards=(None, None)))
    assert ids(await buffer.take(version(0), 1)) == ["a", "b"]


async def test_a_group_given_back_by_its_worker_unblocks_admission_and_cannot_be_put():
    buffer = GroupBuffer(groups_per_step=1, max_staleness=0, version=version(0))
    await admit_and_start(buffer, "a")
    waiting = asyncio.create_task(buffer.admit("b"))
    await settle()
    buffer.give_back("a", "worker_died")
    await asyncio.wait_for(waiting, 1)
    assert buffer.metrics()["buffer/given_back/worker_died"] == 1
    with pytest.raises(ValueError, match="cannot put group a: it is not admitted"):
        buffer.put(handle("a"))


async def test_a_group_is_put_once_and_only_after_its_start():
    buffer = GroupBuffer(groups_per_step=2, max_staleness=0, version=version(0))
    await buffer.admit("a")
    with pytest.raises(ValueError, match="not running"):
        buffer.put(handle("a"))
    buffer.start("a", version(0))
    with pytest.raises(ValueError, match="started before"):
        buffer.start("a", version(0))
    buffer.put(handle("a"))
    with pytest.raises(ValueError, match="put each Group once"):
        buffer.put(handle("a"))
    with pytest.raises(ValueError, match="already admitted"):
        await buffer.admit("a")


async def test_a_take_that_times_out_names_what_did_not_come_and_can_be_repeated():
    buffer = GroupBuffer(groups_per_step=3, max_staleness=0, version=version(4))
    await finish(buffer, "a", n=4)
    await admit_and_start(buffer, "b")
    await buffer.admit("c")
    with pytest.raises(TakeTimeout) as caught:
        await buffer.take(version(4), 0.01)
    message = str(caught.value)
    assert "step version 0:4 waited 0.01 s: 1 of 3 Groups are finished" in message
    assert "b (running since version 0:4, 0 s), c (admitted, 0 s)" in message
    buffer.start("c", version(4))
    for group_id in ("c", "b"):
        buffer.put(handle(group_id, n=4))
    assert ids(await buffer.take(version(4), 1)) == ["a", "b", "c"]


async def test_after_close_take_returns_what_is_left_then_raises_end_of_tasks():
    buffer = GroupBuffer(groups_per_step=2, max_staleness=1, version=version(0))
    await admit_and_start(buffer, "last")
    await finish(buffer, "a", "b", "c")
    blocked = asyncio.create_task(buffer.admit("never"))
    await settle()
    buffer.close()
    with pytest.raises(EndOfTasks):
        await blocked
    assert ids(await buffer.take(version(0), 1)) == ["a", "b"]
    buffer.advance(version(1))
    taking = asyncio.create_task(buffer.take(version(1), 1))
    await settle()
    assert not taking.done(), "last is still running and belongs to this step"
    buffer.give_back("last", "worker_died")
    assert ids(await taking) == ["c"]
    buffer.advance(version(2))
    with pytest.raises(EndOfTasks):
        await buffer.take(version(2), 1)


async def test_a_restore_gives_back_groups_of_abandoned_weights_and_keeps_older_ones():
    buffer = GroupBuffer(groups_per_step=1, max_staleness=4, version=version(4))
    await admit_and_start(buffer, "kept", "running kept", "abandoned", "running abandoned")
    buffer.put(handle("kept", n=4))
    buffer.advance(version(6))
    buffer.put(handle("abandoned", n=6))
    buffer.restore(version(5, lineage=1))
    assert buffer.metrics()["buffer/given_back/abandoned_lineage"] == 1
    assert buffer.num_consumed == 5
    assert buffer.put(handle("running kept", n=5))
    assert not buffer.put(handle("running abandoned", n=6))
    assert ids(await buffer.take(version(5, lineage=1), 1)) == ["kept"]
    buffer.advance(version(6, lineage=1))
    assert ids(await buffer.take(version(6, lineage=1), 1)) == ["running kept"]
    with pytest.raises(ValueError, match="a restore starts a lineage"):
        buffer.restore(version(5, lineage=1))


async def test_a_member_that_spans_a_restore_is_refused():
    buffer = GroupBuffer(groups_per_step=1, max_staleness=4, version=version(4))
    await admit_and_start(buffer, "a")
    buffer.restore(version(4, lineage=1))
    mixed = handle("a", n=4)
    spanning = replace(mixed.members[0], max_version=version(4, lineage=1))
    assert not buffer.put(replace(mixed, members=(spanning, mixed.members[1])))


async def test_take_and_advance_refuse_to_go_back():
    buffer = GroupBuffer(groups_per_step=1, max_staleness=0, version=version(3))
    with pytest.raises(ValueError, match="take at version 0:2, but the servers are at version 0:3"):
        await buffer.take(version(2), 1)
    with pytest.raises(ValueError, match="cannot advance from version 0:3 to version 0:2"):
        buffer.advance(version(2))


@pytest.mark.parametrize(("groups_per_step", "max_staleness", "min_valid"), [(0, 0, 2), (1, -1, 2), (1, 0, 0)], ids=str)
def test_impossible_sizes_are_refused(groups_per_step: int, max_staleness: int, min_valid: int):
    with pytest.raises(ValueError, match="must be >= 1"):
        GroupBuffer(
            version=version(0), groups_per_step=groups_per_step, max_staleness=max_staleness, min_valid=min_valid
        )


async def test_groups_of_before_a_restart_are_taken_in_while_they_are_kin_fresh_and_permitted():
    given_back = []
    buffer = GroupBuffer(
        groups_per_step=1,
        max_staleness=1,
        version=version(3, lineage=1),
        forks={0: 3},
        on_given_back=lambda group_id, reason: given_back.append((group_id, reason)),
    )
    assert buffer.readmit(handle("kin", n=2)) and buffer.holds("kin")
    assert not buffer.readmit(handle("past the checkpoint", n=4))
    assert not buffer.readmit(handle("old", n=1))
    assert buffer.readmit(handle("kin too", n=3))
    assert not buffer.readmit(handle("one too many", n=3))
    assert given_back == [
        ("past the checkpoint", GiveBack.ABANDONED_LINEAGE),
        ("old", GiveBack.STALE),
        ("one too many", GiveBack.SURPLUS),
    ]
    assert [h.group_id for h in await buffer.take(version(3, lineage=1), 1)] == ["kin"], "the older one first"
