"""A learner group without Ray: one Learner in this process, behind the verbs that SFT asks for."""

from collections.abc import Callable
from pathlib import Path

from actors.errors import CheckpointFailed
from learners.checkpoint import CheckpointError
from learners.config import LearnerConfig, LossConfig
from learners.learner import Learner
from learners.plan import BatchPlan


class InProcessLearnerGroup:
    """Keeps `actors.learner_group.LearnerGroup`'s contract on one rank; `before_step` sees each step's number first."""

    def __init__(
        self, config: LearnerConfig, *, model: Path, store: Path, before_step: Callable[[int], None] = lambda _: None
    ) -> None:
        self.learner = Learner(config, model=model)
        self._store = store
        self._before_step = before_step

    async def forward_backward(self, plan: BatchPlan, loss: LossConfig) -> dict[str, float]:
        self._before_step(self.learner.step + 1)
        return self.learner.forward_backward(plan.ranks[0], loss, self._store)

    async def optim_step(self) -> dict[str, float]:
        return self.learner.optim_step()

    async def sequence_logprobs(self, plan: BatchPlan) -> list[float]:
        return self.learner.sequence_logprobs(plan.ranks[0], self._store)

    async def begin_save(self, directory: Path) -> None:
        self.learner.begin_save(directory)

    async def is_saved(self) -> bool:
        if self.learner.is_saved():
            await self.finish_save()
            return True
        return False

    async def finish_save(self) -> None:
        try:
            self.learner.finish_save()
        except CheckpointError as error:
            raise CheckpointFailed(str(error)) from error

    async def load(self, directory: Path) -> None:
        self.learner.load(directory)
