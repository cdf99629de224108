"""The oracle plays a Task in a terminal of each provider, and its tests judge what it left."""

from pathlib import Path

import pytest

from envs.build import EpisodeConfig, HarnessName, build_episode
from envs.containers.provider import ContainerConfig
from envs.daytona.config import DaytonaConfig
from envs.group import run_group
from envs.harbor import load_task
from envs.providers import ProviderName, SandboxConfig
from envs.task import Task
from tests.envs.containers.podman import ENGINE_ARGS, RUN_ARGS, install_podman
from tests.envs.local.boxes import IS_ROOT, make_provider
from tests.envs.task_dirs import make_task_dir
from tests.fakes.daytona_api import serve_daytona
from trajectories.schema import Outcome

pytestmark = pytest.mark.sandbox


@pytest.fixture
def task(tmp_path: Path) -> Task:
    path = make_task_dir(tmp_path, test_sh="grep -q done /app/x && echo 1 >/logs/verifier/reward.txt\n")
    (path / "solution" / "solve.sh").write_text("echo done >/app/x\n")
    return load_task(path)


async def play(task: Task, sandbox: SandboxConfig) -> list[tuple[Outcome, float | None, str]]:
    config = EpisodeConfig(harness=HarnessName.ORACLE, sandbox=sandbox)
    episode = build_episode(config, model=None, sampler=None, run="test")
    group = await run_group(task, size=2, episode=episode, group_id="g", deadline_s=60)
    await episode.provider.close()
    return [(member.outcome, member.reward, member.error) for member in group.trajectories]


@pytest.mark.skipif(not IS_ROOT, reason="podman is set up for root here")
async def test_in_podman_containers(task: Task) -> None:
    container = ContainerConfig(image=install_podman(), network="none", engine_args=ENGINE_ARGS, run_args=RUN_ARGS)
    sandbox = SandboxConfig(provider=ProviderName.PODMAN, container=container)
    assert await play(task, sandbox) == [(Outcome.COMPLETED, 1.0, "")] * 2


async def test_at_a_daytona_service(task: Task, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DAYTONA_API_KEY", "key")
    boxes = make_provider()
    async with serve_daytona(boxes) as api:
        sandbox = SandboxConfig(provider=ProviderName.DAYTONA, daytona=DaytonaConfig(api_url=api.url))
        assert await play(task, sandbox) == [(Outcome.COMPLETED, 1.0, "")] * 2
    await boxes.close()
