"""Plans: who is trained, what the denominator counts, and how the work is split."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from learners.advantages import advantages_of
from learners.config import AdvantageKind, Aggregation
from learners.plan import BatchPlan, SizedSample, balanced_bins, plan_batch, plan_samples
from trajectories.handle import BranchSize, GroupHandle, Location, MemberSummary
from trajectories.schema import Outcome

LOCATION = Location(segment="a", offset=0, length=1)


def member(
    reward: float | None, outcome: Outcome = Outcome.COMPLETED, branches: tuple[tuple[int, int], ...] = ((10, 4),)
) -> MemberSummary:
    return MemberSummary(
        trajectory_id="t",
        outcome=outcome,
        reward=reward,
        num_turns=1,
        branches=tuple(BranchSize(num_tokens=tokens, num_trained=trained) for tokens, trained in branches),
        min_version=None,
        max_version=None,
        seconds=1.0,
    )


def group(*members: MemberSummary, offset: int = 0) -> GroupHandle:
    location = Location(segment="a", offset=offset, length=1)
    return GroupHandle(group_id=f"g{offset}", task_id="task", location=location, members=members)


def refs_of(plan: BatchPlan) -> list:
    return sorted(
        (ref for rank in plan.ranks for batch in rank.micro_batches for ref in batch), key=lambda ref: ref.index
    )


def test_a_group_trains_each_valid_member_with_its_advantage() -> None:
    plan = plan_batch([group(member(1.0), member(0.0), member(0.0))], num_ranks=1, max_tokens=100)
    assert [(ref.member, ref.advantage) for ref in refs_of(plan)] == [(0, 1.0), (1, -0.5), (2, -0.5)]
    assert plan.num_tokens == 12
    assert {ref.weight for ref in refs_of(plan)} == {1 / 12}


def test_a_down_weighted_group_counts_for_less_and_the_others_for_no_more() -> None:
    groups = [group(member(1.0), member(0.0)), group(member(1.0), member(0.0), offset=1)]
    plan = plan_batch(groups, num_ranks=1, max_tokens=100, group_weights=[1.0, 0.5])
    assert [(ref.location.offset, ref.advantage) for ref in refs_of(plan)] == [(0, 1.0), (0, -1.0), (1, 0.5), (1, -0.5)]
    assert plan.num_tokens == 16 and {ref.weight for ref in refs_of(plan)} == {1 / 16}


def test_each_branch_of_a_trajectory_is_trained_with_its_advantage() -> None:
    plan = plan_batch([group(member(1.0, branches=((10, 4), (7, 2))), member(0.0))], num_ranks=1, max_tokens=100)
    assert [(ref.member, ref.branch, ref.advantage) for ref in refs_of(plan)] == [
        (0, 0, 1.0),
        (0, 1, 1.0),
        (1, 0, -1.0),
    ]
    assert plan.num_tokens == 10


def test_an_agent_error_counts_as_zero_and_an_excluded_member_for_nothing() -> None:
    failed = member(1.0, Outcome.AGENT_ERROR)
    lost = member(None, Outcome.SANDBOX_ERROR, branches=((50, 40),))
    with_lost = plan_batch([group(member(1.0), failed, lost)], num_ranks=1, max_tokens=100)
    without = plan_batch([group(member(1.0), failed)], num_ranks=1, max_tokens=100)
    assert refs_of(with_lost) == refs_of(without)
    assert with_lost.num_tokens == without.num_tokens == 8


def test_groups_without_variance_are_skipped_and_leave_the_denominator() -> None:
    silent = group(member(1.0), member(1.0), offset=7)
    plan = plan_batch([silent, group(member(1.0), member(0.0))], num_ranks=1, max_tokens=100)
    assert plan.num_tokens == 8
    assert {ref.location.offset for ref in refs_of(plan)} == {0}
    assert plan.metrics["plan/groups_without_gradient"] == 1.0


def test_a_member_with_advantage_zero_counts_in_the_denominator_but_is_not_computed() -> None:
    plan = plan_batch([group(member(1.0), member(0.5), member(0.0))], num_ranks=1, max_tokens=100)
    assert [ref.member for ref in refs_of(plan)] == [0, 2]
    assert plan.num_tokens == 12


def test_a_step_without_any_gradient_is_an_empty_plan() -> None:
    plan = plan_batch([group(member(1.0), member(1.0))], num_ranks=2, max_tokens=100)
    assert [rank.micro_batches for rank in plan.ranks] == [(), ()]
    assert plan.num_tokens == 0


def test_every_rank_gets_equally_many_micro_batches_even_with_one_sample() -> None:
    sample = SizedSample(location=LOCATION, num_tokens=10, num_trained=5)
    plan = plan_samples([sample], num_ranks=2, max_tokens=16)
    assert [[len(batch) for batch in rank.micro_batches] for rank in plan.ranks] == [[1], [0]]


def test_values_return_to_the_order_in_which_samples_were_given() -> None:
    lengths = [3, 9, 5, 7, 2]
    samples = [SizedSample(location=LOCATION, num_tokens=length, num_trained=1) for length in lengths]
    plan = plan_samples(samples, num_ranks=2, max_tokens=10)
    listed = [ref.num_tokens for rank in plan.ranks for batch in rank.micro_batches for ref in batch]
    assert listed != lengths
    assert plan.in_given_order(listed) == lengths


def test_bins_are_balanced_by_hand() -> None:
    assert balanced_bins([3, 3, 2], num_ranks=2, max_tokens=8) == [[0, 2], [1]]


def test_a_group_stays_together_where_ranks_wait_no_longer_for_it() -> None:
    halves = [4, 4, 3, 3]
    assert balanced_bins(halves, num_ranks=1, max_tokens=8, in_order=True) == [[0, 1], [2, 3]]
    assert balanced_bins(halves, num_ranks=2, max_tokens=8, in_order=True) == [[0, 2], [1, 3]], "8 and 6 is a wait"
    assert balanced_bins([5, 2, 4, 1], num_ranks=1, max_tokens=6, in_order=True) == [[0, 3], [2, 1]], "7 do not fit"


def test_a_sample_over_the_limit_is_refused_with_the_remedy() -> None:
    with pytest.raises(ValueError, match="a Sample of 20 tokens exceeds max_tokens=16; raise"):
        balanced_bins([20], num_ranks=1, max_tokens=16)


@given(
    lengths=st.lists(st.integers(1, 64), max_size=60),
    num_ranks=st.integers(1, 4),
    max_tokens=st.sampled_from([64, 100]),
    in_order=st.booleans(),
)
def test_bins_hold_each_sample_once_within_the_limit_and_divide_over_ranks(
    lengths: list[int], num_ranks: int, max_tokens: int, in_order: bool
) -> None:
    bins = balanced_bins(lengths, num_ranks=num_ranks, max_tokens=max_tokens, in_order=in_order)
    assert sorted(item for bin_ in bins for item in bin_) == list(range(len(lengths)))
    assert all(sum(lengths[item] for item in bin_) <= max_tokens for bin_ in bins)
    assert len(bins) % num_ranks == 0


# Two Groups: tokens trained by their members are (4 + 2, 4) and (1, 3), advantages (1, -1) each.
@pytest.mark.parametrize(
    ("aggregation", "weights"),
    [
        (Aggregation.TOKEN_MEAN, [1 / 14] * 5),
        (Aggregation.SEQUENCE_MEAN, [1 / (4 * 6), 1 / (4 * 6), 1 / (4 * 4), 1 / (4 * 1), 1 / (4 * 3)]),
        (Aggregation.SEQUENCE_MEAN_TOKEN_SUM, [1 / 4] * 5),
    ],
)
def test_weights_of_each_aggregation_by_hand(aggregation: Aggregation, weights: list[float]) -> None:
    first = group(member(1.0, branches=((10, 4), (7, 2))), member(0.0))
    second = group(member(1.0, branches=((5, 1),)), member(0.0, branches=((5, 3),)), offset=7)
    plan = plan_batch([first, second], aggregation=aggregation, num_ranks=2, max_tokens=20)
    assert [ref.weight for ref in refs_of(plan)] == pytest.approx(weights)
    assert plan.num_tokens == 14


def test_a_sequence_mean_counts_members_with_advantage_zero_but_not_those_that_said_nothing() -> None:
    silent = member(0.5, branches=((10, 0),))
    plan = plan_batch(
        [group(member(1.0), member(0.5), member(0.0), silent)],
        aggregation=Aggregation.SEQUENCE_MEAN_TOKEN_SUM,
        num_ranks=1,
        max_tokens=100,
    )
    assert [ref.weight for ref in refs_of(plan)] == [1 / 3] * 2


def test_samples_of_sft_are_sequences_of_their_own() -> None:
    samples = [SizedSample(location=LOCATION, num_tokens=10, num_trained=trained) for trained in (2, 5)]
    plan = plan_samples(samples, aggregation=Aggregation.SEQUENCE_MEAN, num_ranks=1, max_tokens=20)
    assert [ref.weight for ref in refs_of(plan)] == [1 / (2 * 2), 1 / (2 * 5)]


def test_batch_normalised_advantages_train_groups_of_equal_rewards() -> None:
    plan = plan_batch(
        [group(member(1.0), member(1.0)), group(member(0.0), member(0.0), offset=7)],
        advantages=advantages_of(AdvantageKind.BATCH_NORMALIZED),
        num_ranks=1,
        max_tokens=100,
    )
    assert plan.metrics["plan/groups_trained"] == 2.0
    assert [ref.advantage > 0 for ref in refs_of(plan)] == [True, True, False, False]


@given(lengths=st.lists(st.integers(1, 64), min_size=1, max_size=60), num_ranks=st.integers(1, 4))
def test_no_two_ranks_differ_by_more_than_the_longest_sample(lengths: list[int], num_ranks: int) -> None:
    bins = balanced_bins(lengths, num_ranks=num_ranks, max_tokens=100)
    loads = [sum(lengths[item] for bin_ in bins[rank::num_ranks] for item in bin_) for rank in range(num_ranks)]
    assert max(loads) - min(loads) <= max(lengths)


EXCLUDED_REWARDS = [None, 0.0, 1.0, -1e30, float("nan"), float("inf"), float("-inf")]


@pytest.mark.parametrize("kind", AdvantageKind)
@settings(max_examples=30)
@given(
    rewards=st.lists(st.sampled_from([0.0, 1.0]), min_size=2, max_size=6),
    lost=st.lists(st.sampled_from(EXCLUDED_REWARDS), max_size=3),
    aggregation=st.sampled_from(Aggregation),
    num_ranks=st.integers(1, 3),
)
def test_excluded_members_change_no_plan_whatever_their_reward(
    kind: AdvantageKind, rewards: list[float], lost: list[float | None], aggregation: Aggregation, num_ranks: int
) -> None:
    excluded = [member(reward, Outcome.CANCELLED, branches=((99, 98),)) for reward in lost]
    valid = [member(reward) for reward in rewards]
    plans = [
        plan_batch(
            [group(*members), group(member(1.0), member(0.0), offset=7)],
            advantages=advantages_of(kind),
            aggregation=aggregation,
            num_ranks=num_ranks,
            max_tokens=100,
        )
        for members in (valid, [*valid, *excluded])
    ]
    assert plans[0] == plans[1]


def test_with_a_penalty_every_valid_member_is_computed() -> None:
    """Equal rewards have no advantage, but a KL term still pulls on what they sampled."""
    equal = group(member(1.0), member(1.0), member(None, Outcome.SANDBOX_ERROR))
    assert plan_batch([equal], num_ranks=1, max_tokens=100).num_samples == 0
    plan = plan_batch([equal], has_penalty=True, num_ranks=1, max_tokens=100)
    assert [(ref.member, ref.advantage, ref.weight) for ref in refs_of(plan)] == [(0, 0.0, 1 / 8), (1, 0.0, 1 / 8)]
