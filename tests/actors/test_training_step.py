"""One step of the loop over fakes: the order of things, and what it logs."""

import asyncio
from collections.abc import Sequence

import pytest

from actors.training_step import training_step
from tests.trajectories.records import LOCATION, scored_group, version
from trajectories.buffer import TakeTimeout
from trajectories.handle import GroupHandle, summarize
from trajectories.schema import PolicyVersion


class FakeStream:
    def __init__(self, calls: list[str], groups: list[GroupHandle] | None) -> None:
        self._calls = calls
        self._groups = groups

    async def take(self, version: PolicyVersion, deadline_s: float) -> list[GroupHandle]:
        self._calls.append(f"take {version.n} within {deadline_s:g}")
        if self._groups is None:
            raise TakeTimeout("g0 did not come")
        await asyncio.sleep(0.01)
        return self._groups


class FakePublisher:
    def __init__(self, calls: list[str]) -> None:
        self._calls = calls

    async def publish(self, version: PolicyVersion) -> dict[str, float]:
        self._calls.append(f"publish {version.n}")
        return {"sync/servers": 2.0}


async def step(calls: list[str], groups: list[GroupHandle] | None) -> dict[str, float]:
    async def update(taken: Sequence[GroupHandle]) -> dict[str, float]:
        calls.append(f"train on {len(taken)}")
        return {"train/loss": 0.5}

    return await training_step(
        version(3),
        stream=FakeStream(calls, groups),
        update=update,
        publisher=FakePublisher(calls),
        take_deadline_s=60,
    )


async def test_a_step_takes_at_its_version_trains_and_publishes_the_next() -> None:
    calls: list[str] = []
    metrics = await step(calls, [summarize(scored_group([1.0, 0.0], n=2), LOCATION)])
    assert calls == ["take 3 within 60", "train on 1", "publish 4"]
    assert (metrics["reward_mean"], metrics["staleness_max"]) == (0.5, 1), "sampled at 2, consumed at 3"
    assert (metrics["train/loss"], metrics["sync/servers"]) == (0.5, 2.0)
    assert metrics["time/take_s"] >= 0.01
    assert {"time/train_s", "time/publish_s"} <= metrics.keys()


async def test_a_step_without_groups_trains_and_publishes_nothing() -> None:
    calls: list[str] = []
    with pytest.raises(TakeTimeout):
        await step(calls, None)
    assert calls == ["take 3 within 60"]
