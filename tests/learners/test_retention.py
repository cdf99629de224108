"""Which checkpoints stay."""

from pathlib import Path

import pytest

from learners.checkpoint import COMPLETE
from learners.retention import MARKER, RetentionConfig, kept, order_of, retain


def test_the_last_the_periodic_and_the_best_stay() -> None:
    steps = [10, 20, 30, 40, 50]
    scores = {0: 0.9, 1: 0.2, 3: 0.9, 4: 0.1}
    assert kept(RetentionConfig(last=1, every=0, best=0), steps, scores) == {4}
    assert kept(RetentionConfig(last=2, every=20, best=0), steps, scores) == {1, 3, 4}
    assert kept(RetentionConfig(last=1, every=0, best=1), steps, scores) == {3, 4}  # the later of two equals
    assert kept(RetentionConfig(last=1, every=0, best=2), steps, scores) == {0, 3, 4}
    assert kept(RetentionConfig(last=9, every=0, best=9), steps, {}) == {0, 1, 2, 3, 4}


def make(root: Path, name: str) -> None:
    (root / name).mkdir()
    (root / name / MARKER).touch()


def test_removal_goes_by_lineage_then_step_and_leaves_unfinished_directories(tmp_path: Path) -> None:
    for name in ("0-000030", "1-000010", "1-000020"):
        make(tmp_path, name)
    (tmp_path / "1-000030.partial").mkdir()
    (tmp_path / "notes").mkdir()
    assert retain(RetentionConfig(last=1, best=0), tmp_path, {10: 0.5}) == ["0-000030", "1-000010"]
    assert {path.name for path in tmp_path.iterdir()} == {"1-000020", "1-000030.partial", "notes"}


def test_the_best_of_an_earlier_lineage_stays_until_a_better_one_comes(tmp_path: Path) -> None:
    config = RetentionConfig(last=1, best=1)
    removed = []
    scores: dict[int, float] = {}
    for name, score in (("0-000010", 0.7), ("0-000020", 0.1), ("1-000015", 0.2), ("1-000025", 0.8), ("1-000035", 0.3)):
        make(tmp_path, name)
        scores[order_of(name)[1]] = score
        removed.append(retain(config, tmp_path, scores))
    assert removed == [[], [], ["0-000020"], ["0-000010", "1-000015"], []]


def test_a_score_that_comes_later_counts_from_then_on(tmp_path: Path) -> None:
    config = RetentionConfig(last=1, best=1)
    for name in ("0-000010", "0-000020", "0-000030"):
        make(tmp_path, name)
    assert retain(config, tmp_path, {10: 0.9, 20: 0.8, 30: 0.7}) == ["0-000020"]  # rewards, before any evaluation
    make(tmp_path, "0-000040")
    assert retain(config, tmp_path, {10: 0.1, 30: 0.4}) == ["0-000010"]  # evaluations, the last not in yet


def test_nothing_to_retain_is_nothing_removed(tmp_path: Path) -> None:
    assert retain(RetentionConfig(), tmp_path, {1: 1.0}) == []


def test_the_marker_is_that_of_checkpoints() -> None:
    assert MARKER == COMPLETE


def test_keeping_none_is_refused() -> None:
    with pytest.raises(ValueError, match=r"retention\.last must be >= 1"):
        RetentionConfig(last=0)
