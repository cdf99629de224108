"""RLOO: asynchronous on-policy reinforcement learning against binary verifiers.

Rollouts stream in while the learner trains; a Group is consumed at version v only if every trained token was sampled
at v - max_staleness or later; weights move into the servers while they generate, and each server proves what it serves.

    python -m recipes.rloo --policy runs/sft/model --tasks shell:train --steps 60
    python -m recipes.rloo --policy runs/sft/model --learner.num-ranks 2 --policy.num-servers 2
"""

import asyncio
import dataclasses
import logging
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import tyro

from actors.cluster import ClusterConfig, Resources, require, start_cluster
from actors.errors import ClusterError, LearnerLost
from actors.inference_errors import NoServerLeft
from actors.inference_pool import InferencePool, start_inference_pool
from actors.learner_group import LearnerGroup, LearnerGroupConfig, start_learner_group
from actors.rollout_pool import RolloutPool, RolloutPoolConfig, RolloutStream, start_rollout_pool
from actors.weight_sync import SyncConfig, WeightSync
from envs.build import EpisodeConfig
from envs.tasksets import resolve_tasks
from learners.advantages import advantages_of
from learners.config import AdvantageKind, LearnerConfig, LossConfig, LossKind, Precision
from learners.plan import plan_batch
from learners.retention import RetentionConfig, retain
from recipes.interrupt import finish
from recipes.launch import launch
from recipes.policies import PolicyConfig, resolve_policy
from recipes.progress import Bar
from recipes.resume import (
    checkpoint,
    learn_of_stored_groups,
    restore,
    reuse_groups,
    task_set_facts,
    wait_for_writers,
)
from recipes.run import Run, finished_summary
from recipes.schedule import Schedule
from recipes.totals import Totals
from recipes.watchdog import Watchdog
from trajectories.buffer import EndOfTasks, GroupBuffer, TakeTimeout
from trajectories.handle import GroupHandle
from trajectories.ledger import Ledger
from trajectories.metrics import summarize_groups
from trajectories.schema import DEFAULT_TREATMENTS, PolicyVersion

logger = logging.getLogger(__name__)

MAY_DIFFER = ("steps", "wandb", "cluster", "retention")
"""What may change when a run goes on."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """Improve a policy by asynchronous RLOO."""

    run: Path = Path("runs/rloo")
    """Run directory; the trained policy goes to its model/."""
    tasks: str = "shell:train"
    """Task set: shell:train, humaneval, or a directory of Harbor tasks."""
    limit: int | None = None
    """Train on only the first so many Tasks."""
    steps: int = 60
    """Optimizer steps."""
    epochs: int | None = None
    """Passes over the Tasks, after which the run ends even before `steps`; None begins anew without end."""
    groups_per_step: int = 32
    group_size: int = 8
    """Rollouts of a Group."""
    max_staleness: int = 1
    """How many versions behind the learner a trained token may have been sampled; 0 is strictly on-policy."""
    refill: bool = False
    """Replace Groups without signal (all solved, none solved, too few valid) instead of training on fewer."""
    take_deadline_s: float = 900.0
    """How long a step may wait for its Groups."""
    checkpoint_every: int = 20
    """Steps between checkpoints; one is written at the end and on interruption too."""
    retention: RetentionConfig = field(default_factory=RetentionConfig)
    """Which checkpoints stay; the score of one is the mean reward of the step before it."""
    grace_s: float = 25.0
    """From Ctrl-C or SIGTERM to saved state; a step that takes longer is given up, and the last checkpoint counts."""
    stall_s: float = 1800.0
    """A run in which for so long no Group, step or sync came to its end is stopped, saying who is stuck."""
    seed: int = 0
    """Order of the Tasks."""
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    episode: EpisodeConfig = field(default_factory=EpisodeConfig)
    rollouts: RolloutPoolConfig = field(default_factory=RolloutPoolConfig)
    learner: LearnerConfig = field(default_factory=lambda: LearnerConfig(lr=5e-4))
    learners: Annotated[LearnerGroupConfig, tyro.conf.arg(name="learner")] = field(default_factory=LearnerGroupConfig)
    advantage: AdvantageKind = AdvantageKind.LEAVE_ONE_OUT
    """What a reward is compared with."""
    loss: LossConfig = field(default_factory=lambda: LossConfig(kind=LossKind.CLIPPED))
    sync: SyncConfig = field(default_factory=lambda: SyncConfig(barrier=False))
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    wandb: bool = False
    """Log to Weights & Biases too."""

    def __post_init__(self) -> None:
        if self.group_size < 2:
            raise ValueError(f"group_size must be >= 2 for a leave-one-out baseline, got {self.group_size}")
        if self.groups_per_step < 1 or self.steps < 1:
            raise ValueError(f"groups_per_step and steps must be >= 1, got {self.groups_per_step}, {self.steps}")
        if self.epochs is not None and self.epochs < 1:
            raise ValueError(f"epochs must be >= 1, got {self.epochs}")
        if self.grace_s <= 0 or self.stall_s <= 0:
            raise ValueError(f"grace_s and stall_s must be > 0, got {self.grace_s}, {self.stall_s}")
        if self.max_staleness < 0:
            raise ValueError(f"max_staleness must be >= 0, got {self.max_staleness}")
        sampling = self.episode.sampling
        if sampling.top_p < 1 or sampling.top_k > 0 or sampling.temperature == 0:
            raise ValueError("training needs temperature > 0, top_p 1 and top_k 0: what was sampled is what is trained")


async def main(config: Config) -> dict[str, Any]:
    """Trains and returns the summary that it wrote."""
    if (done := _finished(config)) is not None:
        return done
    async with AsyncExitStack() as stack:
        run = stack.enter_context(Run.open(config.run, config, wandb=config.wandb, may_differ=MAY_DIFFER))
        parts = await _assemble(config, run, stack)
        watchdog = Watchdog(config.stall_s, progress=parts.moved, describe=parts.buffer.describe_running)
        await stack.enter_async_context(watchdog)
        try:
            ended_by = await _train_to_the_end(config, run, parts, watchdog)
        except (asyncio.CancelledError, TakeTimeout, ClusterError, OSError):
            await _save_in_time(config, run, parts)
            raise
        await parts.weights.close()
        summary = _summary(parts) | {"ended_by": ended_by, "finished": True}
        run.summary(summary)
        print(f"trained {parts.progress.version.n} steps; model in {run.directory / 'model'}")
        return summary


def _finished(config: Config) -> dict[str, Any] | None:
    """The summary of a run with nothing left to do."""
    done = finished_summary(config.run, config, MAY_DIFFER)
    if done is None or (done["rl_steps"] < config.steps and done["ended_by"] == "steps"):
        return None
    print(f"{config.run} is finished: {done['rl_steps']} steps, ended by {done['ended_by']}; nothing to do")
    return done


async def _train_to_the_end(config: Config, run: Run, parts: "_Parts", watchdog: Watchdog) -> str:
    """Takes step after step and saves; returns what ended it: "steps" or "tasks". A lost learner is made good."""
    progress = parts.progress
    with run.progress("steps", total=config.steps, completed=progress.version.n) as bar:
        while True:
            try:
                if progress.version.n >= config.steps:
                    await _save(run, parts)
                    return "steps"
                await _step(config, run, parts, watchdog)
                bar.advance()
            except EndOfTasks:
                await _save(run, parts)
                return "tasks"
            except LearnerLost as lost:
                if _is_interrupted():
                    raise
                watchdog.doing = "restoring the learner"
                await _restore_learner(config, run, parts, lost, bar)


def _is_interrupted() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def _step(config: Config, run: Run, parts: "_Parts", watchdog: Watchdog) -> None:
    """Takes a step's Groups, trains on them, publishes the weights and logs."""
    progress, clock = parts.progress, _Clock()
    watchdog.doing = f"taking the Groups of step {progress.version.n}"
    groups = await parts.stream.take(progress.version, config.take_deadline_s)
    metrics = clock.lap("take_s") | summarize_groups(groups, DEFAULT_TREATMENTS, version=progress.version)
    watchdog.doing = f"training step {progress.version.n}"
    metrics |= await finish(_train(config, parts, groups), config.grace_s) | clock.lap("train_s")
    watchdog.doing = f"publishing version {progress.version.n}"
    metrics |= await _publish(parts) | clock.lap("publish_s")
    metrics |= parts.buffer.metrics() | parts.servers.metrics() | parts.recoveries(run) | parts.count()
    run.log(progress.version.n, metrics)
    parts.ledger.write()
    if progress.version.n % config.checkpoint_every == 0:
        watchdog.doing = f"writing the checkpoint of version {progress.version.n}"
        await checkpoint(run, parts.learner, parts.ledger, progress.version)
        retain(config.retention, run.directory / "checkpoints", score=metrics.get("reward_mean"))
        progress.num_restores = 0


async def _train(config: Config, parts: "_Parts", groups: Sequence[GroupHandle]) -> dict[str, float]:
    """One optimizer step on the Groups, which are consumed by it."""
    progress = parts.progress
    plan = plan_batch(
        groups,
        advantages=advantages_of(config.advantage),
        aggregation=config.loss.aggregation,
        has_penalty=config.loss.kl_coef > 0,
        num_ranks=parts.learner.num_shares,
        max_tokens=config.learner.max_tokens,
    )
    loss = dataclasses.replace(config.loss, temperature=config.episode.sampling.temperature)
    progress.is_whole = False
    metrics = {**plan.metrics, **await parts.learner.forward_backward(plan, loss), **await parts.learner.optim_step()}
    parts.ledger.consume([group.group_id for group in groups], progress.version)
    progress.version = dataclasses.replace(progress.version, n=progress.version.n + 1)
    progress.is_whole = True
    return metrics


async def _publish(parts: "_Parts", *, barrier: bool = False) -> dict[str, float]:
    """Publishes the present version; while every server is down it waits for one that comes back."""
    try:
        return await parts.weights.publish(parts.progress.version, barrier=barrier)
    except NoServerLeft as error:
        logger.warning("%s", error)
        await parts.servers.until_one_serves()
        return await parts.weights.publish(parts.progress.version, barrier=barrier)


async def _restore_learner(config: Config, run: Run, parts: "_Parts", lost: LearnerLost, bar: Bar) -> None:
    """Starts the learner anew from the last checkpoint; every server has its weights before anything is sampled on."""
    progress, before = parts.progress, parts.progress.version
    progress.num_restores += 1
    if progress.num_restores > config.learners.max_restarts:
        raise lost
    await parts.learner.restart()
    progress.version = await restore(run, parts.learner, parts.ledger)
    progress.is_whole = True
    await _publish(parts, barrier=True)
    parts.buffer.restore(progress.version)
    again = parts.schedule.go_back(progress.version.n + config.max_staleness, parts.buffer.holds)
    counts = await reuse_groups(again, parts.rollouts, parts.ledger, parts.buffer)
    bar.advance(progress.version.n - before.n)
    run.event(
        "learner restored", why=str(lost), lost_steps=before.n - progress.version.n, version=progress.version, **counts
    )


@dataclass
class _Progress:
    """Where the run stands."""

    version: PolicyVersion
    is_whole: bool = True
    """False from the first gradient of a step until its Groups are consumed: such weights must not be saved."""
    num_restores: int = 0
    """Restores since the last checkpoint."""


@dataclass(frozen=True, kw_only=True)
class _Parts:
    """What a run is made of."""

    learner: LearnerGroup
    servers: InferencePool
    rollouts: RolloutPool
    buffer: GroupBuffer
    weights: WeightSync
    stream: RolloutStream
    ledger: Ledger
    schedule: Schedule
    totals: Totals
    progress: _Progress

    def moved(self) -> tuple[float, ...]:
        """Changes whenever a Group or a sync came to its end."""
        return (self.rollouts.num_played, self.weights.num_syncs, self.learner.num_restarts, self.servers.num_restarts)

    def recoveries(self, run: Run) -> dict[str, float]:
        """Totals of what died and was made good; what is new since the last call is an event."""
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


async def _assemble(config: Config, run: Run, stack: AsyncExitStack) -> _Parts:
    """Starts every part; each ends with the stack. What can be refused is refused before anything starts."""
    tasks = resolve_tasks(config.tasks, limit=config.limit)
    model = resolve_policy(config.policy.model)
    store = run.directory / "store"
    run.pin("tasks", task_set_facts(tasks))
    ledger = stack.enter_context(Ledger(run.directory / "ledger" / store.name))
    await wait_for_writers(store)
    await stack.enter_async_context(start_cluster(config.cluster))
    server = config.policy.pool.server
    require(
        {
            "learner ranks": (config.learners.num_ranks, config.learners.resources),
            "inference servers": (
                config.policy.pool.num_servers,
                Resources(num_cpus=server.num_cpus, num_gpus=server.num_gpus),
            ),
            "rollout workers": (config.rollouts.num_workers, config.rollouts.resources),
        }
    )
    learner = await stack.enter_async_context(
        start_learner_group(config.learners, _learner_config(config, model), model=model, store=store)
    )
    servers = await stack.enter_async_context(start_inference_pool(config.policy.pool, model=model, version=None))
    version = await restore(run, learner, ledger)
    rollouts = await stack.enter_async_context(
        start_rollout_pool(
            config.rollouts,
            config.episode,
            store=store,
            prefix=f"lineage-{version.lineage}",
            model=model,
            sampler=servers.sampler(),
        )
    )
    schedule = Schedule(tasks, ledger, seed=config.seed, epochs=config.epochs)
    buffer = GroupBuffer(
        groups_per_step=config.groups_per_step,
        max_staleness=config.max_staleness,
        version=version,
        refill=config.refill,
        forks=ledger.ancestry.forks,
        on_given_back=schedule.give_back,
    )
    weights = _weight_sync(config, learner, servers, buffer)
    stack.push_async_callback(weights.close)
    await weights.publish(version)
    if version.lineage > 0:
        found = await learn_of_stored_groups(store, rollouts, ledger, schedule)
        again = schedule.go_on(version.n + config.max_staleness)
        counts = await reuse_groups(again, rollouts, ledger, buffer)
        run.event("resumed", version=version, groups_found=found, **counts)
    stream = await stack.enter_async_context(
        rollouts.stream(schedule, config.group_size, buffer, servers.oldest_version, ledger)
    )
    return _Parts(
        learner=learner,
        servers=servers,
        rollouts=rollouts,
        buffer=buffer,
        weights=weights,
        stream=stream,
        ledger=ledger,
        schedule=schedule,
        totals=Totals(run.last_metrics()),
        progress=_Progress(version),
    )


def _learner_config(config: Config, model: Path) -> LearnerConfig:
    """The schedule ends with the run; a KL term compares with the policy that the run starts from, or the one named."""
    reference = (config.learner.reference or model) if config.loss.kl_coef else None
    return dataclasses.replace(config.learner.for_run_of(config.steps), reference=reference)


def _weight_sync(config: Config, learner: LearnerGroup, servers: InferencePool, buffer: GroupBuffer) -> WeightSync:
    # At staleness 0 a Group may start only when every server has the version, so publishing waits for them all.
    sync = dataclasses.replace(
        config.sync,
        barrier=config.sync.barrier or config.max_staleness == 0,
        probe_is_exact=config.learner.precision is Precision.FP32,
    )

    def advance() -> None:
        oldest = servers.oldest_version()
        if oldest is not None and oldest.lineage == buffer.version.lineage:  # else a restore is under way, and tells it
            buffer.advance(oldest)

    return WeightSync(source=learner, target=servers, config=sync, on_served=advance)


def _summary(parts: _Parts) -> dict[str, Any]:
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


async def _save(run: Run, parts: _Parts) -> None:
    await checkpoint(run, parts.learner, parts.ledger, parts.progress.version)
    await parts.learner.save_pretrained(run.directory / "model")


async def _save_in_time(config: Config, run: Run, parts: _Parts) -> None:
    """Saves what can be saved within the grace period; else the last checkpoint counts, which is said."""
    if not parts.progress.is_whole:
        logger.error("not saved: the step was not done; the run goes on from its last checkpoint")
        return
    try:
        async with asyncio.timeout(config.grace_s):
            await _save(run, parts)
    except (OSError, ClusterError) as error:  # TimeoutError is an OSError
        logger.error("not saved (%s); the run goes on from its last checkpoint", error or f"took {config.grace_s:g} s")


class _Clock:
    """Seconds since the last lap."""

    def __init__(self) -> None:
        self._began = time.monotonic()

    def lap(self, name: str) -> dict[str, float]:
        now = time.monotonic()
        seconds, self._began = now - self._began, now
        return {f"time/{name}": seconds}


if __name__ == "__main__":
    launch(Config, main)
