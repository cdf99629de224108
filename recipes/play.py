"""Playing a set of Tasks to the end: what harvest and evaluate share.

Invariant: each (Task, attempt) is in the store exactly once, however often the run is started again.
"""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from actors.inference_config import InferencePoolConfig
from actors.inference_pool import start_inference_pool
from actors.rollout_pool import GroupRequest, RolloutPoolConfig, start_rollout_pool
from envs.build import EpisodeConfig, HarnessName
from envs.sampler import Sampler
from envs.task import Task
from recipes.policies import PolicyConfig, resolve_policy
from recipes.run import Run
from trajectories.handle import GroupHandle, summarize
from trajectories.store import scan


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """Who plays: a served policy, or nobody where the harness needs none."""

    sampler: Sampler | None
    model: Path | None
    facts: dict[str, Any]
    """For the summary: the model and the engine's class."""


def player_of(policy: PolicyConfig, episode: EpisodeConfig) -> Path | HarnessName:
    """The policy's model directory, or the harness where it needs no policy; ValueError before any work starts."""
    return resolve_policy(policy.model) if episode.harness.needs_policy else episode.harness


@asynccontextmanager
async def serve(player: Path | HarnessName, config: InferencePoolConfig) -> AsyncIterator[Served]:
    """Serves the player for the length of the block, if it is a policy."""
    if isinstance(player, HarnessName):
        yield Served(sampler=None, model=None, facts={"model": str(player)})
        return
    model = player
    async with start_inference_pool(config, model=model) as pool:
        yield Served(sampler=pool.sampler(), model=model, facts={"model": str(model), "engine": pool.engine})


async def play_tasks(
    run: Run,
    tasks: Sequence[Task],
    *,
    attempts: int,
    served: Served,
    episode: EpisodeConfig,
    rollouts: RolloutPoolConfig,
    store: Path,
    what: str,
) -> tuple[list[GroupHandle], dict[str, Any]]:
    """Plays `attempts` rollouts of each Task that the store lacks.

    Returns the handles of all Groups, earlier ones included, in the order of `tasks`, and facts for the summary.
    """
    store.mkdir(parents=True, exist_ok=True)
    handles = {group.task_id: summarize(group, location) for location, group in scan(store)}
    missing = [GroupRequest(task=task, group_id=task.id) for task in tasks if task.id not in handles]
    facts: dict[str, Any] = served.facts | {"harness": str(episode.harness), "resumed_groups": len(handles)}
    if missing:
        async with start_rollout_pool(
            rollouts,
            episode,
            store=store,
            prefix=f"part-{len(handles)}",
            model=served.model,
            sampler=served.sampler,
        ) as workers:
            facts["sandbox"] = workers.sandbox
            with run.progress(what, total=len(missing)) as progress:
                async for handle in workers.play_all(missing, attempts):
                    handles[handle.task_id] = handle
                    progress.advance()
    return [handles[task.id] for task in tasks], facts
