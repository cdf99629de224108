"""Episodes in which a program inside a real sandbox speaks to the gateway, and a policy that says what a test wrote."""

import json
import shlex
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from envs.agent_command import AgentCommandConfig
from envs.build import EpisodeConfig, HarnessName, build_episode
from envs.episode import Episode, run_episode
from envs.local.provider import LocalConfig
from envs.providers import SandboxConfig
from envs.sampler import SamplingParams
from envs.task import Task
from tests.envs.local.boxes import IS_ROOT
from tests.envs.tokens import CHATML_TEMPLATE, byte_tokenizer, special_id, text_ids
from tests.fakes.sampler import FakeSampler
from trajectories.schema import Trajectory

END = special_id("<|im_end|>")


def write_model(directory: Path, tokenizer: Tokenizer | None = None) -> Path:
    """A model directory as far as a renderer reads it."""
    directory.mkdir(parents=True, exist_ok=True)
    (tokenizer or byte_tokenizer()).save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_text(CHATML_TEMPLATE)
    return directory


def bash_call(command: str, words: str = "") -> str:
    """A reply that calls the tool `bash`."""
    call = json.dumps({"name": "bash", "arguments": {"command": command}})
    return f"{words}\n<tool_call>\n{call}\n</tool_call>".lstrip()


def scripted_sampler(*replies: str) -> FakeSampler:
    """Says these, one after the other, in bytes."""
    remaining = iter(replies)
    return FakeSampler(lambda prompt_ids: [*text_ids(next(remaining)), END], tokens_per_version=500)


@asynccontextmanager
async def agent_episode(
    model: Path,
    sampler: FakeSampler,
    command: str,
    *,
    env: Sequence[str] = (),
    mounts: Sequence[str] = (),
    **config: Any,
) -> AsyncGenerator[Episode]:
    """An Episode that runs `command`, closed afterwards."""
    soft: dict[str, Any] = {} if IS_ROOT else {"allow_soft_limits": True}
    episode = build_episode(
        EpisodeConfig(
            harness=HarnessName.AGENT_COMMAND,
            agent=AgentCommandConfig(command=command, env=tuple(env)),
            sandbox=SandboxConfig(local=LocalConfig(mounts=tuple(mounts), **soft)),
            sampling=SamplingParams(max_tokens=2048),
            **{"max_turns": 50, "context_tokens": 100_000, **config},
        ),
        model=model,
        sampler=sampler,
    )
    try:
        yield episode
    finally:
        await episode.provider.close()


async def play(task: Task, episode: Episode) -> Trajectory:
    return await run_episode(task, episode=episode, trajectory_id="t", group_id="g", member=0)


def python(program: str) -> str:
    """A command that runs a program with the sandbox's own Python."""
    return f"/usr/bin/python3 -c {shlex.quote(program)}"
