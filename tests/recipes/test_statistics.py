import math

import pytest

from recipes.statistics import paired_gain, solved_rate


def test_solved_rate_is_the_mean_over_tasks_of_valid_attempts() -> None:
    rate = solved_rate({"a": [1.0, 0.0], "b": [None, 1.0], "c": [None, None]})
    assert rate.solved == 0.75
    assert (rate.num_tasks, rate.num_valid, rate.num_attempts) == (2, 3, 6)
    assert rate.stderr == pytest.approx(0.25)  # means 0.5 and 1: deviation 0.3536 over sqrt(2)


def test_one_attempt_each_has_wilsons_interval() -> None:
    rate = solved_rate({f"t{k}": [float(k < 5)] for k in range(10)})
    # Wilson, n = 10, p = 0.5, z = 1.96: centre (p + z^2/2n) / (1 + z^2/n) = 0.5, half width 0.2634
    assert rate.ci95 == pytest.approx((0.2366, 0.7634), abs=1e-4)


def test_nothing_valid_is_no_rate() -> None:
    rate = solved_rate({"a": [None]})
    assert math.isnan(rate.solved) and rate.num_valid == 0


def test_partial_rewards_are_not_solved() -> None:
    assert solved_rate({"a": [0.9], "b": [1.0]}).solved == 0.5


def test_a_gain_is_paired_by_task() -> None:
    before = {"a": [0.0], "b": [0.0], "c": [1.0], "d": [1.0], "only-before": [1.0]}
    after = {"a": [1.0], "b": [0.0], "c": [1.0], "d": [1.0], "e": [None]}
    gain, (low, high) = paired_gain(before, after)
    assert gain == 0.25
    # differences 1, 0, 0, 0: standard error 0.25, t(3) = 3.182
    assert (low, high) == pytest.approx((0.25 - 3.182 * 0.25, 0.25 + 3.182 * 0.25), abs=1e-3)


def test_a_gain_needs_two_tasks() -> None:
    with pytest.raises(ValueError, match="at least 2 Tasks"):
        paired_gain({"a": [1.0]}, {"a": [1.0]})
