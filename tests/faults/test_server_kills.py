"""Servers killed under rollouts: the whole run on demand, and here whether its check sees what may go wrong."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tests.actors.tiny_qwen3 import TinySource, save_tiny_qwen3
from tests.faults.servers import NUM_TURNS, REPLY_TOKENS, TOLERANCE, Config, Played, check, play
from trajectories.schema import Outcome, PolicyVersion, Trajectory, Turn, TurnTokens, VersionSpan

WRONG = ("rollouts_lost", "rollouts_doubled", "tokens_misattributed")


@pytest.mark.ray
@pytest.mark.vllm
@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
async def test_twelve_killed_servers_lose_double_and_misattribute_nothing(tmp_path: Path) -> None:
    figures = check(await play(Config(out=tmp_path / "unused.json")))
    assert (figures["kills"], figures["in_flight_at_kills_min"] >= 8, figures["versions"]) == (12, True, 5)
    assert [figures[name] for name in WRONG] == [0, 0, 0]
    assert figures["logprob_gap_to_other_version_median"] > 10 * TOLERANCE, "the check tells versions apart"


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> list[TinySource]:
    model = save_tiny_qwen3(tmp_path_factory.mktemp("model"))
    sources = [TinySource(model), TinySource(model)]
    sources[1].step(1)
    return sources


def rollout(key: str, sources: Sequence[TinySource]) -> Trajectory:
    """As a right plane leaves it: version 0 sampled all but the last 30 tokens."""
    ids = [7 + k % 300 for k in range(NUM_TURNS * (REPLY_TOKENS + 2))]
    logprobs = [[0.0, *source.logprobs(ids)] for source in sources]
    turns: list[Turn] = []
    for k in range(NUM_TURNS):
        begin, end = k * (REPLY_TOKENS + 2) + 2, (k + 1) * (REPLY_TOKENS + 2)
        num_new = 30 if k == NUM_TURNS - 1 else 0
        counts = {0: REPLY_TOKENS - num_new, 1: num_new}
        tokens = TurnTokens(
            prefix_len=begin - 2,
            new_ids=tuple(ids[begin - 2 : begin]),
            sampled_ids=tuple(ids[begin:end]),
            logprobs=(*logprobs[0][begin : end - num_new], *logprobs[1][end - num_new : end]),
            spans=tuple(
                VersionSpan(version=PolicyVersion(lineage=0, n=n), num_tokens=count)
                for n, count in counts.items()
                if count
            ),
        )
        turns.append(Turn(reply="", observation="", finish_reason="length", tokens=tokens, sample_s=0.0, usage=None))
    return Trajectory(
        id=key,
        task_id="task",
        group_id=key,
        member=0,
        prompt="",
        turns=tuple(turns),
        outcome=Outcome.COMPLETED,
        reward=1.0,
    )


def with_last_tokens(change: Callable[[TurnTokens], TurnTokens], trajectory: Trajectory) -> Trajectory:
    last = trajectory.turns[-1]
    assert last.tokens is not None
    return replace(trajectory, turns=(*trajectory.turns[:-1], replace(last, tokens=change(last.tokens))))


def named_old(tokens: TurnTokens) -> TurnTokens:
    """All of it in the name of version 0."""
    return replace(tokens, spans=(replace(tokens.spans[0], num_tokens=REPLY_TOKENS),))


def without_one(tokens: TurnTokens) -> TurnTokens:
    """A token of version 0 was lost on the way."""
    spans = (replace(tokens.spans[0], num_tokens=tokens.spans[0].num_tokens - 1), *tokens.spans[1:])
    ids, logprobs = tokens.sampled_ids, tokens.logprobs
    return replace(tokens, sampled_ids=ids[:9] + ids[10:], logprobs=logprobs[:9] + logprobs[10:], spans=spans)


@pytest.mark.slow
def test_the_check_sees_what_is_lost_doubled_or_misattributed(sources: list[TinySource]) -> None:
    """About 2 s."""
    good = [rollout("a", sources), rollout("b", sources)]

    def wrong(*trajectories: Trajectory) -> list[float]:
        played = Played(
            trajectories=list(trajectories), num_asked=2, in_flight=[8], positions=[1], back_s=[1.0], sources=sources
        )
        figures = check(played)
        return [figures[name] for name in WRONG]

    num_tokens = NUM_TURNS * REPLY_TOKENS
    assert wrong(*good) == [0, 0, 0]
    assert wrong(good[0]) == [1, 0, num_tokens]
    assert wrong(*good, good[1]) == [0, 1, num_tokens]
    assert 25 <= wrong(good[0], with_last_tokens(named_old, good[1]))[2] <= 30
    assert wrong(good[0], with_last_tokens(without_one, good[1]))[2] > 90
