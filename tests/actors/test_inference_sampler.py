import asyncio
import pickle
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from actors import inference_sampler
from actors.inference_config import InferencePoolConfig, KvReuse, ServerConfig
from actors.inference_errors import RequestDropped, ServerGone, ServerNotReady
from actors.inference_request import Part, Request
from actors.inference_sampler import PoolSampler
from actors.inference_wire import Address, serve
from envs.errors import ContextLimit, SamplerError
from envs.sampler import SamplingParams
from trajectories.schema import PolicyVersion, VersionSpan

PARAMS = SamplingParams(max_tokens=4)


VERSIONS = [PolicyVersion(lineage=0, n=n) for n in range(4)]


def part(*ids: int, version: int = 0, end: str = "") -> Part:
    span = VersionSpan(version=VERSIONS[version], num_tokens=len(ids))
    return Part(ids=ids, logprobs=tuple(-i / 8 for i in ids), spans=(span,) if ids else (), finish_reason=end)


class WireServer:
    """A server whose replies name it: after `begins` it samples only `id`."""

    def __init__(self, id: int, *, delay_s: float = 0.0) -> None:
        self.id = id
        self.delay_s = delay_s
        self.begins: list[Part] = []
        """Parts that it sends first."""
        self.raises: Exception | None = None
        self.requests: list[Request] = []
        self.running = 0
        self.address: Address | None = None

    async def start(self) -> "WireServer":
        self._listener, self.address = await serve(self._handle, "127.0.0.1", "token", load=lambda: self.running)
        return self

    async def locate(self) -> Address | None:
        return self.address

    async def _handle(self, request: Request, request_id: str):
        self.requests.append(request)
        self.running += 1
        try:
            for begin in self.begins:
                yield begin
            await asyncio.sleep(self.delay_s)
        finally:
            self.running -= 1
        if self.raises is not None:
            raise self.raises
        yield part(self.id, end="length")


class Listing:
    """A Directory over WireServers, which may come and go."""

    def __init__(self, *servers: WireServer) -> None:
        self.servers = list(servers)

    async def __call__(self):
        return {f"server-{server.id}": server.locate for server in self.servers}


async def pool_of(*servers: WireServer, request_timeout_s: float = 10.0, **config: Any) -> PoolSampler:
    for server in servers:
        await server.start()
    return PoolSampler(InferencePoolConfig(request_timeout_s=request_timeout_s, **config), Listing(*servers))


async def until(is_true: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not is_true():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def ask(sampler: PoolSampler, key: str, prompt: int = 5) -> int:
    return (await sampler.sample([prompt], PARAMS, stop_ids=[], key=key)).ids[0]


async def test_a_key_stays_on_its_server():
    sampler = await pool_of(WireServer(0), WireServer(1))
    first = await ask(sampler, "t0")
    assert {await ask(sampler, "t0") for _ in range(6)} == {first}


async def test_new_keys_go_to_the_least_loaded_server():
    sampler = await pool_of(WireServer(0, delay_s=0.2), WireServer(1, delay_s=0.2))
    used = Counter(await asyncio.gather(*(ask(sampler, f"t{k}") for k in range(10))))
    assert used == {0: 5, 1: 5}


async def test_a_server_that_refuses_is_left_and_the_key_moves():
    servers = WireServer(0), WireServer(1)
    sampler = await pool_of(*servers)
    first = await ask(sampler, "t")
    servers[first].raises = ServerNotReady("no proven weights yet")
    assert await ask(sampler, "t") == 1 - first
    servers[first].raises = None
    assert await ask(sampler, "t") == 1 - first, "it stays where it went"


async def test_a_server_that_comes_back_elsewhere_is_found_again():
    server = WireServer(0)
    sampler = await pool_of(server)
    assert await ask(sampler, "t") == 0
    server.raises = ServerNotReady("restarting")
    asking = asyncio.create_task(ask(sampler, "t"))
    await asyncio.sleep(0.1)
    server.raises = None
    old = server._listener
    await server.start()
    old.close()
    assert await asking == 0


async def test_attempts_end_with_what_each_server_said():
    server = WireServer(0)
    server.raises = ServerNotReady("server-0 is out of service: probe failed")
    sampler = await pool_of(server, max_attempts=2)
    with pytest.raises(SamplerError, match="gave up after 2 attempts: server-0 is out of service"):
        await ask(sampler, "t")


async def test_a_server_that_never_answers_is_named_at_the_deadline():
    sampler = await pool_of(WireServer(7, delay_s=60), request_timeout_s=0.2)
    with pytest.raises(SamplerError, match=r"no completion from server-7 within 0\.2 s"):
        await ask(sampler, "t")


async def test_no_server_at_all_is_named_at_the_deadline():
    server = WireServer(7)
    sampler = await pool_of(server, request_timeout_s=0.3)
    server._listener.close()
    server.address = None
    with pytest.raises(SamplerError, match=r"no completion from server-7 within 0\.3 s"):
        await ask(sampler, "t")


async def test_an_error_of_the_request_itself_is_not_tried_elsewhere():
    servers = WireServer(0), WireServer(1)
    sampler = await pool_of(*servers)
    for server in servers:
        server.raises = ContextLimit("prompt too long")
    with pytest.raises(ContextLimit, match="prompt too long"):
        await ask(sampler, "t")
    assert sum(len(server.requests) for server in servers) == 1


class Nowhere:
    async def __call__(self):
        async def nobody():
            return None

        return {"server-0": nobody}


async def test_a_sampler_is_pickled_without_its_connections():
    sampler = PoolSampler(InferencePoolConfig(request_timeout_s=0.1), Nowhere())
    copy = pickle.loads(pickle.dumps(sampler))
    with pytest.raises(SamplerError, match="server-0"):
        await ask(copy, "t")


async def test_a_reply_goes_on_elsewhere_after_the_tokens_that_came():
    servers = WireServer(0), WireServer(1)
    sampler = await pool_of(*servers)
    first = await ask(sampler, "t")
    servers[first].begins = [part(8, 9, version=1), part(9, version=2)]
    servers[first].raises = ServerGone("died")
    servers[1 - first].begins = [part(7, version=2)]
    params = SamplingParams(max_tokens=6, seed=3)
    completion = await sampler.sample([5, 6], params, stop_ids=[2], key="t")
    assert completion.ids == (8, 9, 9, 7, 1 - first) and completion.finish_reason == "length"
    assert completion.logprobs == tuple(-i / 8 for i in completion.ids)
    assert [(span.version.n, span.num_tokens) for span in completion.spans] == [(1, 2), (2, 2), (0, 1)]
    request = servers[1 - first].requests[-1]
    assert list(request.prompt_ids) == [5, 6, 8, 9, 9] and request.params.max_tokens == 3
    assert request.params.seed not in (3, None), "the same seed would draw the same numbers again"
    assert request.priority == servers[first].requests[-1].priority


async def test_attempts_that_bring_tokens_do_not_count():
    server = WireServer(0)
    sampler = await pool_of(server, max_attempts=2)
    server.begins, server.raises = [part(8)], RequestDropped("dropped for a weight update")
    params = SamplingParams(max_tokens=400)
    asking = asyncio.create_task(sampler.sample([5], params, stop_ids=[], key="t"))
    await until(lambda: len(server.requests) >= 5)
    server.raises = None
    completion = await asking
    assert set(completion.ids[:-1]) == {8} and len(completion.ids) == len(server.requests) + 1


async def test_a_server_that_refuses_a_request_ends_the_others_on_their_way():
    server = WireServer(0, delay_s=0.3)
    sampler = await pool_of(server)
    before = asyncio.create_task(ask(sampler, "before", prompt=5))
    await until(lambda: len(server.requests) == 1)
    server.raises, server.delay_s = ServerNotReady("server-0 is being removed"), 0.0
    refused = asyncio.create_task(ask(sampler, "after", prompt=6))
    await until(lambda: len(server.requests) == 2)
    await asyncio.sleep(0.1)
    server.raises = None
    assert await asyncio.gather(before, refused) == [0, 0]
    asked = Counter(request.prompt_ids[0] for request in server.requests)
    assert asked[5] == 1 and asked[6] >= 2, "the first was asked once, the second again after it was refused"


async def test_a_full_server_spills_to_one_with_less_than_half_its_load():
    servers = WireServer(0), WireServer(1)
    sampler = await pool_of(*servers, server=ServerConfig(max_num_seqs=4))
    home = await ask(sampler, "t")
    servers[home].running = servers[1 - home].running = 4
    assert await ask(sampler, "t") == home and await ask(sampler, "u") == 1 - home
    servers[1 - home].running = 1
    assert await ask(sampler, "u") == 1 - home
    assert await ask(sampler, "t") == 1 - home


async def test_servers_that_are_added_and_removed_are_found(monkeypatch):
    monkeypatch.setattr(inference_sampler, "LIST_S", 0.0)
    servers = WireServer(0), WireServer(1)
    sampler = await pool_of(servers[0])
    assert await ask(sampler, "t") == 0
    sampler._directory.servers = [await servers[1].start()]
    assert await ask(sampler, "t") == 1
    assert {await ask(sampler, f"k{k}") for k in range(4)} == {1}


async def test_groups_are_served_in_the_order_in_which_they_were_first_seen():
    server = WireServer(0)
    sampler = await pool_of(server)
    for key in ("g@0.0.0", "h@0.0.0", "g@0.0.1", "g@0.0.0"):
        await ask(sampler, key)
        await asyncio.sleep(0.003)
    g, h, g_too, g_again = (request.priority for request in server.requests)
    assert g == g_too == g_again < h


@pytest.mark.parametrize(("kv_reuse", "salt"), [(KvReuse.NEVER, ""), (KvReuse.TRAJECTORY, "t.0")])
async def test_a_trajectory_has_a_cache_of_its_own_where_it_may_be_reused(kv_reuse: KvReuse, salt: str):
    server = WireServer(0)
    sampler = await pool_of(server, kv_reuse=kv_reuse)
    await ask(sampler, "t.0")
    assert server.requests[0].salt == salt


async def test_a_server_that_does_not_say_where_it_listens_holds_up_no_request_of_the_others():
    class Starting(WireServer):
        async def locate(self):
            await asyncio.sleep(60)

    sampler = await pool_of(Starting(0), WireServer(1))
    async with asyncio.timeout(5):
        assert {await ask(sampler, f"t{k}") for k in range(4)} == {1}
