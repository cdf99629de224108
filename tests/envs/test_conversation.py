"""Every prompt is the last context plus new ids; every Turn is recorded whole and in time."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs.conversation import SampledConversation, ScriptedConversation
from envs.errors import ContextLimit, SamplerError, TurnLimit
from envs.sampler import SamplingParams
from tests.envs.tokens import special_id, text_ids, tiny_renderer
from tests.fakes.sampler import FakeSampler, scripted
from trajectories.samples import trajectory_samples
from trajectories.schema import Outcome, Trajectory

END = special_id("<|end|>")


def converse(
    sampler: FakeSampler, *, max_turns: int = 9, context_tokens: int = 999, max_tokens: int = 50
) -> SampledConversation:
    return SampledConversation(
        tiny_renderer(),
        sampler,
        SamplingParams(max_tokens=max_tokens),
        max_turns=max_turns,
        context_tokens=context_tokens,
        key="traj-1",
    )


def trajectory_of(conversation: SampledConversation) -> Trajectory:
    return Trajectory(
        id="t",
        task_id="k",
        group_id="g",
        member=0,
        prompt=conversation.prompt,
        turns=tuple(conversation.turns),
        outcome=Outcome.COMPLETED,
        reward=1.0,
    )


async def test_turns_hold_reply_observation_and_exact_tokens() -> None:
    sampler = FakeSampler(scripted((*text_ids("ls"), END), (*text_ids("ok"), END)), tokens_per_version=2)
    conversation = converse(sampler)
    assert (conversation.prompt, list(conversation.turns)) == ("", [])
    assert await conversation.ask("do it") == "ls"
    assert conversation.turns[0].observation == ""
    assert await conversation.ask("file") == "ok"
    one, two = conversation.turns
    assert (conversation.prompt, one.reply, one.observation, two.reply, two.observation) == (
        "do it",
        "ls",
        "file",
        "ok",
        "",
    )
    assert one.tokens and two.tokens
    assert one.tokens.sampled_ids == (*text_ids("ls"), END)
    assert one.tokens.logprobs == (-0.125, -0.25, -0.375)
    assert [span.num_tokens for span in one.tokens.spans] == [2, 1]
    assert sampler.calls[1][0] == sampler.calls[0][0] + one.tokens.sampled_ids + two.tokens.new_ids
    assert {key for _, _, key in sampler.calls} == {"traj-1"}


async def test_seconds_are_split_between_sampling_and_executing() -> None:
    conversation = converse(FakeSampler(lambda ids: [END], delay_s=0.02))
    await conversation.ask("a")
    await conversation.ask("b")
    assert conversation.turns[0].sample_s >= 0.02 > conversation.turns[0].execute_s > 0


async def test_the_turn_limit_comes_before_asking_and_keeps_the_turns() -> None:
    sampler = FakeSampler(lambda ids: [END])
    conversation = converse(sampler, max_turns=2)
    await conversation.ask("a")
    await conversation.ask("b")
    with pytest.raises(TurnLimit):
        await conversation.ask("c")
    assert (len(sampler.calls), [turn.observation for turn in conversation.turns]) == (2, ["b", ""])


async def test_the_context_limit_comes_before_asking_when_no_token_fits() -> None:
    sampler = FakeSampler(lambda ids: [END])
    prompt_len = len(tiny_renderer().first("hi"))
    with pytest.raises(ContextLimit):
        await converse(sampler, context_tokens=prompt_len).ask("hi")
    assert sampler.calls == []
    assert await converse(sampler, context_tokens=prompt_len + 1).ask("hi") == ""


async def test_a_reply_is_shortened_to_what_fits_the_context() -> None:
    sampler = FakeSampler(lambda ids: text_ids("abcdefgh"))
    conversation = converse(sampler, context_tokens=len(tiny_renderer().first("hi")) + 3)
    assert await conversation.ask("hi") == "abc"
    assert (sampler.calls[0][1].max_tokens, conversation.was_cut) == (3, True)
    with pytest.raises(ContextLimit):
        await conversation.ask("more")


async def test_a_sampler_error_leaves_the_turns_before_it() -> None:
    conversation = converse(FakeSampler(lambda ids: [END], fails_at=1))
    await conversation.ask("a")
    with pytest.raises(SamplerError):
        await conversation.ask("b")
    assert [turn.observation for turn in conversation.turns] == [""]


replies = st.lists(st.integers(0, 255), max_size=6).flatmap(
    lambda ids: st.sampled_from([(*ids, END), (*ids, *[7] * 12)])
)


@settings(max_examples=60)
@given(exchanges=st.lists(st.tuples(st.text(max_size=8), replies), min_size=1, max_size=5))
async def test_samples_train_exactly_what_was_sampled(exchanges: list[tuple[str, tuple[int, ...]]]) -> None:
    sampler = FakeSampler(scripted(*(reply for _, reply in exchanges)), tokens_per_version=5)
    conversation = converse(sampler, max_tokens=8)
    for message, _ in exchanges:
        await conversation.ask(message)
    (sample,) = trajectory_samples(trajectory_of(conversation))
    sampled = [i for turn in conversation.turns if turn.tokens for i in turn.tokens.sampled_ids]
    assert [int(i) for i, is_trained in zip(sample.ids, sample.mask, strict=True) if is_trained] == sampled
    for (context, _, _), turn in zip(sampler.calls, conversation.turns, strict=True):
        assert turn.tokens and tuple(sample.ids[: len(context)]) == context
        assert tuple(sample.ids[len(context) :][: len(turn.tokens.sampled_ids)]) == turn.tokens.sampled_ids
    for (before, _, _), (after, _, _) in pairwise(sampler.calls):
        assert after[: len(before)] == before


async def test_a_script_is_told_in_order_and_ends_in_the_turn_limit() -> None:
    conversation = ScriptedConversation(["one", "two"])
    assert await conversation.ask("a") == "one"
    assert await conversation.ask("b") == "two"
    with pytest.raises(TurnLimit, match="2 written replies"):
        await conversation.ask("c")
    assert [(turn.reply, turn.observation, turn.tokens) for turn in conversation.turns] == [
        ("one", "b", None),
        ("two", "", None),
    ]
    assert (conversation.prompt, conversation.was_cut) == ("a", False)
