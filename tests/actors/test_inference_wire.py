import asyncio
from contextlib import asynccontextmanager

import pytest

from actors.inference_errors import NonFiniteLogprobs, ServerGone
from actors.inference_wire import Channel, Request, serve
from envs.errors import ContextLimit, SamplerError
from envs.sampler import Completion, SamplingParams
from trajectories.schema import PolicyVersion, VersionSpan

SPANS = (
    VersionSpan(version=PolicyVersion(lineage=0, n=6), num_tokens=1),
    VersionSpan(version=PolicyVersion(lineage=1, n=7), num_tokens=2),
)
REPLY = Completion(ids=(9, 70_000, 2), logprobs=(-0.1, -1e-9, -20.25), spans=SPANS, finish_reason="stop")
PARAMS = SamplingParams(temperature=0.7, top_p=0.9, top_k=5, max_tokens=3, seed=11)
REQUEST = Request(prompt_ids=[1, 2, 70_000], params=PARAMS, stop_ids=(2,))


@asynccontextmanager
async def channel_to(handle, token="right", offered="right"):
    server, address = await serve(handle, "127.0.0.1", token, load=lambda: 4)
    channel = await Channel.open("server-0", type(address)(host=address.host, port=address.port, token=offered))
    try:
        yield channel
    finally:
        channel.close()
        server.close()


async def test_a_request_and_its_completion_cross_unchanged():
    seen = []

    async def handle(request, request_id):
        seen.append(request)
        return REPLY

    async with channel_to(handle) as channel:
        assert await channel.request(REQUEST) == REPLY
        assert channel.server_load == 4 and channel.num_pending == 0
    (request,) = seen
    assert list(request.prompt_ids) == [1, 2, 70_000] and list(request.stop_ids) == [2] and request.params == PARAMS


async def test_the_first_to_end_is_answered_first():
    async def handle(request, request_id):
        await asyncio.sleep(request.prompt_ids[0] / 50)
        return REPLY

    async with channel_to(handle) as channel:
        ended = []

        async def ask(delay):
            await channel.request(Request(prompt_ids=[delay], params=PARAMS, stop_ids=[]))
            ended.append(delay)

        await asyncio.gather(ask(6), ask(3), ask(0))
    assert ended == [0, 3, 6]


@pytest.mark.parametrize("error", [ContextLimit("too long"), NonFiniteLogprobs("nan at 3"), ServerGone("died")])
async def test_a_typed_error_arrives_as_it_was_raised(error):
    async def handle(request, request_id):
        raise error

    async with channel_to(handle) as channel:
        with pytest.raises(type(error), match=str(error)):
            await channel.request(REQUEST)


async def test_a_bug_in_the_server_fails_its_request_and_no_other(caplog):
    async def handle(request, request_id):
        if request.prompt_ids[0] == 0:
            raise KeyError("bug")
        return REPLY

    async with channel_to(handle) as channel:
        with pytest.raises(SamplerError, match="the server failed: KeyError"):
            await channel.request(Request(prompt_ids=[0], params=PARAMS, stop_ids=[]))
        assert await channel.request(REQUEST) == REPLY


async def test_cancelling_a_request_cancels_the_work_for_it():
    cancelled = asyncio.Event()

    async def handle(request, request_id):
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    async with channel_to(handle) as channel:
        asking = asyncio.create_task(channel.request(REQUEST))
        await asyncio.sleep(0.05)
        asking.cancel()
        await asyncio.wait_for(cancelled.wait(), 5)
        assert channel.num_pending == 0


async def test_a_client_that_goes_away_cancels_all_it_asked_for():
    cancelled = []

    async def handle(request, request_id):
        try:
            await asyncio.sleep(60)
        finally:
            cancelled.append(request_id)

    async with channel_to(handle) as channel:
        asking = [asyncio.create_task(channel.request(REQUEST)) for _ in range(3)]
        await asyncio.sleep(0.05)
        channel.close()
        results = await asyncio.gather(*asking, return_exceptions=True)
        assert [type(result) for result in results] == [ServerGone] * 3
        for _ in range(100):
            await asyncio.sleep(0.01)
            if len(cancelled) == 3:
                break
    assert len(cancelled) == 3


async def test_a_wrong_token_gets_nothing():
    async def handle(request, request_id):
        return REPLY

    async with channel_to(handle, offered="wrong") as channel:
        with pytest.raises(ServerGone):
            await asyncio.wait_for(channel.request(REQUEST), 5)


async def test_nobody_listening_is_a_server_that_is_gone():
    async def handle(request, request_id):
        return REPLY

    server, address = await serve(handle, "127.0.0.1", "right", load=lambda: 0)
    server.close()
    await server.wait_closed()
    with pytest.raises(ServerGone, match="server-0: no connection"):
        await Channel.open("server-0", address)
