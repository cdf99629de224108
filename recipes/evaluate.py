"""Evaluate: plays every Task a number of times and reports the solved fraction with its standard error.

The policy is served by vLLM, or nobody's: `--harness oracle` plays the reference solutions, `--harness nop` does
nothing. Every attempt ends in a typed Outcome; excluded ones are in no sum.

    python -m recipes.evaluate --tasks shell:heldout --policy runs/rloo/model --attempts 3
    python -m recipes.evaluate --tasks humaneval --harness oracle
"""

import dataclasses
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from actors.cluster import ClusterConfig, start_cluster
from actors.rollout_pool import RolloutPoolConfig
from envs.build import EpisodeConfig
from envs.remote_sampler import Teacher
from envs.task import Task
from envs.tasksets import resolve_tasks
from recipes.launch import launch
from recipes.play import TEACHER_LIMITS, Served, play_tasks, player_of, serve
from recipes.policies import PolicyConfig
from recipes.run import Run
from recipes.statistics import solved_rate
from trajectories.handle import GroupHandle
from trajectories.schema import DEFAULT_TREATMENTS
from trajectories.validity import member_rewards


@dataclass(frozen=True, kw_only=True)
class Config:
    """Evaluate a policy on a set of Tasks."""

    run: Path = Path("runs/evaluate")
    """Run directory."""
    tasks: str = "shell:heldout"
    """Task set: shell:train, shell:heldout, humaneval, or a directory of Harbor tasks."""
    limit: int | None = None
    """Play only the first so many Tasks."""
    attempts: int = 1
    """Attempts at each Task."""
    greedy: bool = False
    """Play each Task once more, greedily."""
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    episode: EpisodeConfig = field(default_factory=EpisodeConfig)
    teacher: Teacher = field(default_factory=Teacher)
    """An OpenAI-compatible endpoint that plays instead of the policy, through harness terminus-2."""
    rollouts: RolloutPoolConfig = field(default_factory=RolloutPoolConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    wandb: bool = False
    """Log to Weights & Biases too."""

    def __post_init__(self) -> None:
        if self.attempts < 1:
            raise ValueError(f"attempts must be >= 1, got {self.attempts}")


async def main(config: Config) -> dict[str, Any]:
    """Evaluates and returns the summary that it wrote."""
    with Run.open(config.run, config, wandb=config.wandb, may_differ=TEACHER_LIMITS) as run:
        tasks = resolve_tasks(config.tasks, limit=config.limit)
        player = player_of(config.policy, config.episode, config.teacher)
        async with start_cluster(config.cluster), serve(player, config.policy.pool) as served:
            summary = await _evaluate(config, run, tasks, served, config.episode, attempts=config.attempts)
            if config.greedy:
                greedy = dataclasses.replace(config.episode.sampling, temperature=0.0)
                episode = dataclasses.replace(config.episode, sampling=greedy)
                summary["greedy"] = await _evaluate(config, run, tasks, served, episode, attempts=1)
        run.summary(summary)
        for name, part in (("sampled", summary), ("greedy", summary.get("greedy"))):
            if part:
                print(_line(name, part))
        return summary


async def _evaluate(
    config: Config, run: Run, tasks: list[Task], served: Served, episode: EpisodeConfig, *, attempts: int
) -> dict[str, Any]:
    name = "greedy" if episode.sampling.temperature == 0 else "store"
    handles, facts = await play_tasks(
        run,
        tasks,
        attempts=attempts,
        served=served,
        episode=episode,
        rollouts=config.rollouts,
        store=config.run / name,
        what=f"evaluating {config.tasks}",
    )
    return summarize_evaluation(handles) | facts


def _line(name: str, summary: dict[str, Any]) -> str:
    low, high = summary["ci95"]
    outcomes = ", ".join(f"{outcome} {count}" for outcome, count in sorted(summary["outcomes"].items()))
    return (
        f"{name}: solved {summary['solved']:.4f} (standard error {summary['stderr']:.4f}, 95% {low:.4f} to {high:.4f}),"
        f" valid n {summary['num_valid']} of {summary['num_attempts']} attempts at {summary['num_tasks']} tasks;"
        f" outcomes: {outcomes}"
    )


def rewards_by_task(handles: list[GroupHandle]) -> dict[str, list[float | None]]:
    """Each Task's rewards, None for an excluded attempt."""
    return {handle.task_id: member_rewards(handle, DEFAULT_TREATMENTS) for handle in handles}


def summarize_evaluation(handles: list[GroupHandle]) -> dict[str, Any]:
    """Solved fraction with standard error and interval, outcome counts and every Task's rewards."""
    rewards: Mapping[str, list[float | None]] = rewards_by_task(handles)
    outcomes = Counter(str(member.outcome) for handle in handles for member in handle.members)
    return dataclasses.asdict(solved_rate(rewards)) | {"outcomes": dict(outcomes), "rewards": rewards}


if __name__ == "__main__":
    launch(Config, main)
