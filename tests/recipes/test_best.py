"""The best checkpoint, over scores short enough to work out by hand."""

from recipes.best import best_version, scores_of

SCORES = {1: 0.2, 2: 0.4, 3: 0.9, 4: 0.1, 5: 0.6}


def test_the_best_version_has_the_best_mean_and_not_the_luckiest_step() -> None:
    assert best_version([2, 4], SCORES, window=2) == 4, "means 0.3 and 0.5"
    assert best_version([3, 4, 5], SCORES, window=2) == 3, "means 0.65, 0.5 and 0.35"
    assert best_version([3, 5], SCORES, window=3) == 5, "means 0.5 and 0.533"


def test_a_version_without_enough_scores_behind_it_is_not_judged() -> None:
    assert best_version([1, 2], SCORES, window=3) is None
    assert best_version([], SCORES, window=1) is None


def test_of_equals_the_later_one_is_best() -> None:
    assert best_version([1, 2], {1: 0.5, 2: 0.5}, window=1) == 2


def test_evaluations_score_the_version_they_were_pinned_to_and_go_before_rewards() -> None:
    rewards = [(1, {"reward_mean": 0.1}), (2, {"reward_mean": 0.2})]
    assert scores_of(rewards) == {1: 0.1, 2: 0.2}
    assert scores_of([*rewards, (9, {"reward_mean": 0.3, "eval/version": 7.0, "eval/solved": 0.4})]) == {7: 0.4}
