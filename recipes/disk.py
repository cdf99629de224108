"""Disk budgets: what a run's directory holds, and when the run must end before the disk does.

Invariant: a run that is over its budget ends saved, with one line that names what takes the space; nothing is deleted
here: checkpoints go by learners/retention.py, trajectories by trajectories/segments.py. Called by recipes/rloo.py after
each step.
"""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

GB = 1e9
PARTS = ("store", "checkpoints", "eval")


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskConfig:
    """How much disk a run may take."""

    budget_gb: float | None = None
    """The run ends, saved, when its directory holds more; None sets no limit."""
    keep_steps: int | None = None
    """Trajectories that were trained on so many steps before the last checkpoint may go, a full segment of the store at
    a time (rollouts.segment-mb); the ledger keeps what became of them. None keeps all."""
    least_free_gb: float = 0.5
    """The run ends, saved, when less than this is free on its disk: room for the last checkpoint."""

    def __post_init__(self) -> None:
        if (self.budget_gb is not None and self.budget_gb <= 0) or self.least_free_gb < 0:
            raise ValueError(
                f"budget_gb must be > 0 and least_free_gb >= 0, got {self.budget_gb} and {self.least_free_gb}"
            )
        if self.keep_steps is not None and self.keep_steps < 0:
            raise ValueError(f"keep_steps must be >= 0, got {self.keep_steps}")


def disk_usage(directory: Path) -> dict[str, float]:
    """GB of each part of a run directory, of all of it, and free on its disk."""
    sizes = {part: _bytes_below(directory / part) / GB for part in PARTS}
    return {
        **{f"disk/{part}_gb": size for part, size in sizes.items()},
        "disk/run_gb": _bytes_below(directory) / GB,
        "disk/free_gb": shutil.disk_usage(directory).free / GB,
    }


def over_budget(usage: Mapping[str, float], config: DiskConfig) -> str | None:
    """Why the run must end, and what helps; None while there is room."""
    held = ", ".join(f"{part} {usage[f'disk/{part}_gb']:.2f}" for part in PARTS)
    if config.budget_gb is not None and usage["disk/run_gb"] > config.budget_gb:
        return (
            f"the run directory holds {usage['disk/run_gb']:.2f} GB ({held}), over "
            f"disk.budget_gb={config.budget_gb:g}: keep fewer checkpoints (--retention.last) or "
            "trajectories (--disk.keep-steps), or raise the budget"
        )
    if usage["disk/free_gb"] < config.least_free_gb:
        return (
            f"{usage['disk/free_gb']:.2f} GB are free, under disk.least_free_gb={config.least_free_gb:g}, and the run "
            f"holds {usage['disk/run_gb']:.2f} ({held}): free some"
        )
    return None


def _bytes_below(directory: Path) -> int:
    """Bytes of all files below; a file that goes away meanwhile counts for nothing."""
    total = 0
    for path in directory.rglob("*"):
        try:
            total += path.lstat().st_size if not path.is_dir() else 0
        except FileNotFoundError:
            continue
    return total
