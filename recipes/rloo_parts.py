"""What an RLOO run is made of: assembled, published through, made good when something dies, and counted.

Invariant: what can be refused is refused before anything starts; everything that was started ends with the run's exit
stack; a restored learner trains only after every server has its weights. Called by recipes/rloo.py alone.
"""

import dataclasses
import logging
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from actors.admission import adapting
from actors.cluster import Resources, require, start_cluster
from actors.errors import LearnerLost
from actors.inference_errors import NoServerLeft
from actors.inference_pool import InferencePool, start_inference_pool
from actors.learner_group import LearnerGroup, start_learner_group
from actors.rollout_pool import RolloutPool, start_rollout_pool
from actors.rollout_stream import RolloutStream
from actors.transfer_sync import TransferSync, make_sync
from actors.weight_sync import WeightSync
from envs.task import Task
from envs.tasksets import resolve_tasks
from learners.config import LearnerConfig
from recipes.checkpoints import Checkpoints
from recipes.elastic import Fleet, fixed_fleet, scaling, server_fleet, worker_fleet
from recipes.event_log import read_history
from recipes.policies import resolve_policy
from recipes.resume import learn_of_stored_groups, restore, reuse_groups, task_set_facts, wait_for_writers
from recipes.run import Run
from recipes.schedule import Schedule
from recipes.side_evaluation import SideEvaluation, start_side_evaluation
from recipes.together import enter_both
from recipes.totals import Totals
from recipes.transports import (
    evaluation_sync,
    require_packages,
    serving,
    serving_evaluation,
    shared_places,
    training_sync,
)
from recipes.watchdog import Watchdog
from trajectories.buffer import GroupBuffer
from trajectories.ledger import Ledger
from trajectories.schema import PolicyVersion

if TYPE_CHECKING:
    from recipes.rloo import Config

logger = logging.getLogger(__name__)


@dataclass
class Progress:
    """Where the run stands."""

    version: PolicyVersion
    history: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    """(version, metrics) of each step behind the weights."""
    is_whole: bool = True
    """False from the first gradient of a step until its Groups are consumed: such weights must not be saved."""
    num_restores: int = 0
    """Restores since the last checkpoint."""


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What a run is made of."""

    learner: LearnerGroup
    servers: InferencePool
    rollouts: RolloutPool
    buffer: GroupBuffer
    weights: WeightSync | TransferSync
    stream: RolloutStream
    store: Path
    ledger: Ledger
    checkpoints: Checkpoints
    schedule: Schedule
    totals: Totals
    progress: Progress
    watchdog: Watchdog
    evaluation: SideEvaluation | None

    async def publish(self, version: PolicyVersion, *, barrier: bool = False) -> dict[str, float]:
        """Publishes the learner's weights as `version`; while every server is down it waits for one to come back."""
        self.watchdog.doing = f"publishing version {version.n}"
        try:
            return await self.weights.publish(version, barrier=barrier)
        except NoServerLeft as error:
            logger.warning("%s", error)
            await self.servers.until_one_is_up()
            return await self.weights.publish(version, barrier=barrier)

    def metrics(self, run: Run) -> dict[str, float]:
        """How buffer and servers are, what died and was made good, and the run's totals."""
        num_workers = {"rollouts/workers": float(len(self.rollouts.fleet.serving()))}
        return self.buffer.metrics() | self.servers.metrics() | num_workers | self._recoveries(run) | self.count()

    def _recoveries(self, run: Run) -> dict[str, float]:
        """Totals of what was made good; what is new since the last call is an event."""
        now = self.rollouts.fleet.metrics() | {
            "recovery/inference_servers": float(self.servers.num_restarts),
            "recovery/learners": float(self.learner.num_restarts),
        }
        for name in now:
            if new := now[name] - self.totals.reported.get(name, 0.0):
                run.event(name.removeprefix("recovery/"), count=new, version=self.progress.version)
        self.totals.reported.update(now)
        return now

    def count(self) -> dict[str, float]:
        """Totals of the run, over all processes that it had."""
        num_syncs = self.weights.num_syncs
        counts = {
            "weight_syncs": float(num_syncs),
            "weight_syncs_in_flight": float(self.weights.num_syncs_in_flight),
            "probe_gap_sum": self.weights.probe_gap_mean * num_syncs if num_syncs else 0.0,
        }
        return self.totals(counts, max_staleness=self.buffer.max_staleness_seen)


async def assemble(config: "Config", run: Run, stack: AsyncExitStack) -> Parts:
    """Starts every part; each ends with the stack."""
    require_packages(config.sync.transport)
    tasks = resolve_tasks(config.tasks, limit=config.limit)
    evaluated = resolve_tasks(config.eval.tasks, limit=config.eval.limit) if config.eval.every else []
    model = resolve_policy(config.policy.model)
    store = run.directory / "store"
    run.pin("tasks", task_set_facts(tasks))
    ledger = stack.enter_context(Ledger(run.directory / "ledger" / store.name))
    await wait_for_writers(store)
    await stack.enter_async_context(start_cluster(config.cluster))
    _require_room(config)
    learner, servers = await _start_engines(config, stack, model, store)
    version = await restore(run, learner, ledger)
    prefix = f"lineage-{version.lineage}"
    rollouts = await stack.enter_async_context(
        start_rollout_pool(
            config.rollouts, config.episode, store=store, prefix=prefix, model=model, sampler=servers.sampler()
        )
    )
    schedule = Schedule(tasks, ledger, seed=config.seed, epochs=config.epochs)
    stream: RolloutStream | None = None

    def give_back(group_id: str, reason: str) -> None:
        schedule.give_back(group_id, reason)
        if stream is not None:
            stream.reopen()

    buffer = GroupBuffer(
        groups_per_step=config.groups_per_step,
        max_staleness=config.max_staleness,
        version=version,
        policy=config.staleness,
        refill=config.refill,
        forks=ledger.ancestry.forks,
        on_given_back=give_back,
    )
    weights = _weight_sync(config, learner, servers, buffer)
    stack.push_async_callback(weights.close)
    await weights.publish(version)
    if version.lineage > 0:
        found = await learn_of_stored_groups(store, rollouts, ledger, schedule)
        again = schedule.go_on(version.n + config.max_staleness)
        counts = await reuse_groups(again, rollouts, ledger, buffer)
        run.event("resumed", version=version, groups_found=found, **counts)
    evaluation = None
    if evaluated:
        evaluation = await stack.enter_async_context(
            _start_evaluation(config, run, evaluated, learner, model=model, prefix=prefix)
        )
    if config.admission.every_s:
        await stack.enter_async_context(adapting(rollouts.slots, config.admission, servers.load))
    await stack.enter_async_context(scaling(run, worker_fleet(rollouts), _server_fleet(config, servers)))
    stream = await stack.enter_async_context(
        rollouts.stream(schedule, config.group_size, buffer, servers.oldest_version, ledger)
    )
    return Parts(
        learner=learner,
        servers=servers,
        rollouts=rollouts,
        buffer=buffer,
        weights=weights,
        stream=stream,
        store=store,
        ledger=ledger,
        checkpoints=Checkpoints(run, learner),
        schedule=schedule,
        totals=Totals(run.last_metrics()),
        progress=Progress(version, history=[row for row in read_history(run.directory) if row[0] <= version.n]),
        watchdog=Watchdog(
            config.stall_s,
            progress=lambda: (
                rollouts.num_played,
                evaluation.num_played if evaluation is not None else 0,
                weights.num_syncs,
                learner.num_restarts,
                servers.num_restarts,
            ),
            describe=buffer.describe_running,
        ),
        evaluation=evaluation,
    )


async def _start_engines(
    config: "Config", stack: AsyncExitStack, model: Path, store: Path
) -> tuple[LearnerGroup, InferencePool]:
    """The learner and the servers, which sample nothing yet; at once, since each takes long to start."""
    places = await stack.enter_async_context(shared_places(config))
    ranks = start_learner_group(
        config.learners, _learner_config(config, model), model=model, store=store, places=places
    )
    servers = start_inference_pool(serving(config), model=model, version=None, places=places)
    if places:  # an engine measures what its GPU has left, so nobody else may be starting there
        return await stack.enter_async_context(ranks), await stack.enter_async_context(servers)
    return await enter_both(stack, ranks, servers)


async def restore_learner(config: "Config", run: Run, parts: Parts, lost: LearnerLost) -> None:
    """Starts the learner anew from the last checkpoint; every server has its weights before anything is sampled on.

    A rank that dies meanwhile is one death more; LearnerLost when there were too many since the last checkpoint.
    """
    progress, before, first = parts.progress, parts.progress.version, lost
    parts.watchdog.doing = "restoring the learner"
    progress.is_whole = False  # until the checkpoint is loaded, the learner holds nothing or the first weights
    parts.checkpoints.forget()
    if parts.evaluation is not None:
        await parts.evaluation.cancel()  # of a version that may be thrown away
    while True:
        progress.num_restores += 1
        if progress.num_restores > config.learners.max_restarts:
            raise lost
        try:
            await _start_anew(run, parts)
            break
        except LearnerLost as again:
            logger.warning("lost again while it was restored: %s", again)
            lost, progress.is_whole = again, False
    parts.buffer.restore(progress.version)
    open_ones = parts.schedule.go_back(progress.version.n + config.max_staleness, parts.buffer.holds)
    parts.stream.reopen()
    counts = await reuse_groups(open_ones, parts.rollouts, parts.ledger, parts.buffer)
    lost_steps = before.n - progress.version.n
    run.event("learner restored", why=str(first), lost_steps=lost_steps, version=progress.version, **counts)


async def _start_anew(run: Run, parts: Parts) -> None:
    """New ranks, the last checkpoint in them, and in every server."""
    progress = parts.progress
    await parts.learner.restart()
    progress.version = await restore(run, parts.learner, parts.ledger)
    progress.history = [row for row in progress.history if row[0] <= progress.version.n]
    progress.is_whole = True
    await parts.publish(progress.version, barrier=True)


def summarize_run(parts: Parts) -> dict[str, Any]:
    """Results of the run, over all processes that it had."""
    totals = parts.count()
    num_syncs = totals["total/weight_syncs"]
    return {
        "rl_steps": parts.progress.version.n,
        "weight_syncs": int(num_syncs),
        "weight_syncs_in_flight": int(totals["total/weight_syncs_in_flight"]),
        "max_staleness_seen": int(totals["total/max_staleness"]),
        "logprob_gap_mean": totals["total/probe_gap_sum"] / num_syncs if num_syncs else None,
        "seconds": totals["total/seconds"],
        "lineages": parts.progress.version.lineage + 1,
        "engine": parts.servers.engine,
        "learner": parts.learner.sharding,
        "world_size": parts.learner.world_size,
        "sandbox": parts.rollouts.sandbox,
    }


def _server_fleet(config: "Config", servers: InferencePool) -> Fleet:
    if not config.policy.pool.server.colocated:
        return server_fleet(servers)
    why = "policy.server.colocated pairs each server with a learner rank: start the run with other numbers"
    return fixed_fleet("inference servers", lambda wish: wish.servers, len(servers.servers), why)


def _require_room(config: "Config") -> None:
    server = config.policy.pool.server
    each = Resources(num_cpus=server.num_cpus, num_gpus=server.num_gpus)
    beside = dataclasses.replace(each, num_gpus=0) if server.colocated else each
    require(
        {
            "learner ranks": (config.learners.num_ranks, config.learners.resources),
            "inference servers": (config.policy.pool.num_servers, beside),
            "rollout workers": (config.rollouts.num_workers, config.rollouts.resources),
            "evaluation servers": (config.eval.num_servers if config.eval.every else 0, each),
        }
    )


def _learner_config(config: "Config", model: Path) -> LearnerConfig:
    """The schedule ends with the run; a KL term compares with the policy that the run starts from, or the one named."""
    reference = (config.learner.reference or model) if config.loss.kl_coef else None
    return dataclasses.replace(config.learner.for_run_of(config.steps), reference=reference)


def _start_evaluation(
    config: "Config", run: Run, tasks: Sequence[Task], learner: LearnerGroup, *, model: Path, prefix: str
) -> AbstractAsyncContextManager[SideEvaluation]:
    return start_side_evaluation(
        config.eval,
        tasks,
        source=learner,
        model=model,
        pool=serving_evaluation(config),
        episode=config.episode,
        rollouts=config.rollouts,
        sync=evaluation_sync(config),
        store=run.directory / "eval",
        prefix=prefix,
    )


def _weight_sync(
    config: "Config", learner: LearnerGroup, servers: InferencePool, buffer: GroupBuffer
) -> WeightSync | TransferSync:
    def advance() -> None:
        oldest = servers.oldest_version()
        if oldest is not None and oldest.lineage == buffer.version.lineage:  # else a restore is under way, and tells it
            buffer.advance(oldest)

    return make_sync(training_sync(config), source=learner, target=servers, on_served=advance)
