"""Leave-one-out advantages against numbers computed by hand."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from learners.advantages import leave_one_out

rewards_or_none = st.lists(st.one_of(st.none(), st.sampled_from([0.0, 1.0, 0.5])), max_size=12)


def test_leave_one_out_of_two_is_the_difference() -> None:
    assert leave_one_out([1.0, 0.0]) == [1.0, -1.0]


def test_leave_one_out_of_three_compares_with_the_mean_of_the_other_two() -> None:
    assert leave_one_out([1.0, 0.0, 0.0]) == pytest.approx([1.0, -0.5, -0.5])


def test_leave_one_out_of_eight_with_two_solved() -> None:
    # others of a solved member: 1 of 7 solved; others of an unsolved one: 2 of 7.
    assert leave_one_out([1, 1, 0, 0, 0, 0, 0, 0]) == pytest.approx([6 / 7] * 2 + [-2 / 7] * 6)


def test_an_excluded_member_stays_excluded_and_leaves_the_baseline() -> None:
    assert leave_one_out([1.0, None, 0.0, None, 0.0]) == pytest.approx([1.0, None, -0.5, None, -0.5])


def test_equal_rewards_carry_no_gradient() -> None:
    assert leave_one_out([1.0, 1.0, None, 1.0]) == [0.0, 0.0, None, 0.0]


def test_too_few_valid_members_carry_no_gradient() -> None:
    assert leave_one_out([1.0, None, None]) == [0.0, None, None]
    assert leave_one_out([1.0, 0.0, 0.0, None], min_valid=4) == [0.0, 0.0, 0.0, None]
    assert leave_one_out([]) == []


def test_a_baseline_needs_another_member() -> None:
    with pytest.raises(ValueError, match="min_valid must be >= 2"):
        leave_one_out([1.0], min_valid=1)


@given(rewards_or_none)
def test_excluded_members_change_no_other_advantage(rewards: list[float | None]) -> None:
    kept = [value for value in leave_one_out(rewards) if value is not None]
    assert kept == leave_one_out([reward for reward in rewards if reward is not None])


@given(rewards_or_none)
def test_advantages_are_finite_and_sum_to_zero(rewards: list[float | None]) -> None:
    advantages = [value for value in leave_one_out(rewards) if value is not None]
    assert all(math.isfinite(value) for value in advantages)
    assert sum(advantages) == pytest.approx(0.0, abs=1e-9)


@given(st.lists(st.sampled_from([0.0, 1.0]), min_size=2, max_size=16))
def test_leave_one_out_equals_the_formula_that_trl_uses(rewards: list[float]) -> None:
    # TRL's RLOOTrainer: baseline_i = (sum of the group - r_i) / (n - 1), advantage_i = r_i - baseline_i.
    expected = [reward - (sum(rewards) - reward) / (len(rewards) - 1) for reward in rewards]
    assert leave_one_out(rewards) == pytest.approx(expected, abs=1e-12)
