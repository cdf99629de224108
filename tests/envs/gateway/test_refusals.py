"""Who may ask, what is refused, and what a failure becomes; spelled as OpenAI's clients read it."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import openai
import pytest

from envs.errors import ContextLimit, SamplerError, TurnLimit
from envs.sampler import Completion, SamplingParams
from tests.envs.gateway.doors import MODEL, Gateway, make_gateway, openai_client, replies
from tests.fakes.sampler import FakeSampler

HELLO: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]


async def ask(gateway: Gateway, token: str | None = None, **asked: Any) -> Any:
    return await openai_client(gateway, token).chat.completions.create(**{"model": MODEL, "messages": HELLO} | asked)


def forged(gateway: Gateway) -> list[str]:
    token = gateway.session.token
    return ["x", token[:-1], f"{token}x", token.replace(".", "", 1), f"thresher.{gateway.session.id}."]


async def test_only_the_sessions_own_token_opens_it() -> None:
    gateway = make_gateway("x")
    for token in forged(gateway):
        with pytest.raises(openai.AuthenticationError) as caught:
            await ask(gateway, token)
        assert caught.value.code == "invalid_api_key"
    assert gateway.sampler.calls == []
    await ask(gateway)


async def test_tokens_differ_and_end_with_their_session() -> None:
    gateway, other = make_gateway("x"), make_gateway("x")
    assert gateway.session.token != other.session.token
    gateway.session.close()
    with pytest.raises(openai.AuthenticationError):
        await ask(gateway)


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"n": 2}, "n"),
        ({"stop": ["x"]}, "stop"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"temperature": 3}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"extra_body": {"guided_json": {}}}, "guided_json"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "alien", "content": "x"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages.content"),
    ],
)
async def test_what_cannot_be_done_is_refused_by_name(asked: dict[str, Any], param: str) -> None:
    gateway = make_gateway()
    with pytest.raises(openai.BadRequestError) as caught:
        await ask(gateway, **asked)
    assert caught.value.param == param
    assert gateway.sampler.calls == []


async def test_fields_that_ask_for_nothing_are_taken() -> None:
    gateway = make_gateway("x")
    await ask(gateway, n=1, presence_penalty=0, stop=None, user="u", metadata={"a": "b"}, parallel_tool_calls=True)


async def test_another_model_is_not_found() -> None:
    gateway = make_gateway()
    with pytest.raises(openai.NotFoundError) as caught:
        await ask(gateway, model="gpt-4")
    assert caught.value.code == "model_not_found"


async def test_an_unknown_path_is_not_found_in_the_protocols_shape() -> None:
    gateway = make_gateway()
    with pytest.raises(openai.NotFoundError, match="no such endpoint"):
        await openai_client(gateway).embeddings.create(model=MODEL, input="x")


async def test_a_prompt_that_does_not_fit_is_a_context_limit() -> None:
    gateway = make_gateway("ok", context_tokens=60)
    with pytest.raises(openai.BadRequestError) as caught:
        await ask(gateway, messages=[{"role": "user", "content": "x" * 80}])
    assert caught.value.code == "context_length_exceeded"
    assert isinstance(gateway.session.failure, ContextLimit)
    await ask(gateway)
    assert gateway.session.failure is None, "an agent that made its history shorter goes on"


async def test_past_the_turn_limit_nothing_is_sampled() -> None:
    gateway = make_gateway("x", max_turns=1)
    await ask(gateway)
    with pytest.raises(openai.PermissionDeniedError) as caught:
        await ask(gateway)
    assert caught.value.code == "turn_limit"
    assert isinstance(gateway.session.failure, TurnLimit)
    assert len(gateway.session.turns) == 1


async def test_a_sampler_that_gives_up_is_the_servers_fault() -> None:
    gateway = make_gateway(sampler=FakeSampler(replies(), fails_at=0))
    with pytest.raises(openai.InternalServerError) as caught:
        await ask(gateway)
    assert caught.value.status_code == 503
    assert isinstance(gateway.session.failure, SamplerError)
    assert gateway.session.turns == []


class HeldSampler(FakeSampler):
    """Answers when told to."""

    def __init__(self, reply: Callable[[Sequence[int]], Sequence[int]]) -> None:
        super().__init__(reply)
        self.go = asyncio.Event()
        self.asked = asyncio.Semaphore(0)

    async def sample(
        self, prompt_ids: Sequence[int], params: SamplingParams, *, stop_ids: Sequence[int], key: str
    ) -> Completion:
        completion = await super().sample(prompt_ids, params, stop_ids=stop_ids, key=key)
        self.asked.release()
        await self.go.wait()
        return completion


async def test_too_many_requests_at_once_are_told_to_wait() -> None:
    sampler = HeldSampler(replies("x", "y"))
    gateway = make_gateway(sampler=sampler, max_at_once=1)
    first = asyncio.create_task(ask(gateway))
    await sampler.asked.acquire()
    with pytest.raises(openai.RateLimitError) as caught:
        await ask(gateway)
    assert caught.value.response.headers["retry-after"] == "1"
    sampler.go.set()
    assert (await first).choices[0].message.content == "x"


async def test_two_requests_from_one_point_are_both_kept() -> None:
    sampler = HeldSampler(replies("x", "y"))
    gateway = make_gateway(sampler=sampler)
    asked = [asyncio.create_task(ask(gateway)) for _ in range(2)]
    await sampler.asked.acquire()
    await sampler.asked.acquire()
    sampler.go.set()
    await asyncio.gather(*asked)
    assert sorted(turn.reply for turn in gateway.session.turns) == ["x", "y"]
    assert gateway.session.num_breaks == 1
    assert gateway.samples_are_what_the_engine_saw()


async def test_closing_a_session_ends_what_is_in_flight() -> None:
    sampler = HeldSampler(replies("x"))
    gateway = make_gateway(sampler=sampler)
    asked = asyncio.create_task(ask(gateway))
    await sampler.asked.acquire()
    gateway.session.close()
    with pytest.raises(openai.AuthenticationError):
        await asked
    assert gateway.session.turns == []


async def test_a_bug_is_kept_for_the_owner_of_the_session() -> None:
    gateway = make_gateway(sampler=FakeSampler(lambda prompt_ids: 1 / 0))  # type: ignore[arg-type,return-value]
    with pytest.raises(ZeroDivisionError):
        await ask(gateway)
    assert isinstance(gateway.session.bug, ZeroDivisionError)


async def test_a_body_that_is_no_json_object_is_refused() -> None:
    import httpx2

    gateway = make_gateway()
    headers = {"x-api-key": gateway.session.token}
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app=gateway.app), headers=headers) as client:
        for body in (b"{", b"[]", b"\xff"):
            answer = await client.post("http://door/v1/chat/completions", content=body)
            assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")
