"""Evaluation beside training, over fake players: what it pins, when it begins, what it reports."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace

import pytest

from actors.errors import ActorDied
from actors.rollout_stream import GroupRequest
from benchmarks.timed_parts import timed_task
from recipes.side_evaluation import SideEvaluation, SideEvaluationConfig
from tests.trajectories.records import LOCATION, scored_group, version
from trajectories.handle import GroupHandle, summarize
from trajectories.schema import PolicyVersion


class FakePublisher:
    def __init__(self) -> None:
        self.published: list[int] = []

    async def publish(self, version: PolicyVersion) -> dict[str, float]:
        self.published.append(version.n)
        return {}


class FakePlayers:
    """Solves the first Task and fails the second, once `gate` is open, at the version that was published last."""

    def __init__(self, publisher: FakePublisher, *, sampled_at: int | None = None, dies: bool = False) -> None:
        self._publisher = publisher
        self._sampled_at = sampled_at
        self._dies = dies
        self.gate = asyncio.Event()

    async def play_all(self, requests: Iterator[GroupRequest], size: int) -> AsyncIterator[GroupHandle]:
        await self.gate.wait()
        if self._dies:
            raise ActorDied("rollout worker 0: its process died")
        n = self._publisher.published[-1] if self._sampled_at is None else self._sampled_at
        for index, request in enumerate(requests):
            rewards: list[float | None] = [float(index == 0)] * size
            handle = summarize(scored_group(rewards, group_id=request.group_id, n=n, task_id=request.task.id), LOCATION)
            yield replace(handle, task_id=request.task.id)


def evaluation(players: FakePlayers, publisher: FakePublisher, *, every: int = 2) -> SideEvaluation:
    config = SideEvaluationConfig(every=every, attempts=3)
    return SideEvaluation(config, [timed_task("a"), timed_task("b")], publisher, players)


async def test_a_due_version_is_published_and_played_while_steps_go_on() -> None:
    publisher = FakePublisher()
    players = FakePlayers(publisher)
    beside = evaluation(players, publisher)
    assert await beside.after_step(version(1)) == {}, "1 is not due"
    assert await beside.after_step(version(2)) == {}
    assert await beside.after_step(version(3)) == {}, "it runs, and the step did not wait for it"
    assert publisher.published == [2]
    players.gate.set()
    found = await beside.finish()
    assert (found["eval/version"], found["eval/solved"]) == (2, 0.5)
    assert (found["eval/num_valid"], found["eval/num_attempts"]) == (6, 6)
    assert await beside.finish() == {}, "told once"


async def test_a_version_that_is_due_too_early_is_skipped_and_leaves_the_pinned_one_alone() -> None:
    publisher = FakePublisher()
    beside = evaluation(FakePlayers(publisher), publisher)
    await beside.after_step(version(2))
    assert await beside.after_step(version(4)) == {"eval/skipped": 1.0}
    assert publisher.published == [2]
    await beside.cancel()


async def test_tokens_of_another_version_end_the_run() -> None:
    publisher = FakePublisher()
    players = FakePlayers(publisher, sampled_at=1)
    beside = evaluation(players, publisher)
    players.gate.set()
    await beside.after_step(version(2))
    with pytest.raises(RuntimeError, match="was to be sampled at"):
        await beside.finish()


async def test_a_dead_worker_costs_one_evaluation_and_not_the_run() -> None:
    publisher = FakePublisher()
    players = FakePlayers(publisher, dies=True)
    beside = evaluation(players, publisher)
    players.gate.set()
    await beside.after_step(version(2))
    assert await beside.finish() == {"eval/failed": 1.0}
    assert await beside.after_step(version(4)) == {}, "the next one begins"
    assert publisher.published == [2, 4]
    await beside.finish()
