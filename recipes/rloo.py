"""RLOO: asynchronous on-policy reinforcement learning against binary verifiers.

Rollouts stream in while the learner trains; a Group is consumed at version v only if every trained token was sampled
at v - max_staleness or later; weights move into the servers while they generate, and each server proves what it serves.

    python -m recipes.rloo --policy runs/sft/model --tasks shell:train --steps 60
    python -m recipes.rloo --policy runs/sft/model --learner.num-ranks 2 --policy.num-servers 2
"""

import asyncio
import dataclasses
import itertools
import logging
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import tyro

from actors.admission import AdmissionConfig, adapting
from actors.cluster import ClusterConfig, Resources, require, start_cluster
from actors.inference_pool import InferencePool, start_inference_pool
from actors.learner_group import LearnerGroup, LearnerGroupConfig, start_learner_group
from actors.rollout_pool import GroupRequest, RolloutPool, RolloutPoolConfig, RolloutStream, start_rollout_pool
from actors.training_step import training_step
from actors.weight_sync import SyncConfig, WeightSync
from envs.build import EpisodeConfig
from envs.task import Task
from envs.tasksets import resolve_tasks
from learners.advantages import leave_one_out
from learners.config import LearnerConfig, LossConfig, LossKind, Precision
from learners.plan import plan_batch
from recipes.alarms import AlarmConfig, raised_alarms
from recipes.best import save_best
from recipes.disk import DiskConfig, disk_usage, over_budget
from recipes.event_log import read_history
from recipes.interrupt import finish
from recipes.launch import launch
from recipes.policies import PolicyConfig, resolve_policy
from recipes.run import Run
from recipes.side_evaluation import SideEvaluation, SideEvaluationConfig, start_side_evaluation
from trajectories.buffer import GroupBuffer, StalenessPolicy
from trajectories.handle import GroupHandle
from trajectories.schema import PolicyVersion
from trajectories.staleness import down_weight

logger = logging.getLogger(__name__)

MAY_DIFFER = ("steps", "wandb", "cluster", "eval", "alarms", "admission", "disk")
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
    groups_per_step: int = 32
    group_size: int = 8
    """Rollouts of a Group."""
    max_staleness: int = 1
    """How many versions behind the learner a trained token may have been sampled; 0 is strictly on-policy."""
    staleness: StalenessPolicy = StalenessPolicy.WAIT
    """What happens to a Group about to be too old: the learner waits for it (wait), it is dropped and another takes its
    place (drop: biased against long rollouts), or it is trained on with a lower weight (down_weight: no bound)."""
    refill: bool = False
    """Replace Groups without signal (all solved, none solved, too few valid) instead of training on fewer."""
    take_deadline_s: float = 900.0
    """How long a step may wait for its Groups."""
    checkpoint_every: int = 20
    """Steps between checkpoints; one is written at the end and on interruption too."""
    seed: int = 0
    """Order of the Tasks."""
    eval: SideEvaluationConfig = field(default_factory=SideEvaluationConfig)
    """Evaluation beside training."""
    alarms: AlarmConfig = field(default_factory=AlarmConfig)
    admission: AdmissionConfig = field(default_factory=AdmissionConfig)
    disk: DiskConfig = field(default_factory=DiskConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    episode: EpisodeConfig = field(default_factory=EpisodeConfig)
    rollouts: RolloutPoolConfig = field(default_factory=RolloutPoolConfig)
    learner: LearnerConfig = field(default_factory=lambda: LearnerConfig(lr=5e-4))
    learners: Annotated[LearnerGroupConfig, tyro.conf.arg(name="learner")] = field(default_factory=LearnerGroupConfig)
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
        if self.max_staleness < 0:
            raise ValueError(f"max_staleness must be >= 0, got {self.max_staleness}")
        sampling = self.episode.sampling
        if sampling.top_p < 1 or sampling.top_k > 0 or sampling.temperature == 0:
            raise ValueError("training needs temperature > 0, top_p 1 and top_k 0: what was sampled is what is trained")


async def main(config: Config) -> dict[str, Any]:
    """Trains and returns the summary that it wrote."""
    async with AsyncExitStack() as stack:
        run = stack.enter_context(Run.open(config.run, config, wandb=config.wandb, may_differ=MAY_DIFFER))
        parts = await _assemble(config, run, stack)
        progress, began = parts.progress, time.monotonic()
        history = [row for row in read_history(run.directory) if row[0] <= progress.version.n]
        try:
            for _ in run.steps(config.steps, start=progress.version.n):
                metrics = await training_step(
                    progress.version,
                    stream=parts.stream,
                    update=lambda groups: finish(_train(config, parts.learner, groups, progress)),
                    publisher=parts.weights,
                    take_deadline_s=config.take_deadline_s,
                )
                metrics |= parts.buffer.metrics() | disk_usage(run.directory)
                if parts.evaluation is not None:
                    metrics |= await parts.evaluation.after_step(progress.version)
                history.append((progress.version.n, metrics))
                alarms = raised_alarms([metrics for _, metrics in history], config.alarms)
                run.log(progress.version.n, metrics | {f"alarm/{name}": 1.0 for name in alarms})
                if progress.version.n % config.checkpoint_every == 0:
                    await _checkpoint(run, parts.learner, progress)
                if full := over_budget(metrics, config.disk):
                    logger.error("step=%d ends the run: %s", progress.version.n, full)
                if full or (alarms and config.alarms.stop):
                    break
            if parts.evaluation is not None and (found := await parts.evaluation.finish()):
                history[-1] = (progress.version.n, history[-1][1] | found)
                run.log(*history[-1])  # the step's last line, whole
        except asyncio.CancelledError:
            await _save(run, parts.learner, progress)
            raise
        await _save(run, parts.learner, progress)
        await parts.weights.close()
        best = await save_best(run.directory, parts.learner, progress.version.n, history, window=config.alarms.window)
        summary = _summary(parts) | {"seconds": time.monotonic() - began, "best_version": best}
        run.summary(summary)
        print(f"trained {progress.version.n} steps; model in {run.directory / 'model'}")
        return summary


async def _train(
    config: Config, learner: LearnerGroup, groups: Sequence[GroupHandle], progress: "_Progress"
) -> dict[str, float]:
    """One optimizer step on the Groups, which are consumed by it."""
    plan = plan_batch(
        groups,
        advantages=leave_one_out,
        num_ranks=config.learners.num_ranks,
        max_tokens=config.learner.max_tokens,
        group_weights=[down_weight(group, progress.version, config.max_staleness) for group in groups],
    )
    loss = dataclasses.replace(config.loss, temperature=config.episode.sampling.temperature)
    metrics = {**plan.metrics, **await learner.forward_backward(plan, loss), **await learner.optim_step()}
    progress.consume(groups)
    return metrics


@dataclass
class _Progress:
    """Where the run stands; what a checkpoint holds beside the learner's state."""

    version: PolicyVersion
    consumed: set[str]
    """Ids of the Groups behind the weights."""

    def consume(self, groups: Sequence[GroupHandle]) -> None:
        self.consumed |= {group.group_id for group in groups}
        self.version = dataclasses.replace(self.version, n=self.version.n + 1)


@dataclass(frozen=True, kw_only=True)
class _Parts:
    """What a run is made of."""

    learner: LearnerGroup
    servers: InferencePool
    rollouts: RolloutPool
    buffer: GroupBuffer
    weights: WeightSync
    stream: RolloutStream
    progress: _Progress
    evaluation: SideEvaluation | None


async def _assemble(config: Config, run: Run, stack: AsyncExitStack) -> _Parts:
    """Starts every part; each ends with the stack. What can be refused is refused before anything starts."""
    tasks = resolve_tasks(config.tasks, limit=config.limit)
    model = resolve_policy(config.policy.model)
    store = run.directory / "store"
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
            "evaluation servers": (
                config.eval.num_servers if config.eval.every else 0,
                Resources(num_cpus=server.num_cpus, num_gpus=server.num_gpus),
            ),
        }
    )
    learner = await stack.enter_async_context(
        start_learner_group(config.learners, config.learner, model=model, store=store)
    )
    servers = await stack.enter_async_context(start_inference_pool(config.policy.pool, model=model, version=None))
    progress = await _restore(run, learner)
    lineage = progress.version.lineage
    rollouts = await stack.enter_async_context(
        start_rollout_pool(
            config.rollouts,
            config.episode,
            store=store,
            prefix=f"lineage-{lineage}",
            model=model,
            sampler=servers.sampler(),
        )
    )
    buffer = GroupBuffer(
        groups_per_step=config.groups_per_step,
        max_staleness=config.max_staleness,
        version=progress.version,
        policy=config.staleness,
        refill=config.refill,
    )
    weights = _weight_sync(config, learner, servers, buffer)
    stack.push_async_callback(weights.close)
    await weights.publish(progress.version)
    requests = group_requests(tasks, config.seed, lineage, skip=progress.consumed)
    evaluation = await _start_evaluation(config, run, learner, model, lineage, stack)
    if config.admission.every_s:
        await stack.enter_async_context(adapting(rollouts.slots, config.admission, servers.stats))
    stream = await stack.enter_async_context(
        rollouts.stream(requests, config.group_size, buffer, servers.oldest_version)
    )
    return _Parts(
        learner=learner,
        servers=servers,
        rollouts=rollouts,
        buffer=buffer,
        weights=weights,
        stream=stream,
        progress=progress,
        evaluation=evaluation,
    )


async def _start_evaluation(
    config: Config, run: Run, learner: LearnerGroup, model: Path, lineage: int, stack: AsyncExitStack
) -> SideEvaluation | None:
    if not config.eval.every:
        return None
    return await stack.enter_async_context(
        start_side_evaluation(
            config.eval,
            resolve_tasks(config.eval.tasks, limit=config.eval.limit),
            source=learner,
            model=model,
            pool=config.policy.pool,
            episode=config.episode,
            rollouts=config.rollouts,
            sync=_proven(config),
            store=run.directory / "eval",
            prefix=f"lineage-{lineage}",
        )
    )


def _proven(config: Config) -> SyncConfig:
    return dataclasses.replace(config.sync, probe_is_exact=config.learner.precision is Precision.FP32)


def _weight_sync(config: Config, learner: LearnerGroup, servers: InferencePool, buffer: GroupBuffer) -> WeightSync:
    # At staleness 0 a Group may start only when every server has the version, so publishing waits for them all.
    sync = dataclasses.replace(_proven(config), barrier=config.sync.barrier or config.max_staleness == 0)

    def advance() -> None:
        if (oldest := servers.oldest_version()) is not None:
            buffer.advance(oldest)

    return WeightSync(source=learner, target=servers, config=sync, on_served=advance)


def _summary(parts: _Parts) -> dict[str, Any]:
    return {
        "rl_steps": parts.progress.version.n,
        "weight_syncs": parts.weights.num_syncs,
        "weight_syncs_in_flight": parts.weights.num_syncs_in_flight,
        "max_staleness_seen": parts.buffer.max_staleness_seen,
        "logprob_gap_mean": parts.weights.probe_gap_mean,
        "engine": parts.servers.engine,
        "learner": parts.learner.sharding,
        "world_size": parts.learner.world_size,
        "sandbox": parts.rollouts.sandbox,
    }


def group_requests(tasks: Sequence[Task], seed: int, lineage: int, skip: set[str]) -> Iterator[GroupRequest]:
    """Groups without end: passes over the shuffled Tasks, without those that a restored checkpoint consumed."""
    for epoch in itertools.count():
        for task in random.Random(seed + epoch).sample(list(tasks), len(tasks)):
            consumed = {f"{task.id}@{epoch}.{earlier}" for earlier in range(lineage)}
            if not consumed & skip:
                yield GroupRequest(task=task, group_id=f"{task.id}@{epoch}.{lineage}")


async def _save(run: Run, learner: LearnerGroup, progress: _Progress) -> None:
    await _checkpoint(run, learner, progress)
    await learner.save_pretrained(run.directory / "model")


async def _checkpoint(run: Run, learner: LearnerGroup, progress: _Progress) -> None:
    """Writes a checkpoint and points the run at it; one that is there already is kept."""
    version = progress.version
    name = f"{version.lineage}-{version.n:06d}"
    state = {"checkpoint": name, "lineage": version.lineage, "n": version.n, "consumed": sorted(progress.consumed)}
    if run.load_state() != state:
        await learner.save(run.directory / "checkpoints" / name)
        run.save_state(state)


async def _restore(run: Run, learner: LearnerGroup) -> _Progress:
    """Where the run stands. Every start but the first begins a new lineage, recorded before anything is sampled."""
    state = run.load_state()
    if state is None:
        state = {"checkpoint": None, "lineage": 0, "n": 0, "consumed": []}
    else:
        state["lineage"] += 1
    if state["checkpoint"] is not None:
        await learner.load(run.directory / "checkpoints" / state["checkpoint"])
    run.save_state(state)
    return _Progress(PolicyVersion(lineage=state["lineage"], n=state["n"]), set(state["consumed"]))


if __name__ == "__main__":
    launch(Config, main)
