"""Disk budgets over a directory of known sizes."""

from pathlib import Path
from typing import Any

import pytest

from recipes.disk import DiskConfig, disk_usage, over_budget


def test_usage_adds_up_files_by_part(tmp_path: Path) -> None:
    for name, size in (("store/a.seg", 3000), ("store/b.seg", 1000), ("checkpoints/0-1/weights", 500), ("log", 10)):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"x" * size)
    usage = disk_usage(tmp_path)
    assert usage["disk/store_gb"] == pytest.approx(4e-6)
    assert usage["disk/checkpoints_gb"] == pytest.approx(5e-7)
    assert usage["disk/eval_gb"] == 0
    assert usage["disk/run_gb"] == pytest.approx(4.51e-6)
    assert usage["disk/free_gb"] > 0


USAGE = {
    "disk/store_gb": 3.0,
    "disk/checkpoints_gb": 6.0,
    "disk/eval_gb": 0.5,
    "disk/run_gb": 10.0,
    "disk/free_gb": 4.0,
}


def test_a_run_within_its_budget_goes_on() -> None:
    assert over_budget(USAGE, DiskConfig()) is None
    assert over_budget(USAGE, DiskConfig(budget_gb=10.0, least_free_gb=4.0)) is None


def test_a_run_over_its_budget_is_told_what_takes_the_space() -> None:
    why = over_budget(USAGE, DiskConfig(budget_gb=9.0))
    assert why is not None and why.startswith("the run directory holds 10.00 GB (store 3.00, checkpoints 6.00")


def test_a_disk_that_runs_full_ends_the_run_before_it_is() -> None:
    why = over_budget(USAGE, DiskConfig(least_free_gb=5.0))
    assert why is not None and why.startswith("4.00 GB are free, under disk.least_free_gb=5")


def test_steps_to_keep_are_not_negative() -> None:
    with pytest.raises(ValueError, match="keep_steps must be >= 0, got -1"):
        DiskConfig(keep_steps=-1)


@pytest.mark.parametrize("wrong", [{"budget_gb": 0.0}, {"least_free_gb": -1.0}])
def test_a_budget_that_makes_no_sense_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="budget_gb must be > 0"):
        DiskConfig(**wrong)
