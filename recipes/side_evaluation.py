"""Evaluation beside training: a server of its own holds one version still while training and rollouts go on.

Invariant: every token of an evaluation was sampled by the one version that it names; at most one evaluation runs, and
training waits only while the version's weights are staged and loaded, never for a rollout.
Called by recipes/rloo_parts.py. Why a server of its own: docs/decisions/051.
"""

import asyncio
import dataclasses
import logging
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from actors.errors import ClusterError, LearnerLost
from actors.inference_config import InferencePoolConfig
from actors.inference_pool import start_inference_pool
from actors.rollout_pool import RolloutPoolConfig, start_rollout_pool
from actors.rollout_stream import GroupRequest
from actors.sync_config import SyncConfig
from actors.training_step import Publisher
from actors.weight_sync import WeightSource, WeightSync
from envs.build import EpisodeConfig
from envs.task import Task
from recipes.statistics import solved_rate
from trajectories.handle import GroupHandle
from trajectories.schema import PolicyVersion
from trajectories.validity import member_rewards

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class SideEvaluationConfig:
    """What is evaluated while training goes on, and how often."""

    every: int = 0
    """Steps between evaluations; 0 evaluates nothing and starts no server."""
    tasks: str = "shell:heldout"
    """Task set."""
    limit: int | None = 64
    """Only the first so many Tasks."""
    attempts: int = 1
    """Attempts at each Task."""
    max_rollouts: int = 64
    """Rollouts of an evaluation that may run at once, beside those of training."""
    num_servers: int = 1
    """Servers that hold the evaluated version, beside those of training."""

    def __post_init__(self) -> None:
        if self.every < 0 or self.attempts < 1 or self.max_rollouts < 1 or self.num_servers < 1:
            raise ValueError(
                "every must be >= 0 and attempts, max_rollouts and num_servers >= 1, got "
                f"{self.every}, {self.attempts}, {self.max_rollouts}, {self.num_servers}"
            )


class Players(Protocol):
    """Who plays Groups: a RolloutPool."""

    def play_all(self, requests: Iterator[GroupRequest], size: int) -> AsyncIterator[GroupHandle]:
        """Handles of all Groups, each as it finishes."""
        ...


class SideEvaluation:
    """Evaluations one after the other; made by `start_side_evaluation`."""

    def __init__(
        self, config: SideEvaluationConfig, tasks: Sequence[Task], weights: Publisher, rollouts: Players
    ) -> None:
        self._config = config
        self._tasks = tasks
        self._weights = weights
        self._rollouts = rollouts
        self._running: asyncio.Task[dict[str, float]] | None = None
        self.num_played = 0
        """Groups that were evaluated."""

    async def after_step(self, version: PolicyVersion) -> dict[str, float]:
        """What a finished evaluation found, and begins the next one when `version` is due.

        A due version is skipped, and says so, while the evaluation before it still runs. The learner must not train
        meanwhile: its weights of `version` are staged here.
        """
        metrics = self._collect()
        if version.n % self._config.every:
            return metrics
        if self._running is not None:
            logger.warning("version=%d is not evaluated: the evaluation before it still runs", version.n)
            return metrics | {"eval/skipped": 1.0}
        try:
            await self._weights.publish(version)
        except LearnerLost:
            raise
        except ClusterError as error:  # its server died; training has its own
            logger.warning("version=%d is not evaluated: %s", version.n, error)
            return metrics | {"eval/failed": 1.0}
        self._running = asyncio.create_task(self._evaluate(version))
        return metrics

    async def finish(self) -> dict[str, float]:
        """Waits for the evaluation that runs, which ends by its Groups' deadlines; {} when none does."""
        if self._running is not None:
            await asyncio.wait({self._running})
        return self._collect()

    async def cancel(self) -> None:
        """Ends the evaluation that runs; what it found is forgotten."""
        running, self._running = self._running, None
        if running is not None:
            running.cancel()
            await asyncio.wait({running})

    def _collect(self) -> dict[str, float]:
        if self._running is None or not self._running.done():
            return {}
        finished, self._running = self._running, None
        try:
            return finished.result()
        except ClusterError as error:  # its server or worker died; training has its own
            logger.warning("an evaluation failed: %s", error)
            return {"eval/failed": 1.0}

    async def _evaluate(self, version: PolicyVersion) -> dict[str, float]:
        requests = (
            GroupRequest(task=task, group_id=f"{task.id}@{version.lineage}-{version.n}") for task in self._tasks
        )
        handles: list[GroupHandle] = []
        async for handle in self._rollouts.play_all(requests, self._config.attempts):
            handles.append(handle)
            self.num_played += 1
        _require_pinned(handles, version)
        rate = await asyncio.to_thread(solved_rate, {handle.task_id: member_rewards(handle) for handle in handles})
        return {
            "eval/version": float(version.n),
            "eval/solved": rate.solved,
            "eval/stderr": rate.stderr,
            "eval/num_valid": float(rate.num_valid),
            "eval/num_attempts": float(rate.num_attempts),
        }


def _require_pinned(handles: Sequence[GroupHandle], version: PolicyVersion) -> None:
    """Raises RuntimeError when a token of another version is among them: a bug of the pinning."""
    for handle in handles:
        for member in handle.members:
            if {member.min_version, member.max_version} - {version, None}:
                raise RuntimeError(
                    f"trajectory {member.trajectory_id} was to be sampled at {version} but holds tokens of "
                    f"{member.min_version} to {member.max_version}"
                )


@asynccontextmanager
async def start_side_evaluation(
    config: SideEvaluationConfig,
    tasks: Sequence[Task],
    *,
    source: WeightSource,
    model: Path,
    pool: InferencePoolConfig,
    episode: EpisodeConfig,
    rollouts: RolloutPoolConfig,
    sync: SyncConfig,
    store: Path,
    prefix: str,
) -> AsyncIterator[SideEvaluation]:
    """Servers and a rollout worker for evaluations, for the length of the block."""
    async with start_inference_pool(
        dataclasses.replace(pool, num_servers=config.num_servers), model=model, version=None
    ) as servers:
        weights = WeightSync(source=source, target=servers, config=dataclasses.replace(sync, barrier=True))
        try:
            async with start_rollout_pool(
                dataclasses.replace(rollouts, num_workers=1, max_rollouts=config.max_rollouts),
                episode,
                store=store,
                prefix=prefix,
                model=model,
                sampler=servers.sampler(),
            ) as players:
                evaluation = SideEvaluation(config, tasks, weights, players)
                try:
                    yield evaluation
                finally:
                    await evaluation.cancel()
        finally:
            await weights.close()
