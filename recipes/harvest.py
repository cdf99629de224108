"""Harvest: a teacher plays Tasks in sandboxes, and every Trajectory is kept.

The teacher is the oracle (it plays the reference solutions), any policy that vLLM serves, or any OpenAI-compatible
endpoint, within a budget. A harvest that was stopped goes on where it was: a Group that is already in the store is not
played again.

    python -m recipes.harvest --tasks shell:train --limit 1000 --harness oracle
    python -m recipes.harvest --tasks shell:train --harness terminus-2 --policy runs/rloo/model --attempts 4
    python -m recipes.harvest --harness terminus-2 --episode.prompts full --teacher.base-url https://HOST/v1 \
        --teacher.model NAME --teacher.api-key-env NAME_OF_VARIABLE --teacher.max-tokens 5000000
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from actors.cluster import ClusterConfig, start_cluster
from actors.rollout_pool import RolloutPoolConfig
from envs.build import EpisodeConfig, HarnessName
from envs.remote_sampler import Teacher
from envs.tasksets import resolve_tasks
from recipes.launch import launch
from recipes.play import TEACHER_LIMITS, play_tasks, player_of, serve
from recipes.policies import PolicyConfig
from recipes.run import Run, finished_summary
from trajectories.metrics import summarize_groups
from trajectories.schema import DEFAULT_TREATMENTS


@dataclass(frozen=True, kw_only=True)
class Config:
    """Harvest a teacher's Trajectories."""

    run: Path = Path("runs/harvest")
    """Run directory; the Trajectories go to its store/."""
    tasks: str = "shell:train"
    """Task set: shell:train, shell:heldout, humaneval, or a directory of Harbor tasks."""
    limit: int | None = None
    """Play only the first so many Tasks."""
    attempts: int = 1
    """Trajectories of each Task."""
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    episode: EpisodeConfig = field(default_factory=lambda: EpisodeConfig(harness=HarnessName.ORACLE))
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
    """Harvests and returns the summary that it wrote."""
    if (done := finished_summary(config.run, config, TEACHER_LIMITS)) is not None:
        print(f"{config.run} is finished: {done['harvested']} trajectories; nothing to do")
        return done
    with Run.open(config.run, config, wandb=config.wandb, may_differ=TEACHER_LIMITS) as run:
        tasks = resolve_tasks(config.tasks, limit=config.limit)
        player = player_of(config.policy, config.episode, config.teacher)
        async with start_cluster(config.cluster), serve(player, config.policy.pool) as served:
            handles, facts = await play_tasks(
                run,
                tasks,
                attempts=config.attempts,
                served=served,
                episode=config.episode,
                rollouts=config.rollouts,
                store=config.run / "store",
                what="harvesting",
            )
        summary = summarize_groups(handles, DEFAULT_TREATMENTS) | facts | {"harvested": _num_trajectories(handles)}
        run.summary(summary | {"finished": "budget_exceeded" not in summary})
        print(f"harvested {summary['harvested']} trajectories of {len(handles)} tasks to {config.run / 'store'}")
        return summary


def _num_trajectories(handles: list[Any]) -> int:
    return sum(len(handle.members) for handle in handles)


if __name__ == "__main__":
    launch(Config, main)
