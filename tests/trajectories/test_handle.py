"""Handles: sizes and versions by hand-counted example."""

import pickle
from dataclasses import replace

from tests.trajectories.records import LOCATION, group, scored_group, tokens, trajectory, turn, version
from trajectories.handle import BranchSize, summarize
from trajectories.schema import Outcome, TurnTokens, VersionSpan


def test_a_handle_counts_turns_tokens_breaks_and_seconds():
    handle = summarize(
        group(
            trajectory(
                turn(tokens((10, 11), (20, 21))),
                turn(tokens((12,), (22,), prefix_len=3)),
                outcome=Outcome.TURN_LIMIT,
                reward=0.0,
            )
        ),
        LOCATION,
    )
    member = handle.members[0]
    assert (handle.group_id, handle.task_id, handle.location) == ("g0", "t0", LOCATION)
    assert (member.trajectory_id, member.outcome, member.reward) == ("g0-0", Outcome.TURN_LIMIT, 0.0)
    assert member.num_turns == 2
    assert member.branches == (BranchSize(num_tokens=4, num_trained=2), BranchSize(num_tokens=5, num_trained=1))
    assert member.num_breaks == 1
    assert member.seconds == 1.75


def test_versions_span_all_turns_and_all_spans_of_one():
    in_flight = TurnTokens(
        prefix_len=4,
        new_ids=(9,),
        sampled_ids=(5, 6),
        logprobs=(-1.0, -1.0),
        spans=(VersionSpan(version=version(3), num_tokens=1), VersionSpan(version=version(4), num_tokens=1)),
    )
    member = summarize(group(trajectory(turn(tokens((1, 2), (3, 4), n=2)), turn(in_flight))), LOCATION).members[0]
    assert (member.min_version, member.max_version) == (version(2), version(4))


def test_a_member_without_tokens_has_no_branches_breaks_or_versions():
    member = summarize(group(trajectory(turn(None))), LOCATION).members[0]
    assert (member.branches, member.num_breaks, member.min_version, member.max_version) == ((), 0, None, None)


def test_a_handle_holds_no_tokens_so_its_size_does_not_grow_with_them():
    short = scored_group([1.0, 0.0])
    long_turn = turn(tokens(tuple(range(5000)), tuple(range(5000))), reply="x" * 10_000)
    long = replace(short, trajectories=tuple(replace(t, turns=(long_turn,)) for t in short.trajectories))
    sizes = [len(pickle.dumps(summarize(each, LOCATION))) for each in (short, long)]
    assert sizes[1] - sizes[0] < 20
