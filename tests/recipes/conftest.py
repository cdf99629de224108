"""A tiny policy that was taught a little, shared by the tests that play and train it."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from actors.cluster import ClusterConfig, start_cluster
from envs.build import EpisodeConfig, HarnessName
from recipes import harvest, sft
from recipes.presets import PRESETS

TINY = PRESETS["tiny"]


@pytest.fixture(scope="session")
def cluster() -> Iterator[None]:
    """One Ray for all tests that play in this process; `start_cluster` inside it joins."""
    with asyncio.Runner() as runner:
        running = start_cluster(ClusterConfig())
        runner.run(running.__aenter__())
        yield
        runner.run(running.__aexit__(None, None, None))


@pytest.fixture(scope="session")
def demonstrations(cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory with 400 Trajectories of the oracle."""
    directory = tmp_path_factory.mktemp("taught") / "harvest"
    config = harvest.Config(run=directory, tasks="shell:train[:400]", episode=EpisodeConfig(harness=HarnessName.ORACLE))
    asyncio.run(harvest.main(config))
    return directory


@pytest.fixture(scope="session")
def taught(demonstrations: Path) -> Path:
    """The run directory of a short SFT: a policy that solves some tasks and fails others."""
    directory = demonstrations.parent / "sft"
    config = sft.Config(
        run=directory,
        data=(demonstrations,),
        epochs=60,
        stop=sft.StopRule(probability=0.35, every_steps=2, num_demonstrations=96),
        learner=TINY.sft_learner,
    )
    summary = asyncio.run(sft.main(config))
    assert summary["ended_by"] == "stop rule"
    return directory
