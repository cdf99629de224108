"""The rollout pool over fake workers: what it bounds, what it passes on."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from actors.rollout_pool import RolloutPool, RolloutPoolConfig
from actors.rollout_stream import GroupRequest
from envs.task import Environment, Limits, Provenance, Task, VerifierSpec
from trajectories.buffer import EndOfTasks, GroupBuffer
from trajectories.handle import BranchSize, GroupHandle, Location, MemberSummary
from trajectories.schema import Outcome, PolicyVersion

V0 = PolicyVersion(lineage=0, n=0)


class FakeWorker:
    """Plays a Group in `delay_s`; counts the rollouts that run at once."""

    def __init__(self, delay_s: float = 0.01, broken: str = "") -> None:
        self.delay_s = delay_s
        self.broken = broken
        self.running = 0
        self.most = 0
        self.is_closed = False
        self.play = SimpleNamespace(remote=self._play)
        self.ready = SimpleNamespace(remote=self._ready)
        self.close = SimpleNamespace(remote=self._close)
        self.pid = SimpleNamespace(remote=self._pid)

    async def _ready(self) -> dict[str, str]:
        return {}

    async def _pid(self) -> int:
        return 1

    async def _close(self) -> None:
        assert self.running == 0
        self.is_closed = True

    async def _play(self, task: Task, group_id: str, size: int) -> GroupHandle:
        self.running += size
        self.most = max(self.most, self.running)
        await asyncio.sleep(self.delay_s)
        self.running -= size
        if group_id == self.broken:
            raise RuntimeError(f"bug in {group_id}")
        return handle(group_id, size)


def handle(group_id: str, size: int) -> GroupHandle:
    members = tuple(
        MemberSummary(
            trajectory_id=f"{group_id}.{member}",
            outcome=Outcome.COMPLETED,
            reward=float(member % 2),
            num_turns=1,
            branches=(BranchSize(num_tokens=4, num_trained=2),),
            min_version=V0,
            max_version=V0,
            seconds=0.0,
        )
        for member in range(size)
    )
    location = Location(segment="s", offset=0, length=1)
    return GroupHandle(group_id=group_id, task_id=group_id, location=location, members=members)


def requests(count: int) -> Iterator[GroupRequest]:
    for index in range(count):
        task = Task(
            id=f"t{index}",
            instruction="do",
            environment=Environment(network_mode="no-network"),
            verifier=VerifierSpec(),
            limits=Limits(),
            provenance=Provenance(),
            path=Path("t"),
        )
        yield GroupRequest(task=task, group_id=f"g{index}")


def waiting_task() -> Task:
    return next(requests(1)).task


class OneByOne:
    """Requests that may come back after they ended, as a Schedule's do."""

    def __init__(self, waiting: list[GroupRequest]) -> None:
        self._waiting = waiting

    def __iter__(self) -> Iterator[GroupRequest]:
        while self._waiting:
            yield self._waiting.pop(0)


def make_pool(workers: list[FakeWorker], max_rollouts: int) -> RolloutPool:
    config = RolloutPoolConfig(num_workers=len(workers), max_rollouts=max_rollouts)
    segments = [f"w{index}.seg" for index in range(len(workers))]
    pids = list(range(len(workers)))
    return RolloutPool(config, workers, sandbox={}, group_deadline_s=5, segments=segments, pids=pids)


async def test_no_more_rollouts_run_than_there_are_slots() -> None:
    workers = [FakeWorker(), FakeWorker()]
    pool = make_pool(workers, max_rollouts=10)
    handles = [handle async for handle in pool.play_all(requests(20), size=4)]
    assert sorted(handle.group_id for handle in handles) == sorted(f"g{index}" for index in range(20))
    assert sum(worker.most for worker in workers) <= 10 and all(worker.most for worker in workers)


async def test_groups_larger_than_half_the_slots_do_not_starve_each_other() -> None:
    pool = make_pool([FakeWorker()], max_rollouts=5)
    async with asyncio.timeout(5):
        assert len([handle async for handle in pool.play_all(requests(6), size=3)]) == 6


async def test_a_group_larger_than_the_pool_still_plays() -> None:
    pool = make_pool([FakeWorker()], max_rollouts=2)
    async with asyncio.timeout(5):
        assert len([handle async for handle in pool.play_all(requests(3), size=8)]) == 3


async def test_a_group_cancelled_while_it_waits_gives_its_slots_back() -> None:
    pool = make_pool([FakeWorker(delay_s=0.2)], max_rollouts=5)
    first, second, third = requests(3)
    playing = asyncio.create_task(pool.play(first, 3))
    await asyncio.sleep(0.05)
    waiting = asyncio.create_task(pool.play(second, 4))  # holds 2 of its 4 slots
    await asyncio.sleep(0.05)
    waiting.cancel()
    await asyncio.wait({waiting, playing})
    async with asyncio.timeout(2):
        await pool.play(third, 5)


async def test_a_stream_feeds_each_step_and_ends_with_its_tasks() -> None:
    pool = make_pool([FakeWorker()], max_rollouts=64)
    buffer = GroupBuffer(groups_per_step=2, max_staleness=1, version=V0)
    async with pool.stream(requests(4), 2, buffer, lambda: buffer.version) as stream:
        assert len(await stream.take(V0, 5)) == 2
        buffer.advance(PolicyVersion(lineage=0, n=1))
        assert len(await stream.take(PolicyVersion(lineage=0, n=1), 5)) == 2
        with pytest.raises(EndOfTasks):
            await stream.take(PolicyVersion(lineage=0, n=1), 5)


async def test_tasks_that_come_back_after_the_end_are_played() -> None:
    """As when a learner goes back to a checkpoint after the last Task was issued."""
    pool = make_pool([FakeWorker()], max_rollouts=64)
    buffer = GroupBuffer(groups_per_step=2, max_staleness=4, version=V0)
    waiting = list(requests(3))
    source = OneByOne(waiting)
    async with pool.stream(source, 2, buffer, lambda: buffer.version) as stream:
        assert len(await stream.take(V0, 5)) == 2
        assert len(await stream.take(V0, 5)) == 1, "the last ones are fewer"
        waiting.append(GroupRequest(task=waiting_task(), group_id="g0.again"))
        stream.reopen()
        assert [handle.group_id for handle in await stream.take(V0, 5)] == ["g0.again"]
        with pytest.raises(EndOfTasks):
            await stream.take(V0, 5)


async def test_what_breaks_a_worker_is_raised_where_groups_are_taken() -> None:
    pool = make_pool([FakeWorker(broken="g1")], max_rollouts=64)
    buffer = GroupBuffer(groups_per_step=2, max_staleness=1, version=V0)
    async with pool.stream(requests(4), 2, buffer, lambda: buffer.version) as stream:
        with pytest.raises(RuntimeError, match="bug in g1"):
            await stream.take(V0, 5)


async def test_what_breaks_the_source_of_tasks_is_raised_where_groups_are_taken() -> None:
    def broken() -> Iterator[GroupRequest]:
        yield from requests(1)
        raise OSError("tasks are gone")

    pool = make_pool([FakeWorker()], max_rollouts=64)
    buffer = GroupBuffer(groups_per_step=2, max_staleness=1, version=V0)
    async with pool.stream(broken(), 2, buffer, lambda: buffer.version) as stream:
        with pytest.raises(OSError, match="tasks are gone"):
            await stream.take(V0, 5)


def make_growing_pool(workers: list[FakeWorker], ended: list[FakeWorker]) -> RolloutPool:
    """A pool of the first worker that starts the others when asked."""
    return RolloutPool(
        RolloutPoolConfig(max_rollouts=8),
        workers[:1],
        sandbox={},
        group_deadline_s=5,
        segments=["w0.seg"],
        pids=[0],
        start_worker=lambda index: (workers[index], f"w{index}.seg"),
        end_worker=ended.append,
    )


async def test_a_worker_added_while_groups_run_takes_the_next_ones() -> None:
    first, second = workers = [FakeWorker(delay_s=0.05), FakeWorker(delay_s=0.01)]
    pool = make_growing_pool(workers, [])
    playing = asyncio.create_task(pool.play(next(requests(1)), 4))
    await asyncio.sleep(0)
    assert await pool.add_worker() == 1
    await pool.play(next(requests(1)), 4)
    assert (first.most, second.most) == (4, 4)
    await playing


async def test_a_removed_worker_ends_after_its_last_group_and_takes_no_other() -> None:
    first, second = workers = [FakeWorker(delay_s=0.05), FakeWorker(delay_s=0.01)]
    ended: list[FakeWorker] = []
    pool = make_growing_pool(workers, ended)
    playing = asyncio.create_task(pool.play(next(requests(1)), 4))
    await asyncio.sleep(0)
    await pool.add_worker()
    leaving = asyncio.create_task(pool.remove_worker(0))
    await asyncio.sleep(0)
    await pool.play(next(requests(1)), 2)
    assert not first.is_closed, "its Group still runs"
    assert first.most == 4 and second.most == 2
    await asyncio.gather(leaving, playing)
    assert first.is_closed and ended == [first] and [index for index, _ in pool.fleet.serving()] == [1]


async def test_the_last_worker_cannot_be_removed() -> None:
    pool = make_growing_pool([FakeWorker()], [])
    with pytest.raises(ValueError, match="one must be left"):
        await pool.remove_worker(0)
