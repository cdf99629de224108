"""Real servers under Ray: sampling while they are killed, and the way back with the current weights."""

import asyncio
import os
import shutil
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import psutil
import pytest
import pytest_asyncio

from actors.cluster import ClusterConfig, start_cluster
from actors.errors import PlacementError
from actors.inference_config import DType, InferencePoolConfig, ServerConfig
from actors.inference_errors import ServerStartError
from actors.inference_pool import InferencePool, start_inference_pool
from actors.inference_sampler import LIST_S, PoolSampler
from actors.server_handle import ServerHandle
from actors.sync_config import SyncConfig
from actors.weight_objects import localize, put_stage
from actors.weight_stage import corrupt_tensors
from actors.weight_sync import WeightSync
from envs.gateway.app import make_app
from envs.gateway.prompts import ChatPrompts
from envs.gateway.session import Session, SessionConfig, Sessions
from envs.sampler import SamplingParams
from tests.actors.tiny_qwen3 import VOCAB_SIZE, TinySource, save_tiny_qwen3
from tests.contracts.sampler import check_sampler
from tests.envs.gateway.doors import MODEL, as_trajectory, client_of_app
from tests.envs.tokens import CHATML_TEMPLATE, tiny_renderer
from trajectories.samples import trajectory_samples
from trajectories.schema import PolicyVersion

pytestmark = [
    pytest.mark.ray,
    pytest.mark.vllm,
    pytest.mark.timeout(300),
    pytest.mark.asyncio(loop_scope="module"),
]

SERVER = ServerConfig(max_model_len=256, max_num_seqs=32, kv_cache_gb=0.125)
PROMPT = list(range(100, 150))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_qwen3(tmp_path_factory.mktemp("model"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster() -> AsyncIterator[None]:
    async with start_cluster(ClusterConfig()):
        yield


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool(cluster: None, model: Path) -> AsyncIterator[InferencePool]:
    config = InferencePoolConfig(server=SERVER, num_servers=2, health_interval_s=0.5)
    async with start_inference_pool(config, model=model) as pool:
        yield pool


async def test_the_pool_keeps_the_sampler_contract_on_the_weights_of_the_directory(pool: InferencePool):
    assert pool.engine == "vllm.v1.engine.async_llm.AsyncLLM"
    assert pool.oldest_version() == PolicyVersion(lineage=0, n=0) and pool.dtype is DType.FLOAT32
    await check_sampler(pool.sampler(), PROMPT, stop_ids=[3, 5], vocab_size=VOCAB_SIZE)


async def test_replies_survive_the_death_of_both_servers_and_a_weight_update(
    pool: InferencePool, model: Path, tmp_path: Path
):
    source = TinySource(model)
    sync = WeightSync(source=source, target=pool, config=SyncConfig(directory=tmp_path))
    await sync.publish(PolicyVersion(lineage=0, n=0))
    source.step(1)
    current = PolicyVersion(lineage=0, n=1)
    sampler = pool.sampler()
    replies = [asyncio.create_task(_reply(sampler, f"t{k}", max_tokens=190)) for k in range(128)]
    await asyncio.sleep(0.3)
    metrics = await sync.publish(current)
    assert metrics["sync/servers"] == 2 and metrics["sync/in_flight"] > 0 and sync.num_syncs_in_flight == 1
    assert sum(not reply.done() for reply in replies) >= 16
    engines = [_kill(server) for server in pool.servers]
    completions = await asyncio.gather(*replies)
    assert [len(completion.ids) for completion in completions] == [190] * 128
    assert {span.version.n for completion in completions for span in completion.spans} == {0, 1}
    assert not [process for engine in engines for process in engine if _is_running(process)]
    await _until(lambda: pool.num_restarts == 2, 150)
    assert [server.version for server in pool.servers] == [current, current]
    for server in pool.servers:
        probe = await server.probe(PROMPT, 30)
        assert max(abs(a - b) for a, b in zip(probe, source.logprobs(PROMPT), strict=True)) < 1e-5
    later = await asyncio.gather(*(_reply(sampler, f"u{k}", max_tokens=4) for k in range(16)))
    assert {span.version for completion in later for span in completion.spans} == {current}
    metrics = pool.metrics()
    assert metrics["inference/servers"] == 2 and metrics["inference/restarts"] == 2
    assert metrics["inference/sampled_tokens"] > 0 and metrics["inference/first_token_s_mean"] > 0


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
async def test_a_server_added_while_replies_are_sampled_serves_and_one_removed_ends_what_it_has(pool: InferencePool):
    sampler, version = pool.sampler(), pool.oldest_version()
    replies = [asyncio.create_task(_reply(sampler, f"a{k}")) for k in range(16)]
    added = await pool.add()
    assert added.version == version and len(pool.servers) == 3
    replies += [asyncio.create_task(_reply(sampler, f"b{k}")) for k in range(16)]
    await asyncio.sleep(0.1)
    assert await pool.remove(pool.servers[0].name, 60) == 0, "everything it had ended there"
    await asyncio.sleep(LIST_S)
    replies += [asyncio.create_task(_reply(sampler, f"c{k}")) for k in range(16)]
    assert [len(completion.ids) for completion in await asyncio.gather(*replies)] == [150] * 48
    await added.refresh(30)
    assert added.health is not None and added.health.num_sampled_tokens > 0
    with pytest.raises(ValueError, match="cannot remove server-9"):
        await pool.remove("server-9", 1)


async def test_a_server_that_cannot_start_is_named_with_the_cause(cluster: None, model: Path):
    config = InferencePoolConfig(server=ServerConfig(engine_args={"block_sise": 32}), num_servers=1)
    with pytest.raises(ServerStartError, match=r"server-0 did not come up: .*unexpected keyword.*'block_sise'"):
        async with start_inference_pool(config, model=model):
            pass


async def test_a_stage_in_the_object_store_reaches_a_node_that_lacks_its_files(
    cluster: None, model: Path, tmp_path: Path
):
    manifest = put_stage(TinySource(model).stage(tmp_path, PolicyVersion(lineage=0, n=3)))
    shutil.rmtree(manifest.directory)
    here = await asyncio.gather(*(asyncio.to_thread(localize, manifest) for _ in range(2)))
    assert here[0] == here[1] and not here[0].objects and here[0].directory == manifest.directory
    assert corrupt_tensors(here[0]) == []


async def test_servers_without_a_place_are_refused_with_the_resource_that_is_missing(cluster: None, model: Path):
    config = InferencePoolConfig(server=ServerConfig(num_cpus=1000.0), num_servers=2, start_timeout_s=1.0)
    with pytest.raises(PlacementError, match=r"2 inference servers: no place within 1 s; missing: 2000 CPU \(.* free"):
        async with start_inference_pool(config, model=model):
            pass


async def _reply(sampler: PoolSampler, key: str, max_tokens: int = 150):
    return await sampler.sample(PROMPT, SamplingParams(max_tokens=max_tokens), stop_ids=[], key=key)


def _kill(server: ServerHandle) -> list[psutil.Process]:
    """Ends a server's process as the kernel would; returns its engine's processes."""
    assert server.health is not None
    engine = psutil.Process(server.health.pid).children(recursive=True)
    os.kill(server.health.pid, signal.SIGKILL)
    return engine


def _is_running(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


async def _until(is_true, deadline_s: float) -> None:
    began = time.monotonic()
    while not is_true():
        assert time.monotonic() - began < deadline_s, "it never came true"
        await asyncio.sleep(0.1)


async def test_a_program_that_speaks_openais_protocol_leaves_the_engines_own_tokens(pool: InferencePool):
    """Three Turns of a client that nobody here wrote; a random policy says bytes that no tokenizer would choose."""
    config = SessionConfig(sampling=SamplingParams(max_tokens=12, seed=1), context_tokens=256)
    prompts, sessions = ChatPrompts(tiny_renderer(CHATML_TEMPLATE)), Sessions()
    session = sessions.add(Session(prompts, pool.sampler(), config, key="t"))
    client = client_of_app(make_app(sessions, prompts, model=MODEL), session.token)
    messages = [{"role": "user", "content": "hi"}]
    for _ in range(3):
        answer = await client.chat.completions.create(
            model=MODEL, messages=messages, logprobs=True, extra_body={"return_token_ids": True}
        )
        assert answer.choices[0].token_ids == list(_sampled(session)[-1])
        messages += [answer.choices[0].message.model_dump(), {"role": "user", "content": "go on"}]
    (sample,) = trajectory_samples(as_trajectory(session))
    assert sample.ids[: len(answer.prompt_token_ids)].tolist() == answer.prompt_token_ids
    assert int(sample.mask.sum()) == sum(map(len, _sampled(session)))
    again = await pool.servers[0].probe(sample.ids.tolist(), 30)
    recomputed = np.asarray(again)[-len(sample.ids) + 1 :][sample.mask[1:]]
    np.testing.assert_allclose(sample.logprobs[sample.mask], recomputed, atol=1e-3)


def _sampled(session: Session) -> list[tuple[int, ...]]:
    return [turn.tokens.sampled_ids for turn in session.turns if turn.tokens is not None]
