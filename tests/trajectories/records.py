"""Records for tests: made by hand or drawn by hypothesis."""

import math

from hypothesis import strategies as st

from trajectories.handle import Location
from trajectories.schema import Group, Outcome, PolicyVersion, Trajectory, Turn, TurnTokens, Usage, VersionSpan

LOCATION = Location(segment="w0.seg", offset=0, length=100)


def version(n: int, lineage: int = 0) -> PolicyVersion:
    return PolicyVersion(lineage=lineage, n=n)


def tokens(
    new_ids: tuple[int, ...], sampled_ids: tuple[int, ...], *, prefix_len: int = 0, n: int = 0, lineage: int = 0
) -> TurnTokens:
    """Tokens of one Turn, all sampled at version n, the k-th with log-probability -(k + 1) / 2."""
    spans = (VersionSpan(version=version(n, lineage), num_tokens=len(sampled_ids)),) if sampled_ids else ()
    return TurnTokens(
        prefix_len=prefix_len,
        new_ids=new_ids,
        sampled_ids=sampled_ids,
        logprobs=tuple(-(k + 1) / 2 for k in range(len(sampled_ids))),
        spans=spans,
    )


def turn(turn_tokens: TurnTokens | None = None, *, reply: str = "ls", observation: str = "") -> Turn:
    return Turn(reply=reply, observation=observation, finish_reason="stop", tokens=turn_tokens)


def trajectory(
    *turns: Turn,
    group_id: str = "g0",
    member: int = 0,
    outcome: Outcome = Outcome.COMPLETED,
    reward: float | None = 1.0,
    task_id: str = "t0",
    sampler: str = "tiny",
) -> Trajectory:
    return Trajectory(
        id=f"{group_id}-{member}",
        task_id=task_id,
        group_id=group_id,
        member=member,
        prompt="List the files.",
        turns=turns,
        outcome=outcome,
        reward=reward,
        timings_s={"harness": 1.5, "verifier": 0.25},
        provenance={"sampler": sampler},
    )


def group(*trajectories: Trajectory, group_id: str = "g0", task_id: str = "t0") -> Group:
    return Group(id=group_id, task_id=task_id, trajectories=trajectories)


def scored_group(
    rewards: list[float | None], *, group_id: str = "g0", n: int = 0, lineage: int = 0, task_id: str = "t0"
) -> Group:
    """One single-Turn member for each reward, sampled at version n; a reward of None is a sandbox error."""
    return group(
        *(
            trajectory(
                turn(tokens((1, 2), (3, 4, 5), n=n, lineage=lineage)),
                group_id=group_id,
                member=member,
                outcome=Outcome.SANDBOX_ERROR if reward is None else Outcome.COMPLETED,
                reward=reward,
            )
            for member, reward in enumerate(rewards)
        ),
        group_id=group_id,
        task_id=task_id,
    )


_ids = st.integers(0, 2**31 - 1)
_versions = st.builds(PolicyVersion, lineage=st.integers(0, 3), n=st.integers(0, 10**6))
_any_text = st.text(st.characters(exclude_categories=()), max_size=20)  # lone surrogates included
_logprobs = st.one_of(st.floats(-1e30, 0), st.floats(-(2.0**100), 0, width=32), st.just(-math.inf))


@st.composite
def drawn_tokens(draw: st.DrawFn, *, context_len: int = 0) -> TurnTokens:
    """Tokens that keep at most `context_len` ids of the context before."""
    sampled = draw(st.lists(_ids, max_size=6))
    spans: list[VersionSpan] = []
    left = len(sampled)
    while left:
        length = draw(st.integers(1, left))
        spans.append(VersionSpan(version=draw(_versions), num_tokens=length))
        left -= length
    return TurnTokens(
        prefix_len=draw(st.integers(0, context_len)),
        # A policy is always asked something, so the first context is never empty.
        new_ids=tuple(draw(st.lists(_ids, min_size=1, max_size=5))),
        sampled_ids=tuple(sampled),
        logprobs=tuple(draw(st.lists(_logprobs, min_size=len(sampled), max_size=len(sampled)))),
        spans=tuple(spans),
    )


drawn_usage = st.builds(
    Usage,
    prompt_tokens=st.integers(0, 1 << 40),
    completion_tokens=st.integers(0, 1 << 40),
    cost_usd=st.floats(0, 1e6),
)


@st.composite
def drawn_trajectories(draw: st.DrawFn) -> Trajectory:
    """A Trajectory of up to 5 Turns whose prefixes break now and then; some Turns hold no tokens."""
    turns: list[Turn] = []
    context_len = 0
    for _ in range(draw(st.integers(0, 5))):
        turn_tokens = draw(st.none() | drawn_tokens(context_len=context_len))
        if turn_tokens is not None:
            context_len = turn_tokens.prefix_len + len(turn_tokens.new_ids) + len(turn_tokens.sampled_ids)
        turns.append(
            Turn(
                reply=draw(_any_text),
                observation=draw(_any_text),
                finish_reason=draw(st.sampled_from(["stop", "length"])),
                tokens=turn_tokens,
                sample_s=draw(st.floats(0, 1e6)),
                usage=draw(st.none() | drawn_usage),
            )
        )
    return Trajectory(
        id=draw(_any_text),
        task_id=draw(_any_text),
        group_id=draw(_any_text),
        member=draw(st.integers(0, 7)),
        prompt=draw(_any_text),
        turns=tuple(turns),
        outcome=draw(st.sampled_from(Outcome)),
        reward=draw(st.none() | st.floats(allow_nan=False)),
        evidence=draw(_any_text),
        error=draw(_any_text),
        timings_s=draw(st.dictionaries(_any_text, st.floats(0, 1e6), max_size=3)),
        provenance=draw(st.dictionaries(_any_text, _any_text, max_size=3)),
    )


drawn_groups = st.builds(
    Group,
    id=_any_text,
    task_id=_any_text,
    trajectories=st.lists(drawn_trajectories(), max_size=3).map(tuple),
)
