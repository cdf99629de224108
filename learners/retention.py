"""Which checkpoints stay on disk.

Invariant: the latest checkpoint is never removed, and one that is removed is gone as a whole before its files are.
Called by recipes/rloo.py after a checkpoint is complete. No torch.
"""

import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

MARKER = "COMPLETE"
"""The file that makes a directory a checkpoint; learners/checkpoint.py writes it last."""
_NAME = re.compile(r"\d+-\d+")


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionConfig:
    """What is kept; a checkpoint stays if any of these names it."""

    last: int = 2
    """So many of the latest."""
    every: int = 0
    """Those whose step divides by this; 0 names none."""
    best: int = 1
    """So many of the highest score, later ones first among equals; those without a score are never best."""

    def __post_init__(self) -> None:
        if self.last < 1:
            raise ValueError(f"retention.last must be >= 1 (the latest is what a run goes on from), got {self.last}")
        if self.every < 0 or self.best < 0:
            raise ValueError(f"retention.every and retention.best must be >= 0, got {self.every} and {self.best}")


def kept(config: RetentionConfig, steps: Sequence[int], scores: Mapping[int, float]) -> set[int]:
    """The positions in `steps` (oldest checkpoint first) that stay; `scores` by position.

    last 1, every 20, best 1, steps [10, 20, 30, 40], scores {0: 0.9, 3: 0.5} -> {0, 1, 3}
    """
    latest = range(max(0, len(steps) - config.last), len(steps))
    periodic = (index for index, step in enumerate(steps) if config.every and step % config.every == 0)
    ranked = sorted(scores, key=lambda index: (scores[index], index), reverse=True)
    return {*latest, *periodic, *ranked[: config.best]}


def retain(config: RetentionConfig, root: Path, scores: Mapping[int, float]) -> list[str]:
    """Names of the checkpoints under `root` that need not stay and were removed; `scores` by step.

    Checkpoints are directories named `lineage-step` ("0-000020"), in which order they were written. Directories
    without a completion marker (being written, or not ours) are left alone.
    """
    names = _complete(root)
    steps = [order_of(name)[1] for name in names]
    scored = {index: scores[step] for index, step in enumerate(steps) if step in scores}
    stay = kept(config, steps, scored)
    removed = [name for index, name in enumerate(names) if index not in stay]
    for name in removed:
        doomed = root / f"{name}.old"
        (root / name).rename(doomed)
        shutil.rmtree(doomed)
    return removed


def saved_steps(root: Path) -> list[int]:
    """Steps of the complete checkpoints under `root`, in the order in which they were written."""
    return [order_of(name)[1] for name in _complete(root)]


def _complete(root: Path) -> list[str]:
    complete = (path.name for path in root.iterdir() if is_checkpoint(path.name) and (path / MARKER).is_file())
    return sorted(complete, key=order_of)


def is_checkpoint(name: str) -> bool:
    """Whether a directory's name is a checkpoint's: "0-000020", but neither "0-000020.old" nor "0-000020-copy"."""
    return _NAME.fullmatch(name) is not None


def order_of(name: str) -> tuple[int, int]:
    """(lineage, step) of a checkpoint, the later one the greater: "0-000020" -> (0, 20)."""
    lineage, _, step = name.partition("-")
    return int(lineage), int(step)
