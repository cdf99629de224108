"""The door over a real socket: it opens, streams, notices who leaves, and is gone when it is closed."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import httpx2
import pytest

from envs.gateway.door import Door
from tests.envs.gateway.doors import MODEL, Gateway, make_gateway, replies
from tests.envs.gateway.test_refusals import HeldSampler

BODY: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}


@asynccontextmanager
async def client_of(gateway: Gateway, door: Door) -> AsyncGenerator[httpx2.AsyncClient]:
    transport = httpx2.AsyncHTTPTransport(uds=str(door.path))
    headers = {"Authorization": f"Bearer {gateway.session.token}"}
    async with httpx2.AsyncClient(transport=transport, base_url="http://door", headers=headers) as client:
        yield client


async def test_a_door_answers_while_it_is_open_and_leaves_nothing() -> None:
    gateway = make_gateway("hello")
    door = Door(gateway.app)
    await door.open()
    await door.open()
    async with client_of(gateway, door) as client:
        assert (await client.get("/health")).json() == {"status": "ok"}
        answer = await client.post("/v1/chat/completions", json=BODY | {"stream": True})
        assert answer.text.endswith("data: [DONE]\n\n")
    await door.close()
    assert not door.directory.exists()
    async with client_of(gateway, door) as client:
        with pytest.raises(httpx2.ConnectError):
            await client.get("/health")


async def test_a_client_that_leaves_ends_its_request_and_leaves_no_turn() -> None:
    sampler = HeldSampler(replies("x", "y"))
    gateway = make_gateway(sampler=sampler, max_at_once=1)
    door = Door(gateway.app)
    await door.open()
    async with client_of(gateway, door) as client:
        asked = asyncio.create_task(client.post("/v1/chat/completions", json=BODY))
        await sampler.asked.acquire()
        asked.cancel()
        await asyncio.wait([asked])
        again = asyncio.create_task(_insist(client))  # a session that may have one request has none any more
        await sampler.asked.acquire()
        sampler.go.set()
        assert (await again).json()["choices"][0]["message"]["content"] == "y"
    await door.close()
    assert [turn.reply for turn in gateway.session.turns] == ["y"]


async def _insist(client: httpx2.AsyncClient) -> httpx2.Response:
    while (answer := await client.post("/v1/chat/completions", json=BODY)).status_code == 429:
        pass
    return answer
