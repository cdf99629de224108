"""Summaries: what is asked when a context is nearly full, what goes on after, and that the record stays exact."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from envs.conversation import SampledConversation, ScriptedConversation
from envs.errors import ContextLimit, TurnLimit
from envs.sampler import SamplingParams
from envs.task import Environment, Limits, Provenance, Task, VerifierSpec
from envs.terminus2.harness import Terminus2
from envs.terminus2.prompts import COMPACT
from envs.terminus2.summary import SummaryConfig
from tests.envs.tokens import special_id, text_ids, tiny_renderer
from tests.fakes.sampler import FakeSampler
from tests.fakes.screen_sandbox import ScreenSandbox
from trajectories.samples import trajectory_samples
from trajectories.schema import Outcome, Trajectory

TASK = Task(
    id="t",
    instruction="Do it",
    environment=Environment(),
    verifier=VerifierSpec(),
    limits=Limits(),
    provenance=Provenance(),
    path=Path("/nowhere"),
)
LS = json.dumps({"analysis": "", "plan": "", "commands": [{"keystrokes": "ls\n", "duration": 0.1}]})
DONE = json.dumps({"analysis": "", "plan": "", "commands": [], "task_complete": True})
END = special_id("<|end|>")

Answer = Callable[[str], str]


def reply_by(answer: Answer) -> Callable[[Sequence[int]], list[int]]:
    """Replies to the last user message of a prompt."""
    renderer = tiny_renderer()
    user = special_id("<|user|>")

    def reply(ids: Sequence[int]) -> list[int]:
        last = len(ids) - 1 - list(reversed(ids)).index(user)
        message = renderer.tokenizer.decode(list(ids[last + 1 : -2]), skip_special_tokens=False)
        return [*text_ids(answer(message)), END]

    return reply


def conversation_of(
    answer: Answer, *, context_tokens: int, max_turns: int = 30
) -> tuple[SampledConversation, FakeSampler]:
    sampler = FakeSampler(reply_by(answer))
    params = SamplingParams(max_tokens=400)
    conversation = SampledConversation(
        tiny_renderer(), sampler, params, max_turns=max_turns, context_tokens=context_tokens, key="t"
    )
    return conversation, sampler


def player(message: str) -> str:
    """Lists files until it goes on from a summary, then is done."""
    if "another agent will go on" in message:
        return "SUMMARY"
    if "at least five questions" in message:
        return "QUESTIONS"
    if "takes over asks" in message:
        return "ANSWERS"
    if "history is lost. Do not" in message:
        return "SHORT"
    return DONE if "Go on from here" in message or "sure?" in message else LS


def trajectory_of(conversation: SampledConversation) -> Trajectory:
    return Trajectory(
        id="g.0",
        task_id="t",
        group_id="g",
        member=0,
        prompt=conversation.prompt,
        turns=tuple(conversation.turns),
        outcome=Outcome.COMPLETED,
        reward=1.0,
        evidence="",
        error="",
        timings_s={},
        provenance={},
    )


def check_exact(conversation: SampledConversation, sampler: FakeSampler) -> None:
    """What the Turns say is what the engine saw, and each sampled token is trained once."""
    context: tuple[int, ...] = ()
    for turn, (prompt_ids, _, _) in zip(conversation.turns, sampler.calls, strict=True):
        assert turn.tokens is not None
        assert context[: turn.tokens.prefix_len] + turn.tokens.new_ids == prompt_ids
        context = prompt_ids + turn.tokens.sampled_ids
    samples = trajectory_samples(trajectory_of(conversation))
    trained = sum(int(sample.mask.sum()) for sample in samples)
    assert trained == sum(len(turn.tokens.sampled_ids) for turn in conversation.turns if turn.tokens)


async def test_a_nearly_full_context_is_summed_up_and_the_work_goes_on_in_a_new_one() -> None:
    conversation, sampler = conversation_of(player, context_tokens=4000)
    await Terminus2(COMPACT, summary=SummaryConfig(below_tokens=3500)).run(TASK, ScreenSandbox("$ "), conversation)
    replies = [turn.reply for turn in conversation.turns]
    num_lists = replies.index("SUMMARY")
    assert replies == [LS] * num_lists + ["SUMMARY", "QUESTIONS", "ANSWERS", DONE, DONE]
    assert num_lists > 1
    check_exact(conversation, sampler)
    prompts = ["".join(map(chr, _bytes(ids))) for ids, _, _ in sampler.calls]
    assert "SUMMARY" in prompts[num_lists + 1]
    assert LS not in prompts[num_lists + 1], "the questions come from a reader who saw the summary alone"
    assert all(word in prompts[num_lists + 2] for word in (LS, "SUMMARY", "QUESTIONS")), "and are answered by the other"
    handed_over = prompts[num_lists + 3]
    assert handed_over.startswith("Do it\nYou go on")
    assert [word in handed_over for word in ("SUMMARY", "QUESTIONS", "ANSWERS", LS)] == [True, True, True, False]


async def test_a_prompt_that_does_not_fit_unwinds_the_last_exchanges_first() -> None:
    conversation, sampler = conversation_of(player, context_tokens=4000)
    sandbox = ScreenSandbox("$ ", *[f"{k} " + "x" * 300 for k in range(30)])
    await Terminus2(COMPACT, summary=SummaryConfig(below_tokens=0, unwind_tokens=2500)).run(TASK, sandbox, conversation)
    replies = [turn.reply for turn in conversation.turns]
    assert replies[-5:] == ["SUMMARY", "QUESTIONS", "ANSWERS", DONE, DONE]
    check_exact(conversation, sampler)
    before, summary = sampler.calls[-6][0], sampler.calls[-5][0]
    assert len(before) > 3000 > 1500 + 400 > len(summary), "exchanges were taken out of the context"


async def test_a_summary_that_does_not_fit_is_a_short_one_of_the_screen() -> None:
    conversation, sampler = conversation_of(player, context_tokens=700)
    await Terminus2(COMPACT, summary=SummaryConfig(below_tokens=0, unwind_tokens=1)).run(
        TASK, ScreenSandbox("$ the end"), conversation
    )
    replies = [turn.reply for turn in conversation.turns]
    assert replies[-3:] == ["SHORT", DONE, DONE]
    assert "SUMMARY" not in replies
    check_exact(conversation, sampler)


async def test_where_not_even_that_fits_the_task_begins_anew() -> None:
    conversation, sampler = conversation_of(player, context_tokens=170, max_turns=9)
    with pytest.raises(TurnLimit):
        await Terminus2(COMPACT, summary=SummaryConfig(below_tokens=0, unwind_tokens=1)).run(
            TASK, ScreenSandbox("$ "), conversation
        )
    assert all(LS.startswith(turn.reply) for turn in conversation.turns), "nothing but replies to the Task"
    assert len({ids for ids, _, _ in sampler.calls}) < 9, "the first prompt was sent again"
    check_exact(conversation, sampler)


async def test_a_task_that_does_not_fit_at_all_is_a_context_limit() -> None:
    conversation, _ = conversation_of(player, context_tokens=5)
    with pytest.raises(ContextLimit):
        await Terminus2(COMPACT, summary=SummaryConfig()).run(TASK, ScreenSandbox("$ "), conversation)


async def test_without_summaries_a_full_context_ends_the_rollout() -> None:
    conversation, _ = conversation_of(player, context_tokens=700)
    with pytest.raises(ContextLimit):
        await Terminus2(COMPACT).run(TASK, ScreenSandbox("$ "), conversation)


async def test_a_conversation_that_keeps_no_context_of_its_own_cannot_be_summed_up() -> None:
    with pytest.raises(TypeError, match="play without summaries"):
        await Terminus2(COMPACT, summary=SummaryConfig()).run(TASK, ScreenSandbox("$ "), ScriptedConversation([LS]))


def _bytes(ids: Sequence[int]) -> bytes:
    """The text of ids, special tokens left out."""
    return tiny_renderer().tokenizer.decode(list(ids), skip_special_tokens=True).encode("latin-1", errors="replace")
