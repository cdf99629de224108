"""Alarms: what the metrics of a run look like when it goes wrong.

Invariant: functions of the metrics logged so far alone; a metric that a step lacks is skipped, and nothing is alarming
before there is as much history as a comparison needs. Called by recipes/rloo.py after each step.

Each alarm compares a trailing mean with a reference from the run itself, because no absolute number fits two policies.
The paper's 8B run is the reason for them: its reward peaked near step 35 and fell from about 0.51 to 0.13
(arXiv 2606.24855).
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

logger = logging.getLogger(__name__)

History = Sequence[Mapping[str, float]]
"""Metrics of each step, oldest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AlarmConfig:
    """When to be alarmed, and whether to stop."""

    window: int = 5
    """Steps of every mean."""
    reward_drop: float = 0.5
    """The reward's mean fell below this share of its best mean."""
    entropy_floor: float = 0.1
    """The entropy's mean fell below this share of its first mean: the policy no longer explores."""
    length_factor: float = 3.0
    """Sampled tokens of a rollout grew to this many times their first mean."""
    stop: bool = False
    """End the run, saved, at the first alarm."""

    def __post_init__(self) -> None:
        if self.window < 1:
            raise ValueError(f"window must be >= 1, got {self.window}")
        for name in ("reward_drop", "entropy_floor"):
            if not 0 < getattr(self, name) < 1:
                raise ValueError(f"{name} must be between 0 and 1, got {getattr(self, name)}")
        if self.length_factor <= 1:
            raise ValueError(f"length_factor must be > 1, got {self.length_factor}")


def raised_alarms(history: History, config: AlarmConfig) -> dict[str, str]:
    """Name of each alarm to one line that says why, logged too; empty while all is well."""
    rules = (
        ("reward_collapse", "reward_mean", max, config.reward_drop),
        ("entropy_collapse", "train/entropy", _first, config.entropy_floor),
        ("length_explosion", "trained_tokens_mean", _first, config.length_factor),
    )
    alarms: dict[str, str] = {}
    for name, metric, reference_of, factor in rules:
        means = trailing_means(history, metric, config.window)
        if len(means) < 2:
            continue
        reference, now = reference_of(means[:-1]), means[-1]
        limit = factor * reference
        if reference > 0 and (now < limit if factor < 1 else now > limit):
            alarms[name] = f"{metric} is {now:.4g} over {config.window} steps, against {reference:.4g} before"
    if history and history[-1].get("sync/probe_alarm"):  # judged at the sync, against the gap of the first one
        alarms["engine_learner_gap"] = f"engine and learner differ by {history[-1].get('sync/probe_gap', 0):.3g}"
    for name, why in alarms.items():
        logger.warning("alarm=%s: %s", name, why)
    return alarms


def trailing_means(history: History, metric: str, window: int) -> list[float]:
    """The mean of each `window` consecutive values: [1, 2, 3, 4], 2 -> [1.5, 2.5, 3.5]; [] with fewer values."""
    values = [step[metric] for step in history if metric in step]
    return [fmean(values[end - window : end]) for end in range(window, len(values) + 1)]


def _first(means: Sequence[float]) -> float:
    return means[0]
