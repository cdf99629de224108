"""Which checkpoint of a run was its best, by a trailing average of what each version scored.

Invariant: the choice follows from the metrics logged so far alone. Called by recipes/rloo.py when a run ends.

A trailing average, because the best single step of a noisy run is its luckiest one; and not the last checkpoint, since
a run may collapse after its peak (arXiv 2606.24855 released step 45 of a run that did).
"""

import shutil
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Protocol


class Checkpoints(Protocol):
    """Who loads and saves weights: a learner group."""

    async def load(self, directory: Path) -> None:
        """Restores a complete checkpoint."""
        ...

    async def save_pretrained(self, directory: Path) -> None:
        """Writes a Hugging Face directory."""
        ...


async def save_best(
    directory: Path,
    learner: Checkpoints,
    current: int,
    history: Sequence[tuple[int, Mapping[str, float]]],
    *,
    window: int,
) -> int | None:
    """The best saved version of the run in `directory`; None when no checkpoint has `window` scores behind it.

    Its model goes to best/, unless it is the `current` one, which model/ holds already. The learner then holds that
    version too, so nothing may be trained afterwards.
    """
    found = sorted((directory / "checkpoints").glob("[0-9]*-[0-9]*[0-9]"))  # lineage-version, the later lineage wins
    saved = {int(path.name.partition("-")[2]): path for path in found}
    best = best_version(saved, scores_of(history), window)
    shutil.rmtree(directory / "best", ignore_errors=True)  # of a run that went on from there
    if best is not None and best != current:
        await learner.load(saved[best])
        await learner.save_pretrained(directory / "best")
    return best


def scores_of(history: Sequence[tuple[int, Mapping[str, float]]]) -> dict[int, float]:
    """Version to score, from (step, metrics) in order: what evaluations solved, or else the rewards of training."""
    evaluated = {
        int(metrics["eval/version"]): metrics["eval/solved"] for _, metrics in history if "eval/solved" in metrics
    }
    return evaluated or {step: metrics["reward_mean"] for step, metrics in history if "reward_mean" in metrics}


def trailing_scores(versions: Iterable[int], scores: Mapping[int, float], window: int) -> dict[int, float]:
    """The mean of the last `window` scores up to each of `versions` that has so many behind it.

    Versions 2 and 4, scores {1: .2, 2: .4, 3: .9, 4: .1} over a window of 2 -> {2: 0.3, 4: 0.5}
    """
    means: dict[int, float] = {}
    for version in versions:
        behind = [score for n, score in sorted(scores.items()) if n <= version][-window:]
        if len(behind) == window:
            means[version] = fmean(behind)
    return means


def best_version(saved: Collection[int], scores: Mapping[int, float], window: int) -> int | None:
    """The saved version with the highest trailing mean, the later one of equals; None when none has one."""
    means = trailing_scores(saved, scores, window)
    return max(means, key=lambda version: (means[version], version), default=None)
