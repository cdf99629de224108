"""mini-swe-agent, a program that nobody here wrote, solves a shell Task in a sandbox through the gateway.

About 10 s, most of it the import of its packages. They are shown to the sandbox read-only; the sandbox's own Python
runs it, and the door is all that it reaches.
"""

import importlib.metadata
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

from envs.harbor import load_task
from envs.oracle import solution_steps
from envs.task import Task
from envs.tasksets.shell import write_task_set
from tests.envs.agents import END, agent_episode, bash_call, play, scripted_sampler, write_model
from tests.envs.tokens import text_ids
from trajectories.samples import trajectory_samples
from trajectories.schema import Outcome

pytestmark = [pytest.mark.sandbox, pytest.mark.timeout(180)]

COMMAND = (
    "/usr/bin/python3 -m minisweagent.run.mini --agent-class default --exit-immediately --yolo --cost-limit 0"
    ' -m "openai/$THRESHER_MODEL" -t "$THRESHER_INSTRUCTION"'
)
ENVIRONMENT = (
    "PYTHONPATH=/opt/agents",
    "PYTHONDONTWRITEBYTECODE=1",
    "MSWEA_GLOBAL_CONFIG_DIR=/tmp/mini",
    "MSWEA_CONFIGURED=true",
    "MSWEA_SILENT_STARTUP=1",
    "MSWEA_COST_TRACKING=ignore_errors",
    "LITELLM_LOCAL_MODEL_COST_MAP=True",
)
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"


@pytest.fixture(scope="session")
def agents(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Packages in a directory that the user of a box may enter: the environment's own, else a copy of those needed."""
    version = subprocess.check_output(["/usr/bin/python3", "-c", "import sys; print(*sys.version_info[:2])"])
    assert version.split() == [b"%d" % n for n in sys.version_info[:2]], "/usr/bin/python3 is of another version"
    packages = Path(sysconfig.get_path("purelib")).resolve()
    if all(parent.stat().st_mode & 0o005 == 0o005 for parent in (packages, *packages.parents)):
        yield packages
        return
    copy = Path("/var/tmp") / f"thresher-agents-{tmp_path_factory.getbasetemp().name}"
    for name in _requirements("mini-swe-agent"):
        for file in importlib.metadata.files(name) or ():
            if ".." not in file.parts and (packages / file).is_file():
                (copy / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(packages / file, copy / file)
    yield copy
    shutil.rmtree(copy)


def _requirements(name: str) -> set[str]:
    """A distribution and all that it needs, of what is installed."""
    found: set[str] = set()
    waiting = [name]
    while waiting:
        name = waiting.pop()
        try:
            requires = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        if name.lower() not in found:
            found.add(name.lower())
            waiting += [re.split(r"[^\w.-]", line)[0] for line in requires if "extra ==" not in line]
    return found


@pytest.fixture
def task(tmp_path: Path) -> Task:
    write_task_set(tmp_path / "tasks", split="train", count=1)
    (path,) = (tmp_path / "tasks").iterdir()
    return load_task(path)


async def test_mini_swe_agent_solves_a_task_and_yields_a_trainable_trajectory(
    task: Task, agents: Path, tmp_path: Path
) -> None:
    steps = [*solution_steps(task), SUBMIT]
    replies = [bash_call(step, words="I go on.") for step in steps]
    sampler = scripted_sampler(*replies)
    mounts = [f"{agents}:/opt/agents"]
    model = write_model(tmp_path / "model")
    async with agent_episode(model, sampler, COMMAND, env=ENVIRONMENT, mounts=mounts) as episode:
        trajectory = await play(task, episode)
    assert (trajectory.outcome, trajectory.reward, trajectory.error) == (Outcome.COMPLETED, 1.0, "")
    assert [turn.reply for turn in trajectory.turns] == replies
    assert task.instruction in trajectory.prompt
    assert '"returncode": 0' in trajectory.turns[0].observation
    (sample,) = trajectory_samples(trajectory)
    last_prompt = sampler.calls[-1][0]
    assert sample.ids.tolist() == [*last_prompt, *text_ids(replies[-1]), END]
    assert sample.ids[sample.mask].tolist() == [i for reply in replies for i in (*text_ids(reply), END)]
