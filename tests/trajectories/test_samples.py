"""Samples: one per unbroken branch, each sampled token trained exactly once, in its own context."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given

from tests.trajectories.records import drawn_trajectories, tokens, trajectory, turn
from trajectories.samples import Sample, trajectory_samples
from trajectories.schema import Trajectory


def test_two_turns_with_an_unbroken_prefix_are_one_sample():
    samples = trajectory_samples(
        trajectory(
            turn(tokens((10, 11), (20, 21))),
            turn(tokens((12,), (22,), prefix_len=4)),
        )
    )
    assert len(samples) == 1
    assert samples[0].ids.tolist() == [10, 11, 20, 21, 12, 22]
    assert samples[0].mask.tolist() == [False, False, True, True, False, True]
    assert samples[0].logprobs.tolist() == [0, 0, -0.5, -1.0, 0, -0.5]


def test_a_break_starts_a_branch_that_trains_nothing_of_its_prefix():
    samples = trajectory_samples(
        trajectory(
            turn(tokens((10, 11), (20, 21))),
            turn(tokens((12,), (22,), prefix_len=3)),  # the template dropped token 21
        )
    )
    assert [s.ids.tolist() for s in samples] == [[10, 11, 20, 21], [10, 11, 20, 12, 22]]
    assert [s.mask.tolist() for s in samples] == [[False, False, True, True], [False, False, False, False, True]]
    assert samples[1].logprobs.tolist() == [0, 0, 0, 0, -0.5]


def test_a_branch_goes_on_from_the_newest_context_not_from_the_first():
    samples = trajectory_samples(
        trajectory(
            turn(tokens((10,), (20,))),
            turn(tokens((11,), (21,), prefix_len=1)),
            turn(tokens((12,), (22,), prefix_len=3)),
        )
    )
    assert [s.ids.tolist() for s in samples] == [[10, 20], [10, 11, 21, 12, 22]]


def test_a_trajectory_without_exact_tokens_yields_no_sample():
    assert trajectory_samples(trajectory(turn(None), turn(None))) == []


def test_a_prefix_longer_than_the_context_is_refused():
    with pytest.raises(ValueError, match="g0-0: prefix_len 5 exceeds"):
        trajectory_samples(trajectory(turn(tokens((1,), (2,))), turn(tokens((3,), (4,), prefix_len=5))))


def test_a_sample_that_trains_its_first_token_is_refused():
    with pytest.raises(ValueError, match=r"mask\[0\] must be False"):
        trajectory_samples(trajectory(turn(tokens((), (1, 2)))))


def test_a_sample_of_unequal_lengths_is_refused():
    with pytest.raises(ValueError, match="ids 2 mask 1 logprobs 2"):
        Sample(ids=np.zeros(2, np.int32), mask=np.zeros(1, np.bool_), logprobs=np.zeros(2, np.float32))


@given(drawn_trajectories())
def test_every_sampled_token_is_trained_once_in_the_context_the_engine_saw(drawn: Trajectory):
    expected: Counter[tuple[tuple[int, ...], int, np.float32]] = Counter()
    context: list[int] = []
    for each in drawn.turns:
        if each.tokens is None:
            continue
        context = [*context[: each.tokens.prefix_len], *each.tokens.new_ids]
        for token, logprob in zip(each.tokens.sampled_ids, each.tokens.logprobs, strict=True):
            expected[(tuple(context), token, np.float32(logprob))] += 1
            context.append(token)
    trained = Counter(
        (tuple(sample.ids[:position].tolist()), int(sample.ids[position]), sample.logprobs[position])
        for sample in trajectory_samples(drawn)
        for position in np.flatnonzero(sample.mask)
    )
    assert trained == expected


@given(drawn_trajectories())
def test_untrained_positions_carry_no_logprob(drawn: Trajectory):
    for sample in trajectory_samples(drawn):
        assert not sample.logprobs[~sample.mask].any()
