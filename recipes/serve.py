"""Serve: opens a gateway for a policy on this machine's loopback, and records what programs say through it.

Any client of OpenAI's protocols (chat completions with tools, completions, responses) or of Anthropic's messages works.
The recipe runs until it is interrupted; what was said is then one Trajectory in the run's store, exact tokens included.

    python -m recipes.serve --policy runs/rloo/model
    export OPENAI_BASE_URL=http://127.0.0.1:8011/v1 OPENAI_API_KEY=$(cat runs/serve/token)
    export ANTHROPIC_BASE_URL=http://127.0.0.1:8011 ANTHROPIC_API_KEY=$(cat runs/serve/token)
"""

import asyncio
import os
import socket
import time
from dataclasses import dataclass, field
from pathlib import Path

from actors.cluster import ClusterConfig, start_cluster
from actors.inference_pool import start_inference_pool
from envs.gateway.prompts import ChatPrompts
from envs.gateway.session import Session, SessionConfig, Sessions
from envs.renderer import load_renderer
from envs.sampler import SamplingParams
from recipes.launch import launch
from recipes.policies import PolicyConfig, resolve_policy
from recipes.run import Run
from trajectories.schema import Group, Outcome, Trajectory
from trajectories.store import StoreWriter

TASK_ID = "served"


@dataclass(frozen=True, kw_only=True)
class Config:
    """Serve a policy to programs on this machine."""

    run: Path = Path("runs/serve")
    """Run directory; the token goes to its file `token`, what was said to its store/."""
    port: int = 8011
    """On 127.0.0.1; there is no other address."""
    name: str = "policy"
    """The model name that requests must ask for."""
    context_tokens: int = 2048
    """Prompt and reply together."""
    sampling: SamplingParams = field(default_factory=SamplingParams)
    """Of requests that do not say."""
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)

    def __post_init__(self) -> None:
        if not 0 < self.port < 65536:
            raise ValueError(f"port must be 1 to 65535, got {self.port}")


async def main(config: Config) -> None:
    """Serves until cancelled."""
    from envs.gateway.app import make_app  # a web framework, which --help need not wait for
    from envs.gateway.server import serve_app

    with Run.open(config.run, config) as run, socket.socket() as listener:
        model = resolve_policy(config.policy.model)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", config.port))
        async with start_cluster(config.cluster), start_inference_pool(config.policy.pool, model=model) as pool:
            prompts, sessions = ChatPrompts(load_renderer(model)), Sessions()
            limits = SessionConfig(
                sampling=config.sampling, follows_client=True, context_tokens=config.context_tokens, max_at_once=256
            )
            session = sessions.add(Session(prompts, pool.sampler(), limits, key=TASK_ID))
            token_file = write_token(config.run / "token", session.token)
            try:
                async with serve_app(make_app(sessions, prompts, model=config.name), listener):
                    where = f"http://127.0.0.1:{config.port}/v1"
                    print(f"model {config.name!r} at {where}, token in {token_file}; Ctrl-C ends it", flush=True)
                    await asyncio.Event().wait()  # until interrupted: serving has no other end
            finally:
                session.close()
                token_file.unlink()
                record(config.run / "store", session, model=str(model))
                run.summary({"num_turns": len(session.turns), "num_breaks": session.num_breaks})


def write_token(path: Path, token: str) -> Path:
    """The file, readable by its owner alone."""
    path.unlink(missing_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(token)
    return path


def record(store: Path, session: Session, *, model: str) -> None:
    """Appends the session to the store as a Group of one Trajectory; nothing when nothing was said."""
    if not session.turns:
        return
    group_id = f"{TASK_ID}-{time.time_ns()}"
    trajectory = Trajectory(
        id=f"{group_id}.0",
        task_id=TASK_ID,
        group_id=group_id,
        member=0,
        prompt=session.prompt,
        turns=tuple(session.turns),
        outcome=Outcome.COMPLETED,
        reward=None,
        provenance={"harness": "gateway", "model": model},
    )
    store.mkdir(parents=True, exist_ok=True)
    writer = StoreWriter(store, group_id)
    writer.append(Group(id=group_id, task_id=TASK_ID, trajectories=(trajectory,)))
    writer.close()


if __name__ == "__main__":
    launch(Config, main)
