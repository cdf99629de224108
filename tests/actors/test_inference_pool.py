"""Real servers under Ray: sampling while one is killed, and the way back with the current weights."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from actors.cluster import ClusterConfig, start_cluster
from actors.inference_config import InferencePoolConfig, ServerConfig
from actors.inference_errors import ServerStartError
from actors.inference_pool import InferencePool, start_inference_pool
from actors.inference_sampler import PoolSampler
from actors.sync_config import SyncConfig
from actors.weight_sync import WeightSync
from envs.sampler import SamplingParams
from tests.actors.tiny_qwen3 import VOCAB_SIZE, TinySource, save_tiny_qwen3
from tests.contracts.sampler import check_sampler
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
    assert pool.oldest_version() == PolicyVersion(lineage=0, n=0) and pool.is_exact
    await check_sampler(pool.sampler(), PROMPT, stop_ids=[3, 5], vocab_size=VOCAB_SIZE)


async def test_a_server_killed_in_mid_reply_loses_no_request_and_returns_with_the_current_weights(
    pool: InferencePool, model: Path, tmp_path: Path
):
    source = TinySource(model)
    sync = WeightSync(source=source, target=pool, config=SyncConfig(directory=tmp_path))
    await sync.publish(PolicyVersion(lineage=0, n=0))
    source.step(1)
    current = PolicyVersion(lineage=0, n=1)
    sampler = pool.sampler()
    replies = [asyncio.create_task(_reply(sampler, f"t{k}")) for k in range(48)]
    await asyncio.sleep(0.3)
    metrics = await sync.publish(current)
    assert metrics["sync/servers"] == 2 and metrics["sync/in_flight"] > 0 and sync.num_syncs_in_flight == 1
    victim = pool.servers[0].health
    assert victim is not None
    engine = psutil.Process(victim.pid).children(recursive=True)
    os.kill(victim.pid, signal.SIGKILL)
    completions = await asyncio.gather(*replies)
    assert [len(completion.ids) for completion in completions] == [150] * 48
    assert {span.version.n for completion in completions for span in completion.spans} <= {0, 1}
    assert not [process for process in engine if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
    await _until(lambda: pool.num_restarts == 1, 150)
    health = pool.servers[0].health
    assert health is not None and health.pid != victim.pid and pool.servers[0].version == current
    probe = await pool.servers[0].probe(PROMPT, 30)
    assert max(abs(a - b) for a, b in zip(probe, source.logprobs(PROMPT), strict=True)) < 1e-5
    later = await asyncio.gather(*(_reply(sampler, f"u{k}", max_tokens=4) for k in range(16)))
    assert {span.version for completion in later for span in completion.spans} == {current}
    metrics = pool.metrics()
    assert metrics["inference/servers"] == 2 and metrics["inference/restarts"] == 1


async def test_a_server_that_cannot_start_is_named_with_the_cause(cluster: None, model: Path):
    config = InferencePoolConfig(server=ServerConfig(engine_args={"block_sise": 32}), num_servers=1)
    with pytest.raises(ServerStartError, match=r"server-0 did not come up: .*unexpected keyword.*'block_sise'"):
        async with start_inference_pool(config, model=model):
            pass


async def _reply(sampler: PoolSampler, key: str, max_tokens: int = 150):
    return await sampler.sample(PROMPT, SamplingParams(max_tokens=max_tokens), stop_ids=[], key=key)


async def _until(is_true, deadline_s: float) -> None:
    began = time.monotonic()
    while not is_true():
        assert time.monotonic() - began < deadline_s, "it never came true"
        await asyncio.sleep(0.1)
