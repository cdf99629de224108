"""Playing a set of Tasks to the end: what harvest and evaluate share.

Invariant: each (Task, attempt) is in the store exactly once, however often the run is started again.
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from actors.inference_config import InferencePoolConfig
from actors.inference_pool import start_inference_pool
from actors.rollout_pool import GroupRequest, RolloutPool, RolloutPoolConfig, start_rollout_pool
from envs.build import EpisodeConfig, HarnessName
from envs.sampler import Sampler
from envs.task import Task
from recipes.policies import PolicyConfig, resolve_policy
from recipes.resume import task_set_facts, wait_for_writers
from recipes.run import Run
from trajectories.handle import GroupHandle, summarize
from trajectories.ledger import Ledger, LedgerError
from trajectories.ledger_index import GroupState
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
    run.pin("tasks", task_set_facts(tasks))
    store.mkdir(parents=True, exist_ok=True)
    with Ledger(run.directory / "ledger" / store.name) as ledger:
        await wait_for_writers(store)
        handles = {group.id: summarize(group, location) for location, group in scan(store)}
        missing = issue_missing(tasks, handles, ledger)
        facts: dict[str, Any] = served.facts | {"harness": str(episode.harness), "resumed_groups": len(handles)}
        if not missing:
            return [handles[task.id] for task in tasks], facts
        num_resumed = len(handles)
        async with start_rollout_pool(
            rollouts,
            episode,
            store=store,
            prefix=f"part-{num_resumed}",
            model=served.model,
            sampler=served.sampler,
        ) as workers:
            facts["sandbox"] = workers.sandbox
            with run.progress(what, total=len(missing)) as progress:
                async for handle in workers.play_all(missing, attempts, ledger):
                    handles[handle.group_id] = handle
                    progress.advance()
            facts |= _report_recoveries(run, workers)
    return [handles[task.id] for task in tasks], facts


def issue_missing(tasks: Sequence[Task], stored: Mapping[str, GroupHandle], ledger: Ledger) -> list[GroupRequest]:
    """The Groups that are not in the store, issued in the order of the Tasks; the ledger learns of those that are."""
    missing: list[GroupRequest] = []
    for slot, task in enumerate(tasks):
        row = ledger.index.group(task.id)
        if task.id not in stored:
            if row is not None and row.state is GroupState.FINISHED:
                raise LedgerError(f"group {task.id} was stored but is not there: restore the store from a copy")
            ledger.issue(task.id, slot)
            missing.append(GroupRequest(task=task, group_id=task.id))
        elif row is None or row.state is not GroupState.FINISHED:
            ledger.finish(task.id, stored[task.id].location, slot=slot)
    return missing


def _report_recoveries(run: Run, workers: RolloutPool) -> dict[str, float]:
    """Totals of what died and was made good, each also an event."""
    metrics = workers.fleet.metrics()
    for name, count in metrics.items():
        if count:
            run.event(name.removeprefix("recovery/"), count=count)
    return metrics
