"""A harvest from a remote teacher: what it keeps, what it costs, and how a spent budget ends it. About 8 s in all."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from actors.rollout_pool import RolloutPoolConfig
from envs.build import EpisodeConfig, HarnessName
from envs.remote_sampler import Teacher
from recipes import harvest
from recipes.play import player_of
from recipes.policies import PolicyConfig
from tests.fakes.endpoint import FakeEndpoint
from trajectories.schema import Trajectory
from trajectories.store import scan

TERMINUS = EpisodeConfig(harness=HarnessName.TERMINUS_2, max_turns=2)


def trajectories(run: Path) -> list[Trajectory]:
    return [trajectory for _, group in scan(run / "store") for trajectory in group.trajectories]


async def harvest_twice(config: harvest.Config) -> tuple[dict[str, Any], dict[str, Any], FakeEndpoint]:
    """With room for three Tasks of two replies each, then with enough."""
    fake = FakeEndpoint()
    async with fake.served() as base_url:
        teacher = replace(config.teacher, base_url=base_url, model="m", max_tokens=3 * 2 * 110)
        first = await harvest.main(replace(config, teacher=teacher))
        second = await harvest.main(replace(config, teacher=replace(teacher, max_tokens=10_000)))
    return first, second, fake


@pytest.mark.ray
@pytest.mark.sandbox
@pytest.mark.timeout(180)
def test_a_spent_budget_ends_a_harvest_and_a_larger_one_goes_on(cluster: None, tmp_path: Path) -> None:
    config = harvest.Config(
        run=tmp_path / "run",
        tasks="shell:train",
        limit=5,
        episode=TERMINUS,
        rollouts=RolloutPoolConfig(max_rollouts=1),
        teacher=Teacher(prompt_usd_per_million=1.0),
    )
    first, second, fake = asyncio.run(harvest_twice(config))
    assert "max_tokens is spent (660 of 660 here)" in first["budget_exceeded"]
    assert (first["harvested"], first["usage"]["prompt_tokens"]) == (3, 600)
    assert "budget_exceeded" not in second
    assert (second["harvested"], second["usage"]["completion_tokens"]) == (5, 100)
    assert second["usage"]["cost_usd"] == pytest.approx(1000e-6)
    assert fake.num_answered == 10
    kept = trajectories(config.run)
    assert sorted(len(trajectory.turns) for trajectory in kept) == [2] * 5
    assert all(turn.tokens is None and turn.usage for trajectory in kept for turn in trajectory.turns)
    assert {trajectory.provenance["model"] for trajectory in kept} == {"m"}


def test_a_teacher_needs_a_harness_and_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TEACHERS_KEY", raising=False)
    teacher = Teacher(base_url="http://x/v1", model="m", api_key_env="TEACHERS_KEY")
    with pytest.raises(ValueError, match="--harness terminus-2"):
        player_of(PolicyConfig(), EpisodeConfig(harness=HarnessName.ORACLE), teacher)
    with pytest.raises(ValueError, match="TEACHERS_KEY"):
        player_of(PolicyConfig(), TERMINUS, teacher)
    monkeypatch.setenv("TEACHERS_KEY", "k")
    assert player_of(PolicyConfig(), TERMINUS, teacher) == teacher
