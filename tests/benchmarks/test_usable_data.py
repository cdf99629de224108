"""The accounting of usable samples, on Groups small enough to count by hand."""

from dataclasses import replace

import pytest

from benchmarks.timed_parts import TimedEpisodes
from benchmarks.usable_data import account
from tests.trajectories.records import LOCATION, scored_group
from trajectories.handle import GroupHandle, summarize

ONE_TURN = TimedEpisodes(min_turns=1, max_turns=1, solved_first=1.0)
"""Every rollout would have been solved in one Turn."""


def group(name: str, rewards: list[float | None]) -> GroupHandle:
    return replace(summarize(scored_group(rewards, group_id=name), LOCATION), group_id=name)


def test_survivors_are_usable_and_a_group_of_one_survivor_is_not() -> None:
    handles = [
        group("a", [1.0, 0.0, 1.0, 0.0]),  # 4 usable, the only Group that whole-group masking keeps
        group("b", [1.0, None, 0.0, 1.0]),  # 3 usable
        group("c", [None, None, None, 1.0]),  # under-filled: none
    ]
    counted = account(handles, ONE_TURN)
    assert counted["usable_share"] == pytest.approx(7 / 12)
    assert counted["whole_group_masking_share"] == pytest.approx(4 / 12)
    assert counted["under_filled_groups"] == 1
    assert counted["reward_bias"] == pytest.approx(5 / 8 - 1), "5 of 8 valid are solved; all 12 would have been"
    assert counted["turns_bias"] == 0


def test_failures_that_grow_with_turns_keep_their_rate_and_spare_short_rollouts() -> None:
    growing = TimedEpisodes(min_turns=1, max_turns=7, failure_rate=0.2, failures_grow=True)
    scripts = [growing.script(f"g{k}") for k in range(6000)]
    rate = {turns: [s.fails for s in scripts if len(s.latencies_s) == turns] for turns in (1, 7)}
    assert sum(s.fails for s in scripts) / len(scripts) == pytest.approx(0.2, abs=0.02)
    assert sum(rate[1]) / len(rate[1]) == pytest.approx(0.05, abs=0.025), "0.2 * 1 / 4"
    assert sum(rate[7]) / len(rate[7]) == pytest.approx(0.35, abs=0.05), "0.2 * 7 / 4"


def test_a_script_follows_from_the_rollouts_id() -> None:
    assert ONE_TURN.script("g1.0") == TimedEpisodes(min_turns=1, max_turns=1, solved_first=1.0).script("g1.0")
