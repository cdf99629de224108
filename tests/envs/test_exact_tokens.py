"""Over random conversations: what is trained is the engine's own, in the context that the engine saw."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from envs.conversation import SampledConversation
from envs.renderer import ChatRenderer, TemplateRefused
from envs.sampler import Completion, SamplingParams
from envs.transcript import render_transcript
from tests.envs.templates import DROPS_EARLIER_THINKING, TEMPLATES, smollm2_tokenizer, thinking_tokenizer
from tests.envs.tokens import special_id, text_ids, written_reply
from trajectories.samples import trajectory_samples
from trajectories.schema import Outcome, PolicyVersion, Trajectory, VersionSpan

MAX_TOKENS = 40


@dataclass(frozen=True)
class Call:
    """What the engine saw and sampled."""

    prompt_ids: tuple[int, ...]
    completion: Completion


class RecordingSampler:
    """A Sampler that says what it is told and remembers every call; each log-probability occurs once."""

    def __init__(self, replies: Sequence[tuple[int, ...]]) -> None:
        self._replies = iter(replies)
        self.calls: list[Call] = []
        self._draw = random.Random(0)

    async def sample(
        self, prompt_ids: Sequence[int], params: SamplingParams, *, stop_ids: Sequence[int], key: str
    ) -> Completion:
        ids = next(self._replies)[: params.max_tokens]
        spans = (VersionSpan(version=PolicyVersion(lineage=0, n=0), num_tokens=len(ids)),)
        logprobs = tuple(-self._draw.random() for _ in ids)
        completion = Completion(ids=ids, logprobs=logprobs, spans=spans, finish_reason="stop")
        self.calls.append(Call(tuple(prompt_ids), completion))
        return completion


async def play(
    renderer: ChatRenderer, exchanges: Sequence[tuple[str, tuple[int, ...]]]
) -> tuple[list[Call], Trajectory]:
    sampler = RecordingSampler([reply for _, reply in exchanges])
    params = SamplingParams(max_tokens=MAX_TOKENS)
    conversation = SampledConversation(renderer, sampler, params, max_turns=99, context_tokens=99_999, key="t")
    for message, _ in exchanges:
        await conversation.ask(message)
    trajectory = Trajectory(
        id="t",
        task_id="k",
        group_id="g",
        member=0,
        prompt=conversation.prompt,
        turns=tuple(conversation.turns),
        outcome=Outcome.COMPLETED,
        reward=1.0,
    )
    return sampler.calls, trajectory


def check_samples(calls: Sequence[Call], trajectory: Trajectory) -> None:
    """Each call stands in exactly one Sample, trained, with its own log-probabilities; nothing else is trained."""
    samples = trajectory_samples(trajectory)
    homes = [0] * len(samples)
    for call in calls:
        begin, end = len(call.prompt_ids), len(call.prompt_ids) + len(call.completion.ids)
        homes_of_call = [
            k
            for k, sample in enumerate(samples)
            if tuple(sample.ids[:begin].tolist()) == call.prompt_ids
            and tuple(sample.ids[begin:end].tolist()) == call.completion.ids
            and sample.mask[begin:end].all()
        ]
        assert len(homes_of_call) == 1
        (home,) = homes_of_call
        homes[home] += len(call.completion.ids)
        assert samples[home].logprobs[begin:end].tolist() == pytest.approx(call.completion.logprobs, abs=0, rel=1e-6)
    assert [int(sample.mask.sum()) for sample in samples] == homes


@pytest.fixture(scope="module", params=["bytes", "smollm2"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return thinking_tokenizer() if request.param == "bytes" else request.getfixturevalue("smollm2")


@pytest.fixture(scope="module")
def smollm2() -> Tokenizer:
    return smollm2_tokenizer()


PIECES = st.sampled_from(
    [
        "<think>\nhm\n</think>\n\n",
        "<think>",
        "</think>",
        "\n\n",
        "\n",
        "ls -la",
        '<tool_call>{"name": "bash"}</tool_call>',
    ]
) | st.text(max_size=6)


@pytest.fixture(scope="module", params=TEMPLATES)
def renderer(tokenizer: Tokenizer, request: pytest.FixtureRequest) -> ChatRenderer:
    return ChatRenderer(tokenizer=tokenizer, template=TEMPLATES[request.param], special={})


@pytest.mark.slow
@settings(max_examples=40)
@given(data=st.data())
async def test_every_trained_token_is_the_engines_own_in_the_context_it_saw(
    renderer: ChatRenderer, data: st.DataObject
) -> None:
    tokenizer = renderer.tokenizer
    words = st.lists(PIECES, min_size=1, max_size=5).map("".join)
    spelled = words.map(lambda text: written_reply(renderer, text))
    any_ids = st.lists(st.integers(0, tokenizer.get_vocab_size() - 1), min_size=1, max_size=8).map(tuple)
    exchanges = data.draw(st.lists(st.tuples(words, spelled | any_ids), min_size=1, max_size=4))
    calls, trajectory = await play(renderer, exchanges)
    check_samples(calls, trajectory)
    num_breaks = len(trajectory_samples(trajectory)) - 1
    thoughts = [reply for _, reply in exchanges[:-1] if "</think>" in tokenizer.decode(reply[:MAX_TOKENS], False)]
    assert num_breaks == (len(thoughts) if renderer.drops_thinking else 0)


THINK_END = 256 + 7
END = special_id("<|im_end|>")


async def test_a_reply_that_thought_starts_a_new_branch_without_its_thinking() -> None:
    renderer = ChatRenderer(tokenizer=thinking_tokenizer(), template=DROPS_EARLIER_THINKING, special={})
    assert renderer.drops_thinking
    first = renderer.first("u")
    reply = (*text_ids("<think>w"), THINK_END, *text_ids("\n\nb"), END)
    prefix_len, new_ids = renderer.next(first, reply, "o")
    assert prefix_len == len(first)
    closing = renderer.next(first, (END,), "o")[1]
    assert new_ids == (*text_ids("b"), END, *closing)
    calls, trajectory = await play(renderer, [("u", reply), ("o", (*text_ids("c"), END)), ("p", (END,))])
    one, two = trajectory_samples(trajectory)
    assert one.ids.tolist() == [*first, *reply] and one.mask.sum() == len(reply)
    assert two.ids[: len(first) + 2].tolist() == [*first, *text_ids("b"), END]
    assert two.mask.sum() == len(calls[1].completion.ids) + 1


def test_a_prompt_without_thinking_equals_the_template() -> None:
    """The ids that are left spell what the template renders, where its newlines are tokens of their own."""
    renderer = ChatRenderer(tokenizer=thinking_tokenizer(), template=DROPS_EARLIER_THINKING, special={})
    reply = "<think>\nw\n</think>\n\nb"
    first, ids = renderer.first("u"), written_reply(renderer, "<think>\nw\n")
    sampled = (*ids[:-1], THINK_END, *text_ids("\n\nb"), END)
    prefix_len, new_ids = renderer.next(first, sampled, "o")
    messages = [
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": reply},
        {"role": "user", "content": "o"},
    ]
    rendered = renderer._render(messages)
    assert renderer._spell([*first, *sampled][:prefix_len] + list(new_ids)) == rendered


def test_a_conversation_that_thought_is_no_one_sequence_under_such_a_template() -> None:
    renderer = ChatRenderer(tokenizer=thinking_tokenizer(), template=DROPS_EARLIER_THINKING, special={})
    thought = {"role": "assistant", "content": "<think>w</think>b"}
    messages = [{"role": "user", "content": "u"}, thought]
    render_transcript(renderer, messages)
    with pytest.raises(TemplateRefused, match="does not keep message"):
        render_transcript(renderer, [*messages, *messages])
