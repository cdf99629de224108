"""Which checkpoint of a run was its best, by a trailing average of what each version scored.

Invariant: a pure function of the metrics logged so far. Called by recipes/rloo.py when a run ends.

A trailing average, because the best single step of a noisy run is its luckiest one; and not the last checkpoint, since
a run may collapse after its peak (arXiv 2606.24855 released step 45 of a run that did).
"""

from collections.abc import Collection, Mapping, Sequence
from statistics import fmean


def scores_of(history: Sequence[tuple[int, Mapping[str, float]]]) -> dict[int, float]:
    """Version to score, from (step, metrics) in order: what evaluations solved, or else the rewards of training."""
    evaluated = {
        int(metrics["eval/version"]): metrics["eval/solved"] for _, metrics in history if "eval/solved" in metrics
    }
    return evaluated or {step: metrics["reward_mean"] for step, metrics in history if "reward_mean" in metrics}


def best_version(saved: Collection[int], scores: Mapping[int, float], window: int) -> int | None:
    """The saved version with the highest mean of the last `window` scores up to it, the later one of equals.

    None when no saved version has so many scores behind it. Saved 2 and 4, scores {1: .2, 2: .4, 3: .9, 4: .1} over a
    window of 2: the means are 0.3 at 2 and 0.5 at 4, so the best is 4.
    """
    means: dict[int, float] = {}
    for version in saved:
        behind = [score for n, score in sorted(scores.items()) if n <= version][-window:]
        if len(behind) == window:
            means[version] = fmean(behind)
    return max(means, key=lambda version: (means[version], version), default=None)
