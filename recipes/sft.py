"""SFT: fine-tunes a policy on harvested Trajectories, with loss on the assistant's tokens only.

Solved Trajectories of the given stores are rendered by the policy's own chat template. A stop rule may end training
at a given skill: it reads the probability of held-back demonstrations, never a held-out Task.

    python -m recipes.sft --data runs/harvest --policy tiny --epochs 3
"""

import itertools
import math
import random
import shutil
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import tyro

from actors.cluster import ClusterConfig, start_cluster
from actors.learner_group import LearnerGroup, LearnerGroupConfig, start_learner_group
from envs.renderer import load_renderer
from learners.config import LearnerConfig, LossConfig, LossKind
from learners.plan import SizedSample, plan_samples
from recipes.launch import launch
from recipes.policies import PolicyConfig, resolve_policy
from recipes.run import Run
from trajectories.samples import conversation_sample
from trajectories.store import StoreWriter, scan


@dataclass(frozen=True, kw_only=True)
class StopRule:
    """Ends SFT at a skill: judged on demonstrations of training tasks that are held back from training."""

    probability: float | None = None
    """Stop once the mean probability of a whole held-back demonstration reaches this; None never stops."""
    every_steps: int = 5
    """Steps between looks."""
    num_demonstrations: int = 256
    """Demonstrations that are held back."""

    def __post_init__(self) -> None:
        if self.probability is not None and not 0 < self.probability < 1:
            raise ValueError(f"stop.probability must be between 0 and 1, got {self.probability}")
        if self.every_steps < 1 or self.num_demonstrations < 1:
            raise ValueError(f"stop.every_steps and stop.num_demonstrations must be >= 1, got {self}")


@dataclass(frozen=True, kw_only=True)
class Config:
    """Fine-tune a policy on harvested Trajectories."""

    run: Path = Path("runs/sft")
    """Run directory; the trained policy goes to its model/."""
    data: tuple[Path, ...] = (Path("runs/harvest"),)
    """Run directories whose stores hold the Trajectories."""
    min_reward: float = 1.0
    """Train on Trajectories with at least this reward."""
    min_turns: int = 1
    """Train on Trajectories with at least so many Turns."""
    limit: int | None = None
    """Train on at most so many Trajectories."""
    epochs: float | None = 3.0
    """Passes over the data, unless a limit below ends training earlier; None for no such limit."""
    max_steps: int | None = None
    max_seconds: float | None = None
    """Training time, in seconds."""
    batch_size: int = 32
    """Trajectories of one optimizer step, over all ranks."""
    stop: StopRule = field(default_factory=StopRule)
    seed: int = 0
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    learner: LearnerConfig = field(default_factory=lambda: LearnerConfig(lr=5e-3, warmup_steps=20))
    learners: Annotated[LearnerGroupConfig, tyro.conf.arg(name="learner")] = field(default_factory=LearnerGroupConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    wandb: bool = False
    """Log to Weights & Biases too."""

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"batch_size must be >= 1, got {self.batch_size}")
        if self.epochs is not None and self.epochs <= 0:
            raise ValueError(f"epochs must be > 0, got {self.epochs}")
        if self.epochs is self.max_steps is self.max_seconds is self.stop.probability is None:
            raise ValueError("nothing ends this run: give --epochs, --max-steps, --max-seconds or --stop.probability")


async def main(config: Config) -> dict[str, Any]:
    """Fine-tunes and returns the summary that it wrote."""
    async with AsyncExitStack() as stack:
        run = stack.enter_context(Run.open(config.run, config, wandb=config.wandb))
        model = resolve_policy(config.policy.model)
        shutil.rmtree(run.directory / "samples", ignore_errors=True)  # of an earlier start, which this one repeats
        samples = render_demonstrations(config, model, run.directory / "samples")
        num_held_back = 0 if config.stop.probability is None else config.stop.num_demonstrations
        held_back, training = samples[:num_held_back], samples[num_held_back:]
        if not training:
            raise ValueError(
                f"{len(samples)} demonstrations pass the filters but {num_held_back} are held back "
                "for the stop rule; harvest more or lower --stop.num-demonstrations"
            )
        await stack.enter_async_context(start_cluster(config.cluster))
        learner = await stack.enter_async_context(
            start_learner_group(config.learners, config.learner, model=model, store=run.directory / "samples")
        )
        feed = _Feed(config, training)
        rule = _Rule(config, learner, held_back)
        reason = "epochs"
        began = time.monotonic()
        step = 0
        try:
            for step in run.steps(feed.num_steps):
                plan = plan_samples(feed.batch(), num_ranks=learner.num_shares, max_tokens=config.learner.max_tokens)
                metrics = await learner.forward_backward(plan, LossConfig(kind=LossKind.CROSS_ENTROPY))
                metrics |= await learner.optim_step()
                metrics["seconds"] = time.monotonic() - began
                if config.stop.probability is not None and (step + 1) % config.stop.every_steps == 0:
                    metrics |= await rule.look()
                run.log(step + 1, metrics)
                if rule.is_met(metrics):
                    reason = "stop rule"
                    break
                if config.max_seconds is not None and metrics["seconds"] >= config.max_seconds:
                    reason = "max_seconds"
                    break
        finally:
            await learner.save_pretrained(run.directory / "model")
        summary = {
            "steps": run.step,
            "seconds": time.monotonic() - began,
            "ended_by": reason,
            "num_demonstrations": len(training),
            "world_size": learner.world_size,
            "learner": learner.sharding,
        }
        run.summary(summary)
        print(f"trained {run.step} steps in {summary['seconds']:.0f} s, ended by {reason}; model in {config.run}/model")
        return summary


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstration:
    """A rendered Trajectory in the run's sample store."""

    sample: SizedSample
    family: str
    """Family of its Task; "" where tasks have none."""


def render_demonstrations(config: Config, model: Path, directory: Path) -> list[Demonstration]:
    """Renders the Trajectories that pass the filters into Samples under `directory`, shuffled by the seed."""
    renderer = load_renderer(model)
    kept = [
        trajectory
        for run in config.data
        for _, group in scan(run / "store")
        for trajectory in group.trajectories
        if trajectory.reward is not None
        and trajectory.reward >= config.min_reward
        and len(trajectory.turns) >= config.min_turns
    ]
    if not kept:
        stores = ", ".join(str(run / "store") for run in config.data)
        raise ValueError(f"no Trajectory in {stores} passes the filters; harvest first or lower --min-reward")
    random.Random(config.seed).shuffle(kept)
    demonstrations = []
    with StoreWriter(directory, "sft") as writer:
        for trajectory in kept[: config.limit]:
            sample = conversation_sample(*renderer.render_conversation(trajectory.messages()))
            sized = SizedSample(
                location=writer.append_sample(sample), num_tokens=len(sample.ids), num_trained=int(sample.mask.sum())
            )
            demonstrations.append(Demonstration(sample=sized, family=trajectory.provenance.get("family", "")))
    return demonstrations


class _Feed:
    """Batches from shuffled passes over the demonstrations."""

    def __init__(self, config: Config, training: Sequence[Demonstration]) -> None:
        shuffler = random.Random(config.seed)
        passes = (shuffler.sample(list(training), len(training)) for _ in itertools.count())
        self._flow = itertools.chain.from_iterable(passes)
        self._batch_size = config.batch_size
        limits = [config.max_steps] if config.max_steps else []
        if config.epochs is not None:
            limits.append(math.ceil(config.epochs * len(training) / config.batch_size))
        self.num_steps = min(limits, default=None)
        """Steps until the data or the limit ends; None for no end."""

    def batch(self) -> list[SizedSample]:
        """The next batch."""
        return [demonstration.sample for demonstration in itertools.islice(self._flow, self._batch_size)]


class _Rule:
    """The stop rule: the probability that the policy samples a held-back demonstration, whole."""

    def __init__(self, config: Config, learner: LearnerGroup, held_back: Sequence[Demonstration]) -> None:
        self._stop = config.stop
        self._learner = learner
        self._held_back = held_back
        self._plan = plan_samples(
            [demonstration.sample for demonstration in held_back],
            num_ranks=learner.num_shares,
            max_tokens=config.learner.max_tokens,
        )

    async def look(self) -> dict[str, float]:
        """Mean probability of a held-back demonstration, over all and by family."""
        logprobs = self._plan.in_given_order(await self._learner.sequence_logprobs(self._plan))
        by_family: dict[str, list[float]] = defaultdict(list)
        for demonstration, logprob in zip(self._held_back, logprobs, strict=True):
            by_family[demonstration.family].append(math.exp(logprob))
        return {"heldback/probability": fmean(map(math.exp, logprobs))} | {
            f"heldback/probability/{family}": fmean(values) for family, values in by_family.items()
        }

    def is_met(self, metrics: Mapping[str, float]) -> bool:
        """Whether these metrics hold a look that reached the skill."""
        skill = metrics.get("heldback/probability")
        return self._stop.probability is not None and skill is not None and skill >= self._stop.probability


if __name__ == "__main__":
    launch(Config, main)
