"""RLOO: asynchronous on-policy reinforcement learning against binary verifiers.

Rollouts stream in while the learner trains; a Group is consumed at version v only if every trained token was sampled
at v - max_staleness or later; weights move into the servers while they generate, and each server proves what it serves.

    python -m recipes.rloo --policy runs/sft/model --tasks shell:train --steps 60
    python -m recipes.rloo --policy runs/sft/model --learner.num-ranks 2 --policy.num-servers 2
"""

import asyncio
import dataclasses
import logging
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import tyro

from actors.admission import AdmissionConfig
from actors.cluster import ClusterConfig
from actors.errors import ClusterError, LearnerLost
from actors.learner_group import LearnerGroupConfig
from actors.rollout_pool import RolloutPoolConfig
from actors.sync_config import SyncConfig
from actors.training_step import training_step
from envs.build import EpisodeConfig
from learners.advantages import advantages_of
from learners.config import AdvantageKind, LearnerConfig, LossConfig, LossKind
from learners.plan import plan_batch
from learners.retention import RetentionConfig, retain, saved_steps
from recipes.alarms import AlarmConfig, raised_alarms
from recipes.best import save_best, scores_of, trailing_scores
from recipes.disk import DiskConfig, disk_usage, over_budget
from recipes.interrupt import finish
from recipes.launch import launch
from recipes.policies import PolicyConfig
from recipes.progress import Bar
from recipes.resume import begin_checkpoint
from recipes.rloo_parts import Parts, assemble, restore_learner, summarize_run
from recipes.run import Run, finished_summary
from recipes.side_evaluation import SideEvaluationConfig
from recipes.transports import refuse_impossible
from trajectories.buffer import EndOfTasks, StalenessPolicy, TakeTimeout
from trajectories.handle import GroupHandle
from trajectories.segments import prune
from trajectories.staleness import down_weight

logger = logging.getLogger(__name__)

MAY_DIFFER = ("steps", "wandb", "cluster", "retention", "eval", "alarms", "admission", "disk")
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
    staleness: StalenessPolicy = StalenessPolicy.WAIT
    """What happens to a Group about to be too old: the learner waits for it (wait), it is dropped and another takes its
    place (drop: biased against long rollouts), or it is trained on with a lower weight (down_weight: no bound)."""
    refill: bool = False
    """Replace Groups without signal (all solved, none solved, too few valid) instead of training on fewer."""
    take_deadline_s: float = 900.0
    """How long a step may wait for its Groups."""
    checkpoint_every: int = 20
    """Steps between checkpoints; one is written at the end and on interruption too."""
    retention: RetentionConfig = field(default_factory=RetentionConfig)
    """Which checkpoints stay; the score of one is the trailing average that chooses best/."""
    grace_s: float = 25.0
    """From Ctrl-C or SIGTERM to saved state; a step that takes longer is given up, and the last checkpoint counts."""
    stall_s: float = 1800.0
    """A run in which for so long no Group, step or sync came to its end is stopped, saying who is stuck."""
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
        refuse_impossible(self)


async def main(config: Config) -> dict[str, Any]:
    """Trains and returns the summary that it wrote."""
    if (done := _finished(config)) is not None:
        return done
    async with AsyncExitStack() as stack:
        run = stack.enter_context(Run.open(config.run, config, wandb=config.wandb, may_differ=MAY_DIFFER))
        parts = await assemble(config, run, stack)
        await stack.enter_async_context(parts.watchdog)
        try:
            ended_by = await _train_to_the_end(config, run, parts)
        except (asyncio.CancelledError, TakeTimeout, ClusterError, OSError):
            await _save_in_time(config, run, parts)
            raise
        await parts.weights.close()
        n, history = parts.progress.version.n, parts.progress.history
        best = await save_best(run.directory, parts.learner, n, history, window=config.alarms.window)
        summary = summarize_run(parts) | {"ended_by": ended_by, "best_version": best, "finished": True}
        run.summary(summary)
        print(f"trained {n} steps, ended by {ended_by}; model in {run.directory / 'model'}")
        return summary


def _finished(config: Config) -> dict[str, Any] | None:
    """The summary of a run with nothing left to do."""
    done = finished_summary(config.run, config, MAY_DIFFER)
    if done is None or (done["rl_steps"] < config.steps and done["ended_by"] != "tasks"):
        return None
    print(f"{config.run} is finished: {done['rl_steps']} steps, ended by {done['ended_by']}; nothing to do")
    return done


async def _train_to_the_end(config: Config, run: Run, parts: Parts) -> str:
    """Takes step after step and saves; returns what ended it. A lost learner is made good."""
    with run.progress("steps", total=config.steps, completed=parts.progress.version.n) as bar:
        while True:
            try:
                if (ended_by := await _train_on(config, run, parts, bar)) is not None:
                    await _finish_evaluation(run, parts)
                    await _save(config, run, parts)
                    return ended_by
            except LearnerLost as lost:
                if _is_interrupted():
                    raise
                before = parts.progress.version.n
                await restore_learner(config, run, parts, lost)
                bar.advance(parts.progress.version.n - before)


def _is_interrupted() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def _train_on(config: Config, run: Run, parts: Parts, bar: Bar) -> str | None:
    """One step; what ends the run: "steps", "tasks", "disk" or "alarm"; None while it goes on."""
    if parts.progress.version.n >= config.steps:
        return "steps"
    try:
        metrics = await _step(config, run, parts)
    except EndOfTasks:
        return "tasks"
    bar.advance()
    if full := over_budget(metrics, config.disk):
        logger.error("step=%d ends the run: %s", parts.progress.version.n, full)
        return "disk"
    is_alarmed = any(name.startswith("alarm/") for name in metrics)
    return "alarm" if is_alarmed and config.alarms.stop else None


async def _step(config: Config, run: Run, parts: Parts) -> dict[str, float]:
    """Takes a step's Groups, trains on them, publishes the weights and logs."""
    progress, watchdog = parts.progress, parts.watchdog
    watchdog.doing = f"taking the Groups of step {progress.version.n}"
    metrics = await training_step(
        progress.version,
        stream=parts.stream,
        update=lambda groups: _take_turn(config, parts, groups),
        publisher=parts,
        take_deadline_s=config.take_deadline_s,
    )
    metrics |= parts.metrics(run) | disk_usage(run.directory)
    if parts.evaluation is not None:
        metrics |= await parts.evaluation.after_step(progress.version)
    progress.history.append((progress.version.n, metrics))
    alarms = raised_alarms([each for _, each in progress.history], config.alarms)
    metrics |= {f"alarm/{name}": 1.0 for name in alarms}
    run.log(progress.version.n, metrics)
    parts.ledger.write()
    await parts.checkpoints.poll()
    if progress.version.n % config.checkpoint_every == 0:
        watchdog.doing = f"beginning the checkpoint of version {progress.version.n}"
        await _begin_checkpoint(config, parts)
    return metrics


async def _begin_checkpoint(config: Config, parts: Parts) -> None:
    """It is written while the next steps are taken; once it counts, older ones may go."""
    version = parts.progress.version

    def then() -> None:
        directory, scores = parts.checkpoints.directory, scores_of(parts.progress.history)
        means = trailing_scores(saved_steps(directory), scores, config.alarms.window)  # anew: evaluations come in late
        retain(config.retention, directory, means)
        parts.progress.num_restores = 0
        if config.disk.keep_steps is not None:
            prune(parts.ledger, parts.store, version, keep_steps=config.disk.keep_steps)

    await begin_checkpoint(parts.checkpoints, parts.ledger, version, then)


async def _take_turn(config: Config, parts: Parts, groups: Sequence[GroupHandle]) -> dict[str, float]:
    """One optimizer step, for which colocated servers sleep; they wake with the weights that are published next."""
    is_alone = config.policy.pool.server.colocated
    if is_alone:
        await parts.servers.sleep()
    metrics = await finish(_train(config, parts, groups), config.grace_s)
    if is_alone:
        await parts.learner.release_memory()
    return metrics


async def _train(config: Config, parts: Parts, groups: Sequence[GroupHandle]) -> dict[str, float]:
    """One optimizer step on the Groups, which are consumed by it."""
    progress, learner = parts.progress, parts.learner
    parts.watchdog.doing = f"training step {progress.version.n}"
    plan = plan_batch(
        groups,
        advantages=advantages_of(config.advantage),
        aggregation=config.loss.aggregation,
        group_weights=[down_weight(group, progress.version, config.max_staleness) for group in groups],
        has_penalty=config.loss.kl_coef > 0,
        num_ranks=learner.num_shares,
        max_tokens=config.learner.max_tokens,
    )
    loss = dataclasses.replace(config.loss, temperature=config.episode.sampling.temperature)
    progress.is_whole = False
    metrics = {**plan.metrics, **await learner.forward_backward(plan, loss), **await learner.optim_step()}
    parts.ledger.consume([group.group_id for group in groups], progress.version)
    progress.version = dataclasses.replace(progress.version, n=progress.version.n + 1)
    progress.is_whole = True
    return metrics


async def _finish_evaluation(run: Run, parts: Parts) -> None:
    """Waits for the evaluation that runs; what it found goes into the last step's line."""
    if parts.evaluation is None or not parts.progress.history:
        return
    parts.watchdog.doing = "finishing the evaluation"
    if found := await parts.evaluation.finish():
        step, metrics = parts.progress.history[-1]
        parts.progress.history[-1] = (step, metrics | found)
        run.log(step, metrics | found)


async def _save(config: Config, run: Run, parts: Parts) -> None:
    parts.watchdog.doing = f"saving version {parts.progress.version.n}"
    await _begin_checkpoint(config, parts)
    await parts.checkpoints.finish()
    await parts.learner.save_pretrained(run.directory / "model")


async def _save_in_time(config: Config, run: Run, parts: Parts) -> None:
    """Saves what can be saved within the grace period; else the last checkpoint counts, which is said."""
    if not parts.progress.is_whole:
        logger.error("not saved: the step was not done; the run goes on from its last checkpoint")
        return
    try:
        async with asyncio.timeout(config.grace_s):
            await _save(config, run, parts)
    except (OSError, ClusterError) as error:  # TimeoutError is an OSError
        logger.error("not saved (%s); the run goes on from its last checkpoint", error or f"took {config.grace_s:g} s")


if __name__ == "__main__":
    launch(Config, main)
