import asyncio
import socket
from contextlib import asynccontextmanager

import pytest

from actors.inference_errors import NonFiniteLogprobs, ServerGone
from actors.inference_request import Part, Request
from actors.inference_wire import Channel, serve
from envs.errors import ContextLimit, SamplerError
from envs.sampler import SamplingParams
from trajectories.schema import PolicyVersion, VersionSpan

SPANS = (
    VersionSpan(version=PolicyVersion(lineage=0, n=6), num_tokens=1),
    VersionSpan(version=PolicyVersion(lineage=1, n=7), num_tokens=2),
)
REPLY = Part(ids=(9, 70_000, 2), logprobs=(-0.1, -1e-9, -20.25), spans=SPANS, finish_reason="stop")
PARAMS = SamplingParams(temperature=0.7, top_p=0.9, top_k=5, max_tokens=3, seed=11)
FIRST = Part(ids=(4,), logprobs=(-0.5,), spans=SPANS[:1])
REQUEST = Request(prompt_ids=[1, 2, 70_000], params=PARAMS, stop_ids=(2,), priority=1_800_000_000_000, salt="t.0")


async def ask(channel, request=REQUEST):
    parts = []
    await channel.request(request, parts)
    return parts


@asynccontextmanager
async def channel_to(handle, token="right", offered="right"):
    server, address = await serve(handle, "127.0.0.1", token, load=lambda: 4)
    channel = await Channel.open("server-0", type(address)(host=address.host, port=address.port, token=offered))
    try:
        yield channel
    finally:
        channel.close()
        server.close()


async def test_a_request_and_the_parts_of_its_reply_cross_unchanged():
    seen = []

    async def handle(request, request_id):
        seen.append(request)
        yield FIRST
        yield REPLY

    async with channel_to(handle) as channel:
        assert await ask(channel) == [FIRST, REPLY]
        assert channel.server_load == 4 and channel.num_pending == 0
    (request,) = seen
    assert list(request.prompt_ids) == [1, 2, 70_000] and list(request.stop_ids) == [2] and request.params == PARAMS
    assert (request.priority, request.salt) == (1_800_000_000_000, "t.0")


async def test_a_connection_to_a_node_that_was_lost_ends_within_half_a_minute():
    async def handle(request, request_id):
        yield REPLY

    async with channel_to(handle) as channel:
        peer = channel._transport.get_extra_info("socket")
        assert peer.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert peer.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) <= 30_000
        idle, interval, count = (
            peer.getsockopt(socket.IPPROTO_TCP, option)
            for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        )
        assert idle + interval * count <= 30


async def test_the_first_to_end_is_answered_first():
    async def handle(request, request_id):
        await asyncio.sleep(request.prompt_ids[0] / 50)
        yield REPLY

    async with channel_to(handle) as channel:
        ended = []

        async def ask_for(delay):
            await ask(channel, Request(prompt_ids=[delay], params=PARAMS, stop_ids=[]))
            ended.append(delay)

        await asyncio.gather(ask_for(6), ask_for(3), ask_for(0))
    assert ended == [0, 3, 6]


@pytest.mark.parametrize("error", [ContextLimit("too long"), NonFiniteLogprobs("nan at 3"), ServerGone("died")])
async def test_a_typed_error_arrives_as_it_was_raised(error):
    async def handle(request, request_id):
        raise error
        yield REPLY

    async with channel_to(handle) as channel:
        with pytest.raises(type(error), match=str(error)):
            await ask(channel)


async def test_a_bug_in_the_server_fails_its_request_and_no_other(caplog):
    async def handle(request, request_id):
        if request.prompt_ids[0] == 0:
            raise KeyError("bug")
        yield REPLY

    async with channel_to(handle) as channel:
        with pytest.raises(SamplerError, match="the server failed: KeyError"):
            await ask(channel, Request(prompt_ids=[0], params=PARAMS, stop_ids=[]))
        assert await ask(channel) == [REPLY]


async def test_cancelling_a_request_cancels_the_work_for_it():
    cancelled = asyncio.Event()

    async def handle(request, request_id):
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.set()
            raise
        yield REPLY

    async with channel_to(handle) as channel:
        asking = asyncio.create_task(ask(channel))
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
        yield REPLY

    async with channel_to(handle) as channel:
        asking = [asyncio.create_task(ask(channel)) for _ in range(3)]
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
        yield REPLY

    async with channel_to(handle, offered="wrong") as channel:
        with pytest.raises(ServerGone):
            await asyncio.wait_for(ask(channel), 5)


async def test_nobody_listening_is_a_server_that_is_gone():
    async def handle(request, request_id):
        yield REPLY

    server, address = await serve(handle, "127.0.0.1", "right", load=lambda: 0)
    server.close()
    await server.wait_closed()
    with pytest.raises(ServerGone, match="server-0: no connection"):
        await Channel.open("server-0", address)


async def test_a_connection_that_breaks_leaves_the_parts_that_came():
    async def handle(request, request_id):
        yield FIRST
        await asyncio.sleep(60)

    async with channel_to(handle) as channel:
        parts: list[Part] = []
        asking = asyncio.create_task(channel.request(REQUEST, parts))
        for _ in range(500):
            await asyncio.sleep(0.01)
            if parts:
                break
        channel.close()
        with pytest.raises(ServerGone, match="connection closed"):
            await asking
    assert parts == [FIRST]


async def test_a_reply_without_a_last_part_fails_instead_of_hanging(caplog):
    async def handle(request, request_id):
        yield FIRST

    async with channel_to(handle) as channel:
        with pytest.raises(SamplerError, match="ended without its last part"):
            await asyncio.wait_for(ask(channel), 5)
