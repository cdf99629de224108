"""The `anthropic` package against the gateway: what it reads, and what is recorded of it."""

from typing import Any

import anthropic
import pytest

from tests.envs.gateway.doors import END, MODEL, anthropic_client, make_gateway, openai_client
from tests.envs.tokens import text_ids

CALL = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>'
BASH: dict[str, Any] = {
    "name": "bash",
    "description": "runs",
    "input_schema": {"type": "object", "properties": {"command": {"type": "string"}}},
}


async def test_a_message_is_answered_and_counted() -> None:
    gateway = make_gateway("hello")
    client = anthropic_client(gateway)
    asked: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "system": "s"}
    answer = await client.messages.create(max_tokens=100, **asked)
    assert (answer.content[0].text, answer.stop_reason) == ("hello", "end_turn")
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (len(gateway.sampler.calls[0][0]), 6)
    assert (await client.messages.count_tokens(**asked)).input_tokens == len(gateway.sampler.calls[0][0])


async def test_tool_use_goes_on_from_the_sampled_ids() -> None:
    gateway = make_gateway(f"I look.\n{CALL}", "done")
    client = anthropic_client(gateway)
    messages: list[dict[str, Any]] = [{"role": "user", "content": "list"}]
    first = await client.messages.create(model=MODEL, max_tokens=100, messages=messages, tools=[BASH])
    words, use = first.content
    assert (words.text, use.name, use.input, first.stop_reason) == ("I look.", "bash", {"command": "ls"}, "tool_use")
    result = {"type": "tool_result", "tool_use_id": use.id, "content": [{"type": "text", "text": "a.py"}]}
    messages += [
        {"role": "assistant", "content": [block.model_dump() for block in first.content]},
        {"role": "user", "content": [result, {"type": "text", "text": "go on"}]},
    ]
    second = await client.messages.create(model=MODEL, max_tokens=100, messages=messages, tools=[BASH])
    context = (*gateway.sampler.calls[0][0], *text_ids(f"I look.\n{CALL}"), END)
    assert gateway.sampler.calls[1][0][: len(context)] == context
    assert second.usage.cache_read_input_tokens == len(context)
    assert gateway.session.turns[0].observation == "a.py\n\ngo on"
    assert gateway.session.num_breaks == 0
    assert gateway.samples_are_what_the_engine_saw()


async def test_a_stream_gathers_to_the_whole_message() -> None:
    gateway = make_gateway(f"I look.\n{CALL}")
    stream = anthropic_client(gateway).messages.stream(
        model=MODEL, max_tokens=100, messages=[{"role": "user", "content": "x"}], tools=[BASH]
    )
    async with stream as events:
        message = await events.get_final_message()
    assert (message.content[0].text, message.content[1].input) == ("I look.", {"command": "ls"})
    assert message.stop_reason == "tool_use"
    assert message.usage.output_tokens == len(gateway.session.turns[0].tokens.sampled_ids)  # type: ignore[union-attr]


async def test_both_protocols_share_a_session() -> None:
    gateway = make_gateway("one", "two")
    first = await anthropic_client(gateway).messages.create(
        model=MODEL, max_tokens=9, messages=[{"role": "user", "content": "a"}]
    )
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": first.content[0].text},
        {"role": "user", "content": "b"},
    ]
    await openai_client(gateway).chat.completions.create(model=MODEL, messages=messages)
    assert gateway.session.num_breaks == 0 and len(gateway.session.turns) == 2


@pytest.mark.parametrize(
    ("asked", "problem"),
    [
        ({"tool_choice": {"type": "any"}}, "cannot be enforced"),
        ({"stop_sequences": ["x"]}, "not supported"),
        ({"thinking": {"type": "enabled", "budget_tokens": 2000}}, "not supported"),
        ({"extra_body": {"no_such_field": 1}}, "unknown field no_such_field"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "last message"),
    ],
)
async def test_what_is_not_supported_is_refused_in_its_own_shape(asked: dict[str, Any], problem: str) -> None:
    gateway = make_gateway()
    request: dict[str, Any] = {"model": MODEL, "max_tokens": 9, "messages": [{"role": "user", "content": "x"}]}
    with pytest.raises(anthropic.BadRequestError, match=problem) as caught:
        await anthropic_client(gateway).messages.create(**request | asked)
    assert caught.value.body["error"]["type"] == "invalid_request_error"  # type: ignore[index]
    assert gateway.sampler.calls == []


async def test_a_prompt_that_does_not_fit_is_told_in_anthropics_words() -> None:
    gateway = make_gateway(context_tokens=20)
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
        await anthropic_client(gateway).messages.create(
            model=MODEL, max_tokens=9, messages=[{"role": "user", "content": "x" * 30}]
        )
