"""The oracle solves real tasks through a real terminal, and nop solves none."""

from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path

import pytest

from envs.episode import Episode, run_episode
from envs.harbor import load_task
from envs.local.provider import LocalProvider
from envs.nop import NopHarness
from envs.oracle import SolutionScript, oracle_conversation, script_conversation
from envs.task import Task
from envs.terminus2.harness import Terminus2
from envs.terminus2.prompts import COMPACT, FULL, Prompts
from tests.envs.local.boxes import make_provider
from tests.envs.task_dirs import make_task_dir
from trajectories.schema import Outcome, Trajectory

pytestmark = pytest.mark.sandbox

TEST_SH = """\
[ "$(cat /app/a.py)" = "$(printf 'def f():\\n\\tif 1 < 2:\\n\\n        return "!x $y"')" ] && [ -d /app/made ]
echo $((1 - $?)) >/logs/verifier/reward.txt
"""
SOLVE_SH = """\
#!/bin/bash
set -e
# write it
cat > a.py <<'X'
def f():
\tif 1 < 2:

        return "!x $y"
X
mkdir \\
  made
"""


@pytest.fixture
async def provider() -> AsyncGenerator[LocalProvider]:
    provider = make_provider()
    yield provider
    await provider.close()


@pytest.fixture
def task(tmp_path: Path) -> Task:
    path = make_task_dir(tmp_path, test_sh=TEST_SH)
    (path / "solution" / "solve.sh").write_text(SOLVE_SH)
    return load_task(path)


async def play(task: Task, episode: Episode) -> Trajectory:
    return await run_episode(task, episode=episode, trajectory_id="t", group_id="g", member=0)


@pytest.mark.parametrize("prompts", [COMPACT, replace(FULL, terminal=COMPACT.terminal), FULL], ids=["c", "fp", "f"])
async def test_the_oracle_types_what_a_script_would_do(provider: LocalProvider, task: Task, prompts: Prompts) -> None:
    episode = Episode(
        provider=provider, harness=Terminus2(prompts), converse=lambda task, key: oracle_conversation(task, prompts)
    )
    trajectory = await play(task, episode)
    assert (trajectory.outcome, trajectory.reward) == (Outcome.COMPLETED, 1.0), trajectory.messages()
    assert len(trajectory.turns) == (3 if prompts is COMPACT else 4)


async def test_a_whole_script_solves_too_and_nop_does_not(provider: LocalProvider, task: Task) -> None:
    script = Episode(provider=provider, harness=SolutionScript(), converse=lambda task, key: script_conversation(task))
    assert (await play(task, script)).reward == 1.0
    nop = replace(script, harness=NopHarness())
    trajectory = await play(task, nop)
    assert (trajectory.outcome, trajectory.reward, trajectory.turns) == (Outcome.COMPLETED, 0.0, ())
