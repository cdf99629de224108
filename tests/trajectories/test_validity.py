"""The validity rules, and metrics that no excluded member changes."""

import pytest

from tests.trajectories.records import LOCATION, group, scored_group, tokens, trajectory, turn, version
from trajectories.handle import GroupHandle, summarize
from trajectories.metrics import exclusion_by_task, exclusion_by_turns, power_of_two_at_least, summarize_groups
from trajectories.schema import DEFAULT_TREATMENTS, Group, Outcome, Treatment
from trajectories.validity import NoGradient, member_rewards, no_gradient


def _group(*endings: tuple[Outcome, float | None]) -> Group:
    return group(
        *(
            trajectory(turn(tokens((1,), (2,))), member=member, outcome=outcome, reward=reward)
            for member, (outcome, reward) in enumerate(endings)
        )
    )


EVERY_OUTCOME = _group(*((outcome, 1.0) for outcome in Outcome))


def test_scored_outcomes_keep_their_reward_errors_of_the_agent_are_zero_and_failures_are_excluded():
    assert dict(zip(Outcome, member_rewards(EVERY_OUTCOME), strict=True)) == {
        Outcome.COMPLETED: 1.0,
        Outcome.TURN_LIMIT: 1.0,
        Outcome.CONTEXT_LIMIT: 1.0,
        Outcome.AGENT_TIMEOUT: 1.0,
        Outcome.AGENT_ERROR: 0.0,
        Outcome.SANDBOX_ERROR: None,
        Outcome.VERIFIER_ERROR: None,
        Outcome.SAMPLER_ERROR: None,
        Outcome.CANCELLED: None,
    }


def test_a_group_and_its_handle_have_the_same_rewards():
    assert member_rewards(summarize(EVERY_OUTCOME, LOCATION)) == member_rewards(EVERY_OUTCOME)


def test_a_scored_member_without_a_reward_is_excluded():
    assert member_rewards(_group((Outcome.COMPLETED, None), (Outcome.AGENT_ERROR, None))) == [None, 0.0]


def test_the_treatments_decide_and_must_name_every_outcome():
    timeouts_lose = {**DEFAULT_TREATMENTS, Outcome.AGENT_TIMEOUT: Treatment.ZERO}
    assert member_rewards(_group((Outcome.AGENT_TIMEOUT, 1.0)), timeouts_lose) == [0.0]
    with pytest.raises(ValueError, match="no Treatment for the Outcome completed"):
        member_rewards(_group((Outcome.COMPLETED, 1.0)), {})


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([], NoGradient.UNDER_FILLED),
        ([1.0, None], NoGradient.UNDER_FILLED),
        ([1.0, 1.0, None], NoGradient.ZERO_VARIANCE),
        ([1.0, 0.0, None], None),
    ],
)
def test_no_gradient_counts_valid_members_only(rewards: list[float | None], expected: NoGradient | None):
    assert no_gradient(rewards) == expected


def _handles() -> list[GroupHandle]:
    mixed = scored_group([1.0, 0.0], n=3)
    all_solved = scored_group([1.0, 1.0], group_id="g1", n=5)
    return [summarize(each, LOCATION) for each in (mixed, all_solved)]


def test_metrics_of_two_groups_by_hand():
    metrics = summarize_groups(_handles(), version=version(5))
    expected = {
        "num_groups": 2,
        "num_members": 4,
        "num_valid": 4,
        "exclusion_rate": 0,
        "reward_mean": 0.75,
        "solved": 0.75,
        "turns_mean": 1,
        "tokens_mean": 5,
        "trained_tokens_mean": 3,
        "seconds_mean": 1.75,
        "prefix_breaks_mean": 0,
        "prefix_breaks_alarm": 0,
        "zero_variance_share": 0.5,
        "under_filled_share": 0,
        "outcome/completed": 4,
        "staleness_max": 2,
        "staleness_mean": 1,
    }
    assert {key: metrics[key] for key in expected} == expected
    assert sum(value for key, value in metrics.items() if key.startswith("outcome/")) == 4


def test_an_excluded_member_changes_no_mean_and_no_share():
    excluded = trajectory(
        *[turn(tokens(tuple(range(90)), tuple(range(90))), observation="x")] * 9,
        member=2,
        outcome=Outcome.SANDBOX_ERROR,
        reward=1.0,
    )
    mixed = scored_group([1.0, 0.0], n=3)
    with_excluded = group(*mixed.trajectories, excluded)
    before, after = (
        summarize_groups([summarize(each, LOCATION)], version=version(5)) for each in (mixed, with_excluded)
    )
    changed = {key for key in before | after if before.get(key) != after.get(key)}
    assert changed == {"num_members", "exclusion_rate", "outcome/sandbox_error"}
    assert after["exclusion_rate"] == pytest.approx(1 / 3)


def test_a_mean_over_nothing_is_absent():
    assert "reward_mean" not in summarize_groups([summarize(scored_group([None]), LOCATION)], version=version(0))
    assert "exclusion_rate" not in summarize_groups([])


def test_exclusion_is_told_by_task_worst_first_and_by_length():
    handles = [
        summarize(scored_group([1.0, None], task_id="half"), LOCATION),
        summarize(scored_group([1.0], task_id="fine"), LOCATION),
        summarize(scored_group([None], task_id="lost"), LOCATION),
    ]
    assert list(exclusion_by_task(handles).items()) == [("lost", 1.0), ("half", 0.5)]
    assert exclusion_by_turns(handles) == {"exclusion_rate/turns_le_1": 0.5}
    assert [power_of_two_at_least(n) for n in (0, 1, 2, 3, 4, 5)] == [1, 1, 2, 4, 4, 8]
