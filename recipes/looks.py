"""Looks: what SFT measures, now and then, on demonstrations that are held back from training.

Invariant: a look changes nothing, and never sees a held-out Task. Called by recipes/sft.py.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

from learners.plan import BatchPlan, SizedSample
from recipes.demonstrations import Demonstration
from recipes.sft_progress import SftLearner


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

    @property
    def num_held_back(self) -> int:
        """None are when nothing is looked at."""
        return 0 if self.probability is None else self.num_demonstrations


@dataclass(frozen=True, kw_only=True)
class Validation:
    """The loss on demonstrations that are held back from training."""

    num_demonstrations: int = 0
    """Demonstrations that are held back; 0 looks at none."""
    every_steps: int = 50
    """Steps between looks."""

    def __post_init__(self) -> None:
        if self.num_demonstrations < 0 or self.every_steps < 1:
            raise ValueError(f"validation.num_demonstrations must be >= 0 and validation.every_steps >= 1, got {self}")


Plan = Callable[[Sequence[SizedSample]], BatchPlan]
"""Lays Samples over the learner's ranks."""


class Looks:
    """The looks of one run."""

    def __init__(
        self,
        stop: StopRule,
        validation: Validation,
        demonstrations: Sequence[Demonstration],
        learner: SftLearner,
        plan: Plan,
    ) -> None:
        """The first of `demonstrations` are held back for the stop rule, the next for validation."""
        self._stop = stop
        self._validation = validation
        self._learner = learner
        self._judged = demonstrations[: stop.num_held_back]
        self._validated = demonstrations[stop.num_held_back :][: validation.num_demonstrations]
        self._judged_plan = plan([demonstration.sample for demonstration in self._judged])
        self._validated_plan = plan([demonstration.sample for demonstration in self._validated])

    async def after(self, step: int) -> dict[str, float]:
        """The metrics of the looks that are due after so many optimizer steps."""
        metrics: dict[str, float] = {}
        if self._judged and step % self._stop.every_steps == 0:
            metrics |= await self._skill()
        if self._validated and step % self._validation.every_steps == 0:
            metrics |= await self._loss()
        return metrics

    def ends(self, metrics: dict[str, float]) -> bool:
        """Whether these metrics hold a look that reached the stop rule's skill."""
        skill = metrics.get("heldback/probability")
        return self._stop.probability is not None and skill is not None and skill >= self._stop.probability

    async def _skill(self) -> dict[str, float]:
        """Mean probability that the policy samples a held-back demonstration, whole; over all and by family."""
        logprobs = self._judged_plan.in_given_order(await self._learner.sequence_logprobs(self._judged_plan))
        by_family: dict[str, list[float]] = defaultdict(list)
        for demonstration, logprob in zip(self._judged, logprobs, strict=True):
            by_family[demonstration.family].append(math.exp(logprob))
        return {"heldback/probability": fmean(map(math.exp, logprobs))} | {
            f"heldback/probability/{family}": fmean(values) for family, values in by_family.items()
        }

    async def _loss(self) -> dict[str, float]:
        """Cross-entropy in nats a trained token, the mean over all of them."""
        logprobs = await self._learner.sequence_logprobs(self._validated_plan)
        return {"validation/loss": -math.fsum(logprobs) / self._validated_plan.num_tokens}
