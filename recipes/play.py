"""Playing a set of Tasks to the end: what harvest and evaluate share.

Invariant: each (Task, attempt) is in the store exactly once, however often the run is started again.
"""

import dataclasses
import logging
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from actors.inference_config import InferencePoolConfig
from actors.inference_pool import InferencePool, start_inference_pool
from actors.rollout_pool import RolloutPool, RolloutPoolConfig, start_rollout_pool
from actors.rollout_stream import GroupRequest
from envs.build import EpisodeConfig, HarnessName
from envs.errors import BudgetExceeded
from envs.remote_sampler import Teacher
from envs.sampler import Sampler
from envs.task import Task
from recipes.elastic import Fleet, fixed_fleet, scaling, server_fleet, worker_fleet
from recipes.policies import PolicyConfig, resolve_policy
from recipes.resume import task_set_facts, wait_for_writers
from recipes.run import Run
from trajectories.handle import GroupHandle, summarize
from trajectories.ledger import Ledger, LedgerError
from trajectories.ledger_index import GroupState
from trajectories.schema import Usage
from trajectories.store import scan

logger = logging.getLogger(__name__)

TEACHER_LIMITS = ("teacher.max_tokens", "teacher.max_cost_usd", "teacher.max_concurrency")
"""What a run that goes on may be given anew."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """Who plays: a served policy, or nobody where the harness needs none."""

    sampler: Sampler | Teacher | None
    model: Path | None
    facts: dict[str, Any]
    """For the summary: the model and the engine's class."""
    servers: InferencePool | None = None
    """Where a policy is served."""


def player_of(policy: PolicyConfig, episode: EpisodeConfig, teacher: Teacher) -> Path | HarnessName | Teacher:
    """The policy's model directory, the teacher in its place, or the harness where it needs neither.

    ValueError before any work starts.
    """
    if teacher.is_asked:
        if episode.harness is not HarnessName.TERMINUS_2:
            raise ValueError(f"a teacher plays harness terminus-2, got {episode.harness}; add --harness terminus-2")
        teacher.key()
        return teacher
    return resolve_policy(policy.model) if episode.harness.needs_policy else episode.harness


@asynccontextmanager
async def serve(player: Path | HarnessName | Teacher, config: InferencePoolConfig) -> AsyncIterator[Served]:
    """Serves the player for the length of the block, if it is a policy."""
    if isinstance(player, Teacher):
        yield Served(sampler=player, model=None, facts={"model": player.model, "teacher": player.base_url})
        return
    if isinstance(player, HarnessName):
        yield Served(sampler=None, model=None, facts={"model": str(player)})
        return
    model = player
    async with start_inference_pool(config, model=model) as pool:
        facts = {"model": str(model), "engine": pool.engine}
        yield Served(sampler=pool.sampler(), model=model, facts=facts, servers=pool)


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

    Returns the handles of all Groups, earlier ones included, in the order of `tasks`, and facts for the summary. A
    teacher whose budget is spent ends this early: the handles then lack the Tasks that it did not play.
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
            sampler=_shared(served.sampler, rollouts.num_workers, store),
        ) as workers:
            facts["sandbox"] = workers.sandbox
            with run.progress(what, total=len(missing)) as progress, _ending_at_budget(facts):
                async with scaling(run, *_fleets(served, workers)):
                    async for handle in workers.play_all(missing, attempts, ledger):
                        handles[handle.group_id] = handle
                        progress.advance()
            facts |= _report_recoveries(run, workers, served.servers)
    if isinstance(served.sampler, Teacher):
        facts["usage"] = dataclasses.asdict(usage_of(store))
    return [handles[task.id] for task in tasks if task.id in handles], facts


def _fleets(served: Served, workers: RolloutPool) -> tuple[Fleet, Fleet]:
    """What may grow and shrink while Tasks are played."""
    num_workers = len(workers.fleet.serving())
    if isinstance(served.sampler, Teacher):
        why = "the teacher's budget is shared among the workers that it started with"
        moving = fixed_fleet("rollout workers", lambda wish: wish.workers, num_workers, why)
    else:
        moving = worker_fleet(workers)
    if served.servers is None:
        return moving, fixed_fleet("inference servers", lambda wish: wish.servers, 0, "this run serves no policy")
    return moving, server_fleet(served.servers)


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


def _report_recoveries(run: Run, workers: RolloutPool, servers: InferencePool | None) -> dict[str, float]:
    """Totals of what died and was made good, each also an event."""
    metrics = workers.fleet.metrics()
    if servers is not None:
        metrics["recovery/inference_servers"] = float(servers.num_restarts)
    for name, count in metrics.items():
        if count:
            run.event(name.removeprefix("recovery/"), count=count)
    return metrics


def usage_of(store: Path) -> Usage:
    """What the Trajectories of a store have cost, over all the runs that wrote them."""
    total = Usage(prompt_tokens=0, completion_tokens=0, cost_usd=0.0)
    for _, group in scan(store):
        usages = [turn.usage for trajectory in group.trajectories for turn in trajectory.turns]
        total = sum((usage for usage in usages if usage is not None), total)
    return total


def _shared(sampler: Sampler | Teacher | None, num_workers: int, store: Path) -> Sampler | Teacher | None:
    return sampler.share(num_workers, usage_of(store)) if isinstance(sampler, Teacher) else sampler


@contextmanager
def _ending_at_budget(facts: dict[str, Any]) -> Iterator[None]:
    """Ends the block, and says so, when the teacher's budget is spent; started again with more, the run goes on."""
    try:
        yield
    except BudgetExceeded as error:
        logger.warning("%s; what is played is kept", error)
        facts["budget_exceeded"] = str(error)
