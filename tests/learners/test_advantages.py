"""Advantages against numbers computed by hand, and what no advantage may depend on."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from learners.advantages import (
    advantages_of,
    batch_normalized,
    group_mean,
    group_mean_over_batch_std,
    group_mean_over_std,
    leave_one_out,
)
from learners.config import AdvantageKind

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


def test_group_mean_includes_the_member_itself() -> None:
    assert group_mean([1.0, 0.0, 0.0]) == pytest.approx([2 / 3, -1 / 3, -1 / 3])
    assert group_mean([1.0, None, 0.0]) == [0.5, None, -0.5]
    assert group_mean([0.1] * 3) == [0.0] * 3


def test_group_mean_over_std_by_hand() -> None:
    # std of (1, 0, 0) over n - 1: sqrt((4/9 + 1/9 + 1/9) / 2) = sqrt(1/3) = 0.57735
    std = math.sqrt(1 / 3) + 1e-4
    assert group_mean_over_std([1.0, 0.0, 0.0]) == pytest.approx([2 / 3 / std, -1 / 3 / std, -1 / 3 / std])
    assert group_mean_over_std([1.0, 1.0]) == [0.0, 0.0]
    assert group_mean_over_std([1.0, None]) == [0.0, None]


def test_batch_normalisation_trains_groups_of_equal_rewards_too() -> None:
    std = math.sqrt(1 / 3) + 1e-4  # of (1, 1, 0, 0): four squares of 1/2 over 3
    high, low = 0.5 / std, -0.5 / std
    assert batch_normalized([[1.0, 1.0], [0.0, None, 0.0]]) == [
        pytest.approx([high, high]),
        pytest.approx([low, None, low]),
    ]
    assert batch_normalized([[1.0], [1.0, None]]) == [[0.0], [0.0, None]]


def test_group_mean_over_batch_std_by_hand() -> None:
    # centred: (1/2, -1/2), (0, 0); std over n - 1: sqrt((1/4 + 1/4) / 3) = 0.40825
    std = math.sqrt(1 / 6) + 1e-4
    assert group_mean_over_batch_std([[1.0, 0.0], [1.0, 1.0]]) == [pytest.approx([0.5 / std, -0.5 / std]), [0.0, 0.0]]


@pytest.mark.parametrize("kind", AdvantageKind)
def test_a_valid_reward_that_is_not_finite_is_refused(kind: AdvantageKind) -> None:
    for reward in (math.nan, math.inf):
        with pytest.raises(ValueError, match="the reward of a valid member must be finite"):
            advantages_of(kind)([[1.0, 0.0], [reward, 1.0]])


@pytest.mark.parametrize("kind", AdvantageKind)
@settings(max_examples=30)
@given(groups=st.lists(rewards_or_none, max_size=4))
def test_excluded_members_change_no_advantage_of_any_group(
    kind: AdvantageKind, groups: list[list[float | None]]
) -> None:
    valid = [[reward for reward in rewards if reward is not None] for rewards in groups]
    with_excluded = advantages_of(kind)(groups)
    assert [[value for value in values if value is not None] for values in with_excluded] == advantages_of(kind)(valid)
    for rewards, values in zip(groups, with_excluded, strict=True):
        assert [reward is None for reward in rewards] == [value is None for value in values]


@pytest.mark.parametrize("kind", AdvantageKind)
@settings(max_examples=30)
@given(groups=st.lists(rewards_or_none, max_size=4))
def test_advantages_of_a_step_sum_to_zero(kind: AdvantageKind, groups: list[list[float | None]]) -> None:
    every = [value for values in advantages_of(kind)(groups) for value in values if value is not None]
    assert sum(every) == pytest.approx(0.0, abs=1e-6)
