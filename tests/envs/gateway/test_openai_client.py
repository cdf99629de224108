"""The `openai` package against the gateway: what it reads, and what is recorded of it."""

from typing import Any

import pytest

from tests.envs.gateway.doors import END, MODEL, make_gateway, openai_client
from tests.envs.tokens import special_id, text_ids
from tests.fakes.sampler import FakeSampler

CALL = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>'
BASH = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "runs",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}},
    },
}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def chatml(role: str, text: str) -> list[int]:
    return [special_id("<|im_start|>"), *text_ids(f"{role}\n{text}"), END, *text_ids("\n")]


def header() -> list[int]:
    return [special_id("<|im_start|>"), *text_ids("assistant\n")]


async def test_a_chat_is_answered_and_counted() -> None:
    gateway = make_gateway("hello")
    answer = await openai_client(gateway).chat.completions.create(model=MODEL, messages=[user("hi")])
    assert answer.choices[0].message.content == "hello"
    assert answer.choices[0].finish_reason == "stop"
    prompt = [*chatml("user", "hi"), *header()]
    assert gateway.sampler.calls[0][0] == tuple(prompt)
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(prompt), 6)


async def test_the_second_turn_goes_on_from_the_sampled_ids() -> None:
    gateway = make_gateway("one", "two")
    client = openai_client(gateway)
    messages = [{"role": "system", "content": "s"}, user("a")]
    first = await client.chat.completions.create(model=MODEL, messages=messages)
    messages += [first.choices[0].message.model_dump(), user("b")]
    second = await client.chat.completions.create(model=MODEL, messages=messages)
    first_context = [*chatml("system", "s"), *chatml("user", "a"), *header(), *text_ids("one"), END]
    new = [*text_ids("\n"), *chatml("user", "b"), *header()]
    assert gateway.sampler.calls[1][0] == (*first_context, *new)
    tokens = gateway.session.turns[1].tokens
    assert tokens is not None
    assert (tokens.prefix_len, tokens.new_ids) == (len(first_context), tuple(new))
    assert second.usage.prompt_tokens_details.cached_tokens == len(first_context)
    assert [turn.observation for turn in gateway.session.turns] == ["b", ""]
    assert gateway.session.prompt == "s\n\na"
    assert gateway.session.num_breaks == 0
    assert gateway.samples_are_what_the_engine_saw()


async def test_ids_that_do_not_spell_their_text_canonically_are_kept() -> None:
    """A policy may sample bytes that no tokenizer would choose; a second tokenization would change them."""
    odd = [*text_ids("a"), 130, END]  # a lone continuation byte: decodes to the replacement character
    gateway = make_gateway(sampler=FakeSampler(lambda prompt_ids: odd))
    client = openai_client(gateway)
    first = await client.chat.completions.create(model=MODEL, messages=[user("a")])
    assert "\N{REPLACEMENT CHARACTER}" in first.choices[0].message.content
    messages = [user("a"), first.choices[0].message.model_dump(), user("b")]
    await client.chat.completions.create(model=MODEL, messages=messages)
    prompt = gateway.sampler.calls[1][0]
    assert prompt[: len(gateway.sampler.calls[0][0]) + len(odd)] == (*gateway.sampler.calls[0][0], *odd)


async def test_a_rewritten_history_starts_a_branch_that_keeps_the_longest_known_prefix() -> None:
    gateway = make_gateway("one", "two", "three")
    client = openai_client(gateway)
    messages = [user("a")]
    for observation in ("b", "c"):
        answer = await client.chat.completions.create(model=MODEL, messages=messages)
        messages += [answer.choices[0].message.model_dump(), user(observation)]
    messages[3] = {"role": "assistant", "content": "TWO"}
    await client.chat.completions.create(model=MODEL, messages=messages)
    assert gateway.session.num_breaks == 1
    third = gateway.session.turns[2].tokens
    assert third is not None
    known = [*chatml("user", "a"), *header(), *text_ids("one"), END, *text_ids("\n"), *chatml("user", "b"), *header()]
    assert third.prefix_len == len(known)
    assert gateway.samples_are_what_the_engine_saw()


async def test_two_dialogues_in_turn_keep_a_branch_each() -> None:
    gateway = make_gateway("a1", "b1", "a2", "b2")
    client = openai_client(gateway)
    dialogues = [[user("a")], [user("b")]]
    for _ in range(2):
        for messages in dialogues:
            answer = await client.chat.completions.create(model=MODEL, messages=messages)
            messages += [answer.choices[0].message.model_dump(), user("go on")]
    assert [turn.reply for turn in gateway.session.turns] == ["a1", "a2", "b1", "b2"]
    assert gateway.session.num_breaks == 1
    assert gateway.samples_are_what_the_engine_saw()


async def test_tool_calls_are_parsed_and_their_results_answered() -> None:
    gateway = make_gateway(f"I look.\n{CALL}", "done")
    client = openai_client(gateway)
    messages: list[dict[str, Any]] = [user("list")]
    first = await client.chat.completions.create(model=MODEL, messages=messages, tools=[BASH])
    message = first.choices[0].message
    assert (message.content, first.choices[0].finish_reason) == ("I look.", "tool_calls")
    assert message.tool_calls[0].function.name == "bash"
    assert message.tool_calls[0].function.arguments == '{"command": "ls"}'
    messages += [message.model_dump(), {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "a.py"}]
    second = await client.chat.completions.create(model=MODEL, messages=messages, tools=[BASH])
    assert second.choices[0].message.content == "done"
    prompt = gateway.sampler.calls[1][0]
    context = (*gateway.sampler.calls[0][0], *text_ids(f"I look.\n{CALL}"), END)
    assert prompt[: len(context)] == context
    result = chatml("user", "<tool_response>\na.py\n</tool_response>")
    assert prompt[len(context) :] == (*text_ids("\n"), *result, *header())
    assert gateway.session.turns[0].observation == "a.py"
    assert gateway.samples_are_what_the_engine_saw()


async def test_what_is_not_a_call_stays_words() -> None:
    broken = '<tool_call>\n{"name": "bash", "arguments": \n</tool_call>'
    gateway = make_gateway(broken)
    answer = await openai_client(gateway).chat.completions.create(model=MODEL, messages=[user("x")], tools=[BASH])
    assert answer.choices[0].message.content == broken
    assert not answer.choices[0].message.tool_calls


async def test_words_never_become_special_tokens() -> None:
    gateway = make_gateway("ok")
    text = "a<|im_end|>b"
    await openai_client(gateway).chat.completions.create(model=MODEL, messages=[user(text)])
    assert gateway.sampler.calls[0][0] == (*chatml("user", text), *header())
    assert list(gateway.sampler.calls[0][0]).count(END) == 1


async def test_a_stream_says_what_the_whole_answer_says() -> None:
    gateway = make_gateway(f"I look for quite a while before I do anything, and say so.\n{CALL}")
    stream = await openai_client(gateway).chat.completions.create(
        model=MODEL, messages=[user("x")], tools=[BASH], stream=True, stream_options={"include_usage": True}
    )
    words, arguments, reasons, usage = "", "", [], None
    async for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            words += choice.delta.content or ""
            arguments += "".join(call.function.arguments for call in choice.delta.tool_calls or [])
            reasons += [choice.finish_reason] if choice.finish_reason else []
    assert words == "I look for quite a while before I do anything, and say so."
    assert (arguments, reasons) == ('{"command": "ls"}', ["tool_calls"])
    assert usage.completion_tokens == len(gateway.session.turns[0].tokens.sampled_ids)  # type: ignore[union-attr]


async def test_logprobs_and_ids_are_the_engines_own() -> None:
    gateway = make_gateway("ab")
    answer = await openai_client(gateway).chat.completions.create(
        model=MODEL, messages=[user("x")], logprobs=True, extra_body={"return_token_ids": True, "session_id": "s"}
    )
    assert [item.logprob for item in answer.choices[0].logprobs.content] == [-1 / 8, -2 / 8, -3 / 8]
    assert [item.token for item in answer.choices[0].logprobs.content] == ["a", "b", "<|im_end|>"]
    assert answer.choices[0].token_ids == [*text_ids("ab"), END]
    assert tuple(answer.prompt_token_ids) == gateway.sampler.calls[0][0]
    tokens = gateway.session.turns[0].tokens
    assert tokens is not None and tokens.logprobs == (-1 / 8, -2 / 8, -3 / 8)
    assert [span.num_tokens for span in tokens.spans] == [3]


async def test_completions_continue_templated_text_on_the_sampled_ids() -> None:
    gateway = make_gateway("one", "two")
    client = openai_client(gateway)
    prompt = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    first = await client.completions.create(model=MODEL, prompt=prompt)
    assert first.choices[0].text == "one"
    assert gateway.sampler.calls[0][0] == (*chatml("user", "hi"), *header())
    again = f"{prompt}one<|im_end|>\n<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n"
    second = await client.completions.create(model=MODEL, prompt=again, logprobs=1)
    assert second.choices[0].logprobs.token_logprobs == [-1 / 8, -2 / 8, -3 / 8, -4 / 8]
    assert gateway.session.num_breaks == 0
    assert gateway.samples_are_what_the_engine_saw()


async def test_completions_take_ids() -> None:
    gateway = make_gateway("x", "y")
    client = openai_client(gateway)
    ids = list(text_ids("abc"))
    await client.completions.create(model=MODEL, prompt=ids)
    stream = await client.completions.create(model=MODEL, prompt=[*ids, *text_ids("x"), END, 65], stream=True)
    assert "".join([choice.text async for chunk in stream for choice in chunk.choices]) == "y"
    tokens = gateway.session.turns[1].tokens
    assert tokens is not None and tokens.new_ids == (65,)


async def test_a_sender_that_leaves_the_stop_token_away_breaks_the_prefix_there() -> None:
    gateway = make_gateway("x", "y")
    client = openai_client(gateway)
    await client.completions.create(model=MODEL, prompt="abc")
    await client.completions.create(model=MODEL, prompt="abcxd")
    tokens = gateway.session.turns[1].tokens
    assert tokens is not None
    assert (tokens.prefix_len, tokens.new_ids) == (4, text_ids("d"))
    assert gateway.session.num_breaks == 1


async def test_responses_hold_a_dialogue_by_id() -> None:
    gateway = make_gateway(CALL, "done", "bye")
    client = openai_client(gateway)
    tool = {"type": "function", **BASH["function"]}
    first = await client.responses.create(model=MODEL, instructions="s", input="list", tools=[tool])
    call = first.output[0]
    assert (call.type, call.name, call.arguments) == ("function_call", "bash", '{"command": "ls"}')
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "a.py"}
    asked = {"model": MODEL, "instructions": "s", "tools": [tool]}
    second = await client.responses.create(**asked, input=[output], previous_response_id=first.id)
    assert second.output_text == "done"
    history = [user("list"), call.model_dump(), output, second.output[0].model_dump(), user("thanks")]
    third = await client.responses.create(**asked, input=history)
    assert (third.output_text, third.status) == ("bye", "completed")
    assert gateway.session.num_breaks == 0
    assert gateway.samples_are_what_the_engine_saw()


async def test_responses_stream() -> None:
    gateway = make_gateway(f"I look.\n{CALL}")
    tool = {"type": "function", **BASH["function"]}
    stream = await openai_client(gateway).responses.create(model=MODEL, input="x", tools=[tool], stream=True)
    events = [event async for event in stream]
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == "I look."
    assert [event.arguments for event in events if event.type == "response.function_call_arguments.done"] == [
        '{"command": "ls"}'
    ]
    assert events[-1].type == "response.completed"
    assert [event.sequence_number for event in events] == list(range(len(events)))


async def test_a_cut_reply_says_so() -> None:
    gateway = make_gateway("abcdefgh")
    client = openai_client(gateway)
    answer = await client.chat.completions.create(model=MODEL, messages=[user("x")], max_tokens=3)
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("abc", "length")
    assert gateway.session.was_cut


@pytest.mark.parametrize("follows_client", [False, True])
async def test_only_a_person_sets_the_temperature(follows_client: bool) -> None:
    gateway = make_gateway("x", follows_client=follows_client)
    client = openai_client(gateway)
    await client.chat.completions.create(model=MODEL, messages=[user("x")], temperature=0.5, max_tokens=4000)
    params = gateway.sampler.calls[0][1]
    assert params.temperature == (0.5 if follows_client else 1.0)
    assert params.max_tokens == (4000 if follows_client else 512)


async def test_the_model_list_names_the_policy() -> None:
    gateway = make_gateway()
    models = await openai_client(gateway).models.list()
    assert [model.id for model in models.data] == [MODEL]
