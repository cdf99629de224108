"""Where an SFT stands, and the checkpoint that it goes on from.

Invariant: a run has one checkpoint, and state.json points at it only while it is whole. Called by recipes/sft.py.
"""

import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

from learners.config import LossConfig
from learners.plan import BatchPlan
from recipes.run import Run


class SftLearner(Protocol):
    """What SFT asks of a learner group."""

    async def forward_backward(self, plan: BatchPlan, loss: LossConfig) -> dict[str, float]:
        """Adds gradients; returns metrics."""
        ...

    async def optim_step(self) -> dict[str, float]:
        """One optimizer step; returns metrics."""
        ...

    async def sequence_logprobs(self, plan: BatchPlan) -> list[float]:
        """Summed log-probability of each planned Sample's trained tokens, rank by rank."""
        ...

    async def save(self, directory: Path) -> None:
        """Writes a complete checkpoint."""
        ...

    async def load(self, directory: Path) -> None:
        """Restores a complete checkpoint."""
        ...


@dataclass
class Progress:
    """Where a run stands. The step is the position in the schedule and, times the batch size, in the data."""

    step: int = 0
    """Optimizer steps behind the weights."""
    seconds: float = 0.0
    """Training time over all starts."""
    ended_by: str | None = None
    """Why training ended; None before that."""


async def restore(run: Run, learner: SftLearner) -> Progress:
    """Loads the checkpoint of an earlier start; the beginning where there is none."""
    state = run.load_state()
    if state is None:
        return Progress()
    await learner.load(_checkpoint(run, state["step"]))
    run.step = state["step"]
    return Progress(**state)


async def save(run: Run, learner: SftLearner, progress: Progress) -> None:
    """Writes a checkpoint, points the run at it and removes the one before; one of this step is kept."""
    before = run.load_state()
    if before is None or before["step"] != progress.step:
        await learner.save(_checkpoint(run, progress.step))
    run.save_state(asdict(progress))
    if before is not None and before["step"] != progress.step:
        shutil.rmtree(_checkpoint(run, before["step"]), ignore_errors=True)


def _checkpoint(run: Run, step: int) -> Path:
    return run.directory / "checkpoints" / f"{step:06d}"
