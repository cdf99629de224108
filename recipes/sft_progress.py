"""Where an SFT stands, and the checkpoint that it goes on from.

Invariant: a run has one checkpoint, and state.json points at it only while it is whole; another may be being written.
Called by recipes/sft.py.
"""

import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

from learners.config import LossConfig
from learners.plan import BatchPlan
from recipes.checkpoints import Checkpoints, SavingLearner, sweep
from recipes.run import Run


class SftLearner(SavingLearner, Protocol):
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
    checkpoints = run.directory / "checkpoints"
    sweep(checkpoints, keep=lambda name: state is not None and name == _name(state["step"]))
    if state is None:
        return Progress()
    await learner.load(checkpoints / _name(state["step"]))
    run.step = state["step"]
    return Progress(**state)


async def begin_save(checkpoints: Checkpoints, progress: Progress) -> None:
    """Begins a checkpoint, unless there is one of this step; the one before is removed when the run goes on from it."""
    await checkpoints.finish()
    before = checkpoints.newest_state
    if before is not None and before["step"] == progress.step:
        return

    def then() -> None:
        if before is not None:
            shutil.rmtree(checkpoints.directory / _name(before["step"]), ignore_errors=True)

    await checkpoints.begin(_name(progress.step), asdict(progress), then)


async def save(run: Run, checkpoints: Checkpoints, progress: Progress) -> None:
    """Returns when the run goes on from where it stands."""
    await begin_save(checkpoints, progress)
    await checkpoints.finish()
    run.save_state(asdict(progress))  # why it ended may be new, of a step that has its checkpoint


def _name(step: int) -> str:
    return f"{step:06d}"
