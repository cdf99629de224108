"""The best checkpoint, over scores short enough to work out by hand."""

from pathlib import Path

import pytest

from learners.retention import MARKER, RetentionConfig, retain
from recipes.best import best_version, save_best, scores_of, trailing_scores

SCORES = {1: 0.2, 2: 0.4, 3: 0.9, 4: 0.1, 5: 0.6}


def test_the_best_version_has_the_best_mean_and_not_the_luckiest_step() -> None:
    assert best_version([2, 4], SCORES, window=2) == 4, "means 0.3 and 0.5"
    assert best_version([3, 4, 5], SCORES, window=2) == 3, "means 0.65, 0.5 and 0.35"
    assert best_version([3, 5], SCORES, window=3) == 5, "means 0.5 and 0.533"


def test_trailing_scores_by_hand() -> None:
    assert trailing_scores([2, 4], SCORES, window=2) == pytest.approx({2: 0.3, 4: 0.5})
    assert trailing_scores([1, 3], SCORES, window=3) == pytest.approx({3: 0.5})


def test_a_version_without_enough_scores_behind_it_is_not_judged() -> None:
    assert best_version([1, 2], SCORES, window=3) is None
    assert best_version([], SCORES, window=1) is None


def test_of_equals_the_later_one_is_best() -> None:
    assert best_version([1, 2], {1: 0.5, 2: 0.5}, window=1) == 2


def test_evaluations_score_the_version_they_were_pinned_to_and_go_before_rewards() -> None:
    rewards = [(1, {"reward_mean": 0.1}), (2, {"reward_mean": 0.2})]
    assert scores_of(rewards) == {1: 0.1, 2: 0.2}
    assert scores_of([*rewards, (9, {"reward_mean": 0.3, "eval/version": 7.0, "eval/solved": 0.4})]) == {7: 0.4}


class FakeLearner:
    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []

    async def load(self, directory: Path) -> None:
        self.calls.append(("load", directory.name))

    async def save_pretrained(self, directory: Path) -> None:
        self.calls.append(("save", directory.name))


async def test_the_best_checkpoint_s_model_is_saved_beside_the_last_one(tmp_path: Path) -> None:
    for name in ("0-000002", "0-000004", "1-000004", "0-000002.partial"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    history = [(n, {"reward_mean": score}) for n, score in SCORES.items()]
    learner = FakeLearner()
    assert await save_best(tmp_path, learner, 5, history, window=2) == 4
    assert learner.calls == [("load", "1-000004"), ("save", "best")], "of the later lineage"


async def test_the_last_version_is_not_saved_twice(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "0-000004").mkdir(parents=True)
    learner = FakeLearner()
    history = [(n, {"reward_mean": score}) for n, score in SCORES.items()]
    assert await save_best(tmp_path, learner, 4, history, window=2) == 4
    assert learner.calls == []


@pytest.mark.parametrize("num_late", [0, 1, 3])
def test_the_best_of_all_checkpoints_is_among_those_that_stay(tmp_path: Path, num_late: int) -> None:
    """Rewards are high from the start, evaluations come in late, and the policy collapses after version 9."""
    evaluated = {n: 0.4 - 0.04 * abs(n - 9) for n in range(1, 21)}
    history: list[tuple[int, dict[str, float]]] = []
    for n in range(1, 21):
        metrics = {"reward_mean": 0.9 + n / 1000}
        if (version := n - num_late) >= 1:
            metrics |= {"eval/version": float(version), "eval/solved": evaluated[version]}
        history.append((n, metrics))
        (tmp_path / f"0-{n:06d}").mkdir()
        (tmp_path / f"0-{n:06d}" / MARKER).touch()
        retain(
            RetentionConfig(last=4), tmp_path, trailing_scores((v for v, _ in history), scores_of(history), window=3)
        )
    left = [int(path.name[2:]) for path in tmp_path.iterdir()]
    scores = scores_of(history)
    assert len(left) == 5
    assert best_version(left, scores, window=3) == best_version(range(1, 21), scores, window=3) == 10
