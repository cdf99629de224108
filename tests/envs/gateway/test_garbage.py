"""Whatever a client or a policy writes is answered or refused; nothing is a bug of ours, which would end the run."""

import json
from typing import Any

import httpx2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs.sampler import SamplingParams
from tests.envs.gateway.doors import MODEL, Gateway, make_gateway

CHAT, MESSAGES, RESPONSES, COMPLETIONS = "/v1/chat/completions", "/v1/messages", "/v1/responses", "/v1/completions"
HELLO = [{"role": "user", "content": "hi"}]
HALF = "\ud83d"
"""Half a surrogate pair: JSON can spell it, UTF-8 cannot."""
FUNCTION = {"name": "bash", "description": "d", "parameters": {"type": "object", "properties": {}}}
CALL = {"id": "c", "type": "function", "function": {"name": "bash", "arguments": "{}"}}
WHOLE: dict[str, dict[str, Any]] = {
    CHAT: {
        "model": MODEL,
        "messages": [*HELLO, {"role": "assistant", "content": None, "tool_calls": [CALL]}, *HELLO],
        "tools": [{"type": "function", "function": FUNCTION}],
        "tool_choice": "auto",
        "stream": False,
        "stream_options": {"include_usage": True},
        "temperature": 0.5,
    },
    MESSAGES: {
        "model": MODEL,
        "messages": [
            *HELLO,
            {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "bash", "input": {"a": 1}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "x"}]},
        ],
        "tools": [{"name": "bash", "description": "d", "input_schema": {"type": "object"}}],
        "tool_choice": {"type": "auto"},
        "max_tokens": 9,
        "system": [{"type": "text", "text": "s"}],
    },
    RESPONSES: {
        "model": MODEL,
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
            {"type": "function_call", "call_id": "c", "name": "bash", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "x"},
        ],
        "tools": [{"type": "function", **FUNCTION}],
        "instructions": "i",
    },
    COMPLETIONS: {"model": MODEL, "prompt": [1, 2], "stream_options": {}, "logprobs": 1, "max_tokens": 9},
}
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(["", "x", HALF, "user", "function"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["type", "text", HALF]), inner),
    max_leaves=4,
)


async def post(gateway: Gateway, path: str, body: bytes | dict[str, Any]) -> httpx2.Response:
    transport = httpx2.ASGITransport(app=gateway.app, raise_app_exceptions=False)
    async with httpx2.AsyncClient(transport=transport, base_url="http://door") as client:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return await client.post(path, content=content, headers={"Authorization": f"Bearer {gateway.session.token}"})


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths of everything inside a body."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [found for key, item in inner for found in ((*path, key), *places(item, (*path, key)))]


def replaced(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    copy = value.copy()
    copy[path[0]] = replaced(value[path[0]], path[1:], new)
    return copy


@pytest.mark.parametrize("path", WHOLE)
async def test_the_bodies_that_are_spoiled_below_are_answered(path: str) -> None:
    gateway = make_gateway("x")
    assert (await post(gateway, path, WHOLE[path])).status_code == 200


@pytest.mark.parametrize("path", WHOLE)
@settings(max_examples=150)
@given(data=st.data())
async def test_a_body_with_anything_anywhere_is_answered_or_refused(path: str, data: st.DataObject) -> None:
    place = data.draw(st.sampled_from(places(WHOLE[path])))
    gateway = make_gateway("x")
    answer = await post(gateway, path, replaced(WHOLE[path], place, data.draw(ANYTHING)))
    assert answer.status_code in (200, 400, 404)
    assert gateway.session.bug is None


@pytest.mark.parametrize(
    "body",
    [
        b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        json.dumps({"model": MODEL, HALF: 1}).encode(),
        b"\xff",
        b"",
        b"[NaN]",
        b"1e999",
    ],
    ids=["deep", "half a pair", "no UTF-8", "empty", "NaN", "infinite"],
)
async def test_a_body_that_is_no_text_is_refused(body: bytes) -> None:
    gateway = make_gateway("x")
    answer = await post(gateway, CHAT, body)
    assert answer.status_code == 400 and "the body is" in answer.json()["error"]["message"]


@pytest.mark.parametrize("ids", [[-1], [1, 2**40]])
async def test_ids_that_no_token_has_are_refused(ids: list[int]) -> None:
    answer = await post(make_gateway("x"), COMPLETIONS, {"model": MODEL, "prompt": ids})
    assert answer.status_code == 400 and "has the token id" in answer.json()["error"]["message"]


@pytest.mark.parametrize("arguments", ['{"a": "\\ud83d"}', "[" * 100_000, "NaN"])
async def test_arguments_that_a_client_sends_back_are_taken_as_they_are(arguments: str) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "bash", "arguments": arguments}}
    said = [*HELLO, {"role": "assistant", "content": "", "tool_calls": [call]}, *HELLO]
    gateway = make_gateway("x", context_tokens=200_000)
    assert (await post(gateway, CHAT, {"model": MODEL, "messages": said})).status_code == 200


@pytest.mark.parametrize("value", ['"\\ud83d"', "NaN", "1e999", "[" * 200 + "]" * 200])
@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_call_that_other_readers_of_json_refuse_stays_among_the_words(
    path: str, value: str, is_stream: bool
) -> None:
    reply = f'<tool_call>\n{{"name": "bash", "arguments": {{"command": {value}}}}}\n</tool_call>'
    gateway = make_gateway(reply, sampling=SamplingParams(max_tokens=900))
    answer = await post(
        gateway,
        path,
        WHOLE[path] | {"stream": is_stream, "max_tokens": 900}
        if path == MESSAGES
        else WHOLE[path] | {"stream": is_stream},
    )
    assert answer.status_code == 200 and "<tool_call>" in answer.text
    assert gateway.session.bug is None
