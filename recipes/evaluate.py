"""Evaluate: plays every Task a number of times and reports the solved fraction with its standard error.

The policy is served by vLLM, or nobody's: `--harness oracle` plays the reference solutions, `--harness nop` does
nothing. Every attempt ends in a typed Outcome; excluded ones are in no sum.

    python -m recipes.evaluate --tasks shell:heldout --policy runs/rloo/model --attempts 3
    python -m recipes.evaluate --tasks humaneval --harness oracle
    python -m recipes.evaluate --config harbor-job.yaml --policy smollm2

`--config` takes a Harbor job file (one agent, one set of tasks): what it says are the defaults of the other flags, and
the results are left as that job's directory too, for `harbor view` and `harbor traces export`.
"""

import dataclasses
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from actors.cluster import ClusterConfig, start_cluster
from actors.rollout_pool import RolloutPoolConfig
from envs.build import EpisodeConfig, PromptStyle
from envs.remote_sampler import Teacher
from envs.task import Task
from envs.tasksets import resolve_tasks
from recipes.export import harbor_job_of
from recipes.harbor_config import read_harbor_job
from recipes.launch import launch
from recipes.play import TEACHER_LIMITS, Served, play_tasks, player_of, serve
from recipes.policies import PolicyConfig
from recipes.run import Run, finished_summary
from recipes.statistics import solved_rate
from trajectories.handle import GroupHandle
from trajectories.harbor_job import write_harbor_job
from trajectories.metrics import exclusion_by_task
from trajectories.schema import DEFAULT_TREATMENTS
from trajectories.store import scan
from trajectories.validity import member_rewards


@dataclass(frozen=True, kw_only=True)
class Config:
    """Evaluate a policy on a set of Tasks."""

    run: Path = Path("runs/evaluate")
    """Run directory."""
    tasks: str = "shell:heldout"
    """Task set: shell:train, shell:heldout, humaneval, a directory of Harbor tasks, a .parquet of task packages,
    dataset.toml, or registry.json:NAME@VERSION."""
    limit: int | None = None
    """Play only the first so many Tasks."""
    attempts: int = 1
    """Attempts at each Task."""
    greedy: bool = False
    """Play each Task once more, greedily."""
    harbor_job: Path | None = None
    """Also leave the sampled attempts as a Harbor job directory here."""
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
    if (done := finished_summary(config.run, config, TEACHER_LIMITS)) is not None:
        print(f"{config.run} is finished: solved {done['solved']:.4f}; nothing to do")
        return done
    with Run.open(config.run, config, wandb=config.wandb, may_differ=TEACHER_LIMITS) as run:
        tasks = resolve_tasks(config.tasks, limit=config.limit)
        player = player_of(config.policy, config.episode, config.teacher)
        async with start_cluster(config.cluster), serve(player, config.policy.pool) as served:
            summary = await _evaluate(config, run, tasks, served, config.episode, attempts=config.attempts)
            if config.greedy:
                greedy = dataclasses.replace(config.episode.sampling, temperature=0.0)
                episode = dataclasses.replace(config.episode, sampling=greedy)
                summary["greedy"] = await _evaluate(config, run, tasks, served, episode, attempts=1)
        if config.harbor_job is not None:
            trajectories = (each for _, group in scan(config.run / "store") for each in group.trajectories)
            write_harbor_job(trajectories, config.harbor_job, harbor_job_of(config.run))
        run.summary(summary | {"finished": "budget_exceeded" not in summary})  # last: nothing is left to do then
        for name, part in (("sampled", summary), ("greedy", summary.get("greedy"))):
            if part:
                print(f"{config.run.name} {_line(name, part)}")
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
        what=f"{config.run.name}: {config.tasks}",
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
    """Solved fraction with standard error and interval, outcome counts, exclusions and rewards by Task."""
    rewards: Mapping[str, list[float | None]] = rewards_by_task(handles)
    outcomes = Counter(str(member.outcome) for handle in handles for member in handle.members)
    return dataclasses.asdict(solved_rate(rewards)) | {
        "outcomes": dict(outcomes),
        "excluded_by_task": exclusion_by_task(handles),
        "rewards": rewards,
    }


def config_of_harbor_job(path: Path) -> Config:
    """The evaluation that a Harbor job file describes; what it leaves open stays at our defaults."""
    job, default = read_harbor_job(path), Config()
    summary = dataclasses.replace(default.episode.summary, **_given({"below_tokens": job.summary_threshold}))
    sampling = {"temperature": job.temperature, "max_tokens": job.max_output_tokens}
    episode = {
        "harness": job.harness,
        "reply_format": job.reply_format,
        "summarize": job.summarize,
        "summary": summary,
        "max_turns": job.max_turns,
        "prompts": PromptStyle.FULL,
        "context_tokens": (job.max_input_tokens or 0) + (job.max_output_tokens or 0) or None,
        "timeout_multiplier": job.timeout_multiplier,
        "agent_timeout_s": job.agent_timeout_s,
        "max_agent_timeout_s": job.max_agent_timeout_s,
        "max_verifier_timeout_s": job.max_verifier_timeout_s,
        "sampling": dataclasses.replace(default.episode.sampling, **_given(sampling)),
    }
    return Config(
        run=Path("runs") / job.directory.name,
        tasks=job.tasks,
        limit=job.num_tasks,
        attempts=job.num_attempts,
        harbor_job=job.directory,
        policy=dataclasses.replace(default.policy, **_given({"model": job.model})),
        episode=dataclasses.replace(default.episode, **_given(episode)),
        rollouts=dataclasses.replace(default.rollouts, max_rollouts=job.num_concurrent),
    )


def _given(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


if __name__ == "__main__":
    launch(Config, main, from_file=config_of_harbor_job)
