"""What rewards say: solved fractions, standard errors and intervals, over valid attempts only.

Invariant: an excluded attempt is in no sum. Called by evaluate and demo; the statistics themselves are SciPy's.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class SolvedRate:
    """The solved fraction of a set of Tasks."""

    solved: float
    """Mean over Tasks of the mean over valid attempts; NaN when no attempt is valid."""
    stderr: float
    """Standard error of `solved` over Tasks; attempts at one Task are not independent, so Tasks are the unit."""
    ci95: tuple[float, float]
    """95% interval: Wilson for one attempt a Task, otherwise normal over Task means, cut to [0, 1]."""
    num_tasks: int
    """Tasks with at least one valid attempt."""
    num_valid: int
    """Valid attempts."""
    num_attempts: int


def solved_rate(rewards_by_task: Mapping[str, Sequence[float | None]]) -> SolvedRate:
    """The solved fraction; an attempt is solved when its reward is >= 1, and None marks an excluded one.

    {"a": [1.0, 0.0], "b": [None, 1.0]} -> solved 0.75 over 2 Tasks and 3 valid attempts.
    """
    from scipy import stats  # here, because importing it takes over a second and every --help would pay

    valid = {task: [r >= 1 for r in rewards if r is not None] for task, rewards in rewards_by_task.items()}
    means = np.array([np.mean(solved) for solved in valid.values() if solved])
    num_valid = sum(len(solved) for solved in valid.values())
    num_attempts = sum(len(rewards) for rewards in rewards_by_task.values())
    if not len(means):
        nan = float("nan")
        return SolvedRate(solved=nan, stderr=nan, ci95=(nan, nan), num_tasks=0, num_valid=0, num_attempts=num_attempts)
    solved = float(means.mean())
    stderr = float(means.std(ddof=1) / np.sqrt(len(means))) if len(means) > 1 else float("nan")
    if num_valid == len(means):
        low, high = stats.binomtest(int(means.sum()), len(means)).proportion_ci(method="wilson")
    else:
        low, high = max(0.0, solved - 1.96 * stderr), min(1.0, solved + 1.96 * stderr)
    return SolvedRate(
        solved=solved,
        stderr=stderr,
        ci95=(float(low), float(high)),
        num_tasks=len(means),
        num_valid=num_valid,
        num_attempts=num_attempts,
    )


def paired_gain(
    before: Mapping[str, Sequence[float | None]], after: Mapping[str, Sequence[float | None]]
) -> tuple[float, tuple[float, float]]:
    """(mean of after - before, its 95% interval) over Tasks that are valid in both, paired by Task (Student's t)."""
    from scipy import stats

    pairs = [
        (np.mean([r >= 1 for r in first]), np.mean([r >= 1 for r in second]))
        for task in before.keys() & after.keys()
        if (first := [r for r in before[task] if r is not None])
        and (second := [r for r in after[task] if r is not None])
    ]
    if len(pairs) < 2:
        raise ValueError(f"a paired interval needs at least 2 Tasks valid in both evaluations, got {len(pairs)}")
    earlier, later = np.array(pairs).T
    interval = stats.ttest_rel(later, earlier).confidence_interval(0.95)
    return float((later - earlier).mean()), (float(interval.low), float(interval.high))
