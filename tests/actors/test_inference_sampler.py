import asyncio
import pickle
from collections import Counter

import pytest

from actors.inference_config import InferencePoolConfig
from actors.inference_errors import ServerNotReady
from actors.inference_sampler import PoolSampler
from actors.inference_wire import Address, Request, serve
from envs.errors import ContextLimit, SamplerError
from envs.sampler import Completion, SamplingParams
from trajectories.schema import PolicyVersion, VersionSpan

PARAMS = SamplingParams(max_tokens=4)


class WireServer:
    """A server whose replies name it: `id` is the only id that it samples."""

    def __init__(self, id: int, *, delay_s: float = 0.0) -> None:
        self.id = id
        self.delay_s = delay_s
        self.raises: Exception | None = None
        self.prompts: list[int] = []
        self.running = 0
        self.address: Address | None = None

    async def start(self) -> "WireServer":
        self._listener, self.address = await serve(self._handle, "127.0.0.1", "token", load=lambda: self.running)
        return self

    async def locate(self) -> Address | None:
        return self.address

    async def _handle(self, request: Request, request_id: str) -> Completion:
        self.prompts.append(request.prompt_ids[0])
        self.running += 1
        try:
            await asyncio.sleep(self.delay_s)
        finally:
            self.running -= 1
        if self.raises is not None:
            raise self.raises
        span = VersionSpan(version=PolicyVersion(lineage=0, n=0), num_tokens=1)
        return Completion(ids=(self.id,), logprobs=(-1.0,), spans=(span,), finish_reason="length")


async def pool_of(*servers: WireServer, request_timeout_s: float = 10.0, max_attempts: int = 4) -> PoolSampler:
    for server in servers:
        await server.start()
    config = InferencePoolConfig(request_timeout_s=request_timeout_s, max_attempts=max_attempts)
    return PoolSampler(config, {f"server-{server.id}": server.locate for server in servers})


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
    assert sum(len(server.prompts) for server in servers) == 1


class Nowhere:
    async def __call__(self) -> None:
        return None


async def test_a_sampler_is_pickled_without_its_connections():
    sampler = PoolSampler(InferencePoolConfig(request_timeout_s=0.1), {"server-0": Nowhere()})
    copy = pickle.loads(pickle.dumps(sampler))
    with pytest.raises(SamplerError, match="server-0"):
        await ask(copy, "t")
