"""SFT: fine-tunes a policy on conversations, with loss on the assistant's tokens only.

Data are run directories of harvests, or .jsonl and .parquet files of conversations (messages, ShareGPT, OpenThoughts'
trace rows), rendered by the policy's own chat template or the one given. An interrupted run goes on from its checkpoint
with the losses that it would have had. A stop rule may end training at a given skill: it reads the probability of
held-back demonstrations, never a held-out Task.

    python -m recipes.sft --data runs/harvest --policy tiny --epochs 3
    python -m recipes.sft --data traces.parquet --min-reward None --policy /models/Qwen3-8B --overlong cut
"""

import asyncio
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import tyro

from actors.cluster import ClusterConfig, require, start_cluster
from actors.learner_group import LearnerGroup, LearnerGroupConfig, start_learner_group
from envs.renderer import load_renderer
from learners.config import LearnerConfig, LossConfig, LossKind
from learners.plan import BatchPlan, SizedSample, plan_samples
from recipes.checkpoints import Checkpoints
from recipes.demonstrations import Demonstrations, Overlong, Selection, load_demonstrations
from recipes.feed import Feed
from recipes.interrupt import finish
from recipes.launch import launch
from recipes.looks import Looks, StopRule, Validation
from recipes.policies import PolicyConfig, resolve_policy
from recipes.run import Run
from recipes.sft_progress import Progress, SftLearner, begin_save, restore, save

MAY_DIFFER = ("max_seconds", "checkpoint_every", "wandb", "cluster")
"""What may change when a run goes on."""
STOP_RULE = "stop rule"


@dataclass(frozen=True, kw_only=True)
class Config:
    """Fine-tune a policy on conversations."""

    run: Path = Path("runs/sft")
    """Run directory; the trained policy goes to its model/."""
    data: tuple[Path, ...] = (Path("runs/harvest"),)
    """Run directories whose stores hold Trajectories; .jsonl or .parquet files of conversations, or folders of them."""
    min_reward: float | None = 1.0
    """Train on conversations with at least this reward; None takes every valid one, rewarded or not."""
    min_turns: int = 1
    """Train on Trajectories, or conversations from elsewhere, with at least so many replies."""
    limit: int | None = None
    """Train on at most so many conversations."""
    overlong: Overlong = Overlong.REFUSE
    """What becomes of a conversation of more than learner.max_tokens."""
    shuffle: bool = True
    """Shuffle the conversations, and again for each pass; otherwise they keep the order of the data."""
    template: Path | None = None
    """Chat template (jinja) in place of the policy's own; the trained policy keeps it."""
    epochs: float | None = 3.0
    """Passes over the data, unless a limit below ends training earlier; None for no such limit."""
    max_steps: int | None = None
    max_seconds: float | None = None
    """Training time, in seconds."""
    batch_size: int = 32
    """Conversations of one optimizer step, over all ranks."""
    checkpoint_every: int = 100
    """Steps between checkpoints; one is written at the end and on interruption too."""
    stop: StopRule = field(default_factory=StopRule)
    validation: Validation = field(default_factory=Validation)
    seed: int = 0
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    learner: LearnerConfig = field(default_factory=lambda: LearnerConfig(lr=5e-3, warmup_steps=20))
    learners: Annotated[LearnerGroupConfig, tyro.conf.arg(name="learner")] = field(default_factory=LearnerGroupConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    wandb: bool = False
    """Log to Weights & Biases too."""

    def __post_init__(self) -> None:
        if self.batch_size < 1 or self.checkpoint_every < 1:
            raise ValueError(
                f"batch_size and checkpoint_every must be >= 1, got {self.batch_size} and {self.checkpoint_every}"
            )
        if self.epochs is not None and self.epochs <= 0:
            raise ValueError(f"epochs must be > 0, got {self.epochs}")
        if self.epochs is self.max_steps is self.max_seconds is self.stop.probability is None:
            raise ValueError("nothing ends this run: give --epochs, --max-steps, --max-seconds or --stop.probability")
        if self.template is not None and not self.template.is_file():
            raise ValueError(f"template {self.template} is no file")

    @property
    def shuffle_seed(self) -> int | None:
        """None keeps the order of the data."""
        return self.seed if self.shuffle else None

    def plan(self, samples: Sequence[SizedSample]) -> BatchPlan:
        """Lays Samples over the ranks."""
        num_shares = self.learners.num_ranks // self.learner.sequence_parallel
        return plan_samples(samples, num_ranks=num_shares, max_tokens=self.learner.max_tokens)


async def main(config: Config) -> dict[str, Any]:
    """Fine-tunes and returns the summary that it wrote."""
    async with AsyncExitStack() as stack:
        run = stack.enter_context(Run.open(config.run, config, wandb=config.wandb, may_differ=MAY_DIFFER))
        model = resolve_policy(config.policy.model)
        demonstrations = await _render(config, model, run)
        training = demonstrations.items[config.stop.num_held_back + config.validation.num_demonstrations :]
        if not training:
            raise ValueError(
                f"all {len(demonstrations.items)} demonstrations are held back; harvest more or lower "
                "--stop.num-demonstrations or --validation.num-demonstrations"
            )
        feed = Feed(training, config.batch_size, shuffle_seed=config.shuffle_seed)
        learner_config = config.learner.for_run_of(feed.num_steps(config.epochs, config.max_steps))
        await stack.enter_async_context(start_cluster(config.cluster))
        require({"learner ranks": (config.learners.num_ranks, config.learners.resources)})
        learner = await stack.enter_async_context(
            start_learner_group(config.learners, learner_config, model=model, store=run.directory / "samples")
        )
        looks = Looks(config.stop, config.validation, demonstrations.items, learner, config.plan)
        try:
            progress = await train(config, run, learner, feed, looks)
        except asyncio.CancelledError:
            await _save_model(config, learner, run.directory / "model")
            raise
        await _save_model(config, learner, run.directory / "model")
        summary = _summary(progress, demonstrations, len(training), learner)
        run.summary(summary)
        print(
            f"trained {progress.step} steps in {progress.seconds:.0f} s, ended by {progress.ended_by}; "
            f"model in {config.run}/model"
        )
        return summary


async def train(config: Config, run: Run, learner: SftLearner, feed: Feed, looks: Looks) -> Progress:
    """Trains from where the run stands to its end, saves, and returns where it then stands.

    When it is cancelled, the step under way ends first, and what is done is saved.
    """
    progress = await restore(run, learner)
    checkpoints = Checkpoints(run, learner)
    try:
        await _train(config, run, learner, checkpoints, feed, looks, progress)
    except asyncio.CancelledError:
        await save(run, checkpoints, progress)
        raise
    await save(run, checkpoints, progress)
    return progress


async def _train(
    config: Config,
    run: Run,
    learner: SftLearner,
    checkpoints: Checkpoints,
    feed: Feed,
    looks: Looks,
    progress: Progress,
) -> None:
    if progress.ended_by == STOP_RULE:
        return
    batches = feed.batches(progress.step)
    num_steps = feed.num_steps(config.epochs, config.max_steps)
    for _ in run.steps(num_steps, start=progress.step):
        if config.max_seconds is not None and progress.seconds >= config.max_seconds:
            progress.ended_by = "max_seconds"
            return
        await finish(_step(learner, config.plan(next(batches)), looks, progress, run))
        if progress.ended_by == STOP_RULE:
            return
        await checkpoints.poll()
        if progress.step % config.checkpoint_every == 0:
            await begin_save(checkpoints, progress)
    progress.ended_by = "max_steps" if num_steps == config.max_steps else "epochs"


async def _step(learner: SftLearner, plan: BatchPlan, looks: Looks, progress: Progress, run: Run) -> None:
    """One optimizer step, the looks that are due after it, and their line in the log."""
    began = time.monotonic()
    metrics = await learner.forward_backward(plan, LossConfig(kind=LossKind.CROSS_ENTROPY))
    metrics |= await learner.optim_step()
    progress.step += 1
    metrics |= await looks.after(progress.step)
    if looks.ends(metrics):
        progress.ended_by = STOP_RULE
    progress.seconds += time.monotonic() - began
    run.log(progress.step, {**plan.metrics, **metrics, "seconds": progress.seconds})


async def _render(config: Config, model: Path, run: Run) -> Demonstrations:
    template = None if config.template is None else config.template.read_text()
    selection = Selection(
        min_reward=config.min_reward,
        min_turns=config.min_turns,
        limit=config.limit,
        shuffle_seed=config.shuffle_seed,
        max_tokens=config.learner.max_tokens,
        overlong=config.overlong,
    )
    with run.progress("rendering conversations") as bar:
        return await load_demonstrations(
            config.data, selection, load_renderer(model, template=template), run.directory / "samples", bar.advance
        )


async def _save_model(config: Config, learner: LearnerGroup, directory: Path) -> None:
    """The policy, with the template that it was trained with."""
    await learner.save_pretrained(directory)
    if config.template is not None:
        (directory / "chat_template.jinja").write_text(config.template.read_text())


def _summary(
    progress: Progress, demonstrations: Demonstrations, num_trained: int, learner: LearnerGroup
) -> dict[str, Any]:
    return {
        "steps": progress.step,
        "seconds": progress.seconds,
        "ended_by": progress.ended_by,
        "num_demonstrations": num_trained,
        "conversations": demonstrations.counts,
        "world_size": learner.world_size,
        "learner": learner.sharding,
    }


if __name__ == "__main__":
    launch(Config, main)
