"""Harbor's own terminus-2, under its Python 3.12, solves a shell Task through the gateway and our Sandbox.

About 15 s. What Harbor collected of the rollout (ids and log-probabilities of each reply) is held against what the
gateway recorded.
"""

import json
import socket
import subprocess
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from envs.episode import Episode
from envs.gateway.app import make_app
from envs.gateway.prompts import ChatPrompts
from envs.gateway.server import serve_app
from envs.gateway.session import Session, SessionConfig, Sessions
from envs.harbor import load_task
from envs.oracle import solution_steps
from envs.sampler import Sampler, SamplingParams
from envs.task import Task
from envs.tasksets.shell import write_task_set
from tests.envs.agents import END, play
from tests.envs.gateway.doors import MODEL
from tests.envs.gateway.harbor_terminus2 import HarborTerminus2
from tests.envs.local.boxes import make_provider
from tests.envs.tokens import CHATML_TEMPLATE, text_ids, tiny_renderer
from tests.fakes.sampler import FakeSampler
from trajectories.samples import trajectory_samples
from trajectories.schema import Outcome

pytestmark = [pytest.mark.sandbox, pytest.mark.slow, pytest.mark.timeout(400)]

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def harbor_python() -> Path:
    """Of Harbor's own virtual environment, built if it is not there."""
    built = subprocess.run(["bash", ROOT / "scripts" / "harbor_env.sh"], stdout=subprocess.PIPE, text=True, timeout=300)
    assert built.returncode == 0, "scripts/harbor_env.sh says above what it lacks"
    return Path(built.stdout.strip()) / "bin" / "python"


@pytest.fixture
def task(tmp_path: Path) -> Task:
    write_task_set(tmp_path / "tasks", split="train", count=1)
    (path,) = (tmp_path / "tasks").iterdir()
    return load_task(path)


@asynccontextmanager
async def harbor_episode(sampler: Sampler, python: Path, directory: Path) -> AsyncGenerator[Episode]:
    """An Episode that Harbor's agent plays against a gateway on 127.0.0.1."""
    prompts, sessions, provider = ChatPrompts(tiny_renderer(CHATML_TEMPLATE)), Sessions(), make_provider()
    limits = SessionConfig(sampling=SamplingParams(max_tokens=2048), context_tokens=100_000)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        harness = HarborTerminus2(python=python, port=listener.getsockname()[1], model=MODEL, directory=directory)
        async with serve_app(make_app(sessions, prompts, model=MODEL), listener):
            try:
                yield Episode(
                    provider=provider,
                    harness=harness,
                    converse=lambda task, key: sessions.add(Session(prompts, sampler, limits, key=key)),
                )
            finally:
                await provider.close()


def terminus_reply(*keystrokes: str, is_complete: bool = False) -> str:
    fields: dict[str, Any] = {"analysis": "a", "plan": "p"}
    fields["commands"] = [{"keystrokes": keys, "duration": 0.5} for keys in keystrokes]
    return json.dumps(fields | {"task_complete": is_complete})


async def test_harbors_terminus_2_solves_a_task_and_yields_a_trainable_trajectory(
    task: Task, harbor_python: Path, tmp_path: Path
) -> None:
    typed = [terminus_reply(f"{step}\n") for step in solution_steps(task)]
    replies = [*typed, "no JSON at all", *[terminus_reply(is_complete=True)] * 2]
    remaining = iter(replies)
    sampler = FakeSampler(lambda prompt_ids: [*text_ids(next(remaining)), END], tokens_per_version=100)
    async with harbor_episode(sampler, harbor_python, tmp_path / "harbor") as episode:
        trajectory = await play(task, episode)
    assert (trajectory.outcome, trajectory.reward, trajectory.error) == (Outcome.COMPLETED, 1.0, "")
    assert [turn.reply for turn in trajectory.turns] == replies
    assert task.instruction in trajectory.prompt and "Terminal" in trajectory.turns[0].observation
    assert "ERROR" in trajectory.turns[len(typed)].observation, "Harbor asks again after a reply that is no JSON"

    (sample,) = trajectory_samples(trajectory)
    assert sample.ids.tolist() == [*sampler.calls[-1][0], *text_ids(replies[-1]), END]
    assert sample.ids[sample.mask].tolist() == [i for reply in replies for i in (*text_ids(reply), END)]
    spans = [span for turn in trajectory.turns if turn.tokens for span in turn.tokens.spans]
    versions = [span.version.n for span in spans for _ in range(span.num_tokens)]
    assert versions == [k // 100 for k in range(int(sample.mask.sum()))], "a version for every 100 tokens, in mid-reply"

    harness = episode.harness
    assert isinstance(harness, HarborTerminus2)
    (detail,) = harness.facts["details"]
    tokens = [turn.tokens for turn in trajectory.turns if turn.tokens is not None]
    assert detail["completion_token_ids"] == [list(each.sampled_ids) for each in tokens]
    assert detail["logprobs"] == [list(each.logprobs) for each in tokens]
    assert detail["prompt_token_ids"] == [list(prompt) for prompt, _, _ in sampler.calls]
    assert harness.facts["trajectory"]["agent"]["name"] == "terminus-2"
