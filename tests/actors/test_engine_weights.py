"""The weights of an engine that fails in the middle of a transfer. Real engines: test_inference_engine.py."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from actors.engine_stats import EngineStats
from actors.engine_weights import EngineWeights
from actors.inference_config import ServerConfig, UpdateMode
from actors.inference_engine import Engine
from actors.inference_errors import ServerNotReady, WeightSyncError
from actors.inference_request import Request
from envs.sampler import SamplingParams
from tests.fakes.recording_llm import RecordingLLM
from trajectories.schema import PolicyVersion

V1 = PolicyVersion(lineage=0, n=1)


class FragileEngine:
    """vLLM's verbs, of which `broken` fails as they do: with an exception of no kind of ours."""

    def __init__(self) -> None:
        self.broken = ""
        self.done: list[str] = []

    def __getattr__(self, verb: str) -> Callable[..., Awaitable[None]]:
        async def do(*_: Any, **__: Any) -> None:
            self.done.append(verb)
            if verb == self.broken:
                raise RuntimeError("Call to collective_rpc method failed: out of memory")

        return do


def weights_of(llm: FragileEngine) -> EngineWeights:
    async def entered() -> None:
        return None

    stats = EngineStats()
    return EngineWeights(llm, ServerConfig(), "server-0", stats, num_running=lambda: 0, until_entered=entered)


async def transfer(weights: EngineWeights) -> None:
    await weights.begin_transfer(UpdateMode.KEEP)
    await weights.end_transfer(V1, admits=True)


@pytest.mark.parametrize(
    "broken", ["pause_generation", "start_weight_update", "finish_weight_update", "resume_generation"]
)
async def test_a_transfer_that_fails_refuses_requests_and_leaves_the_way_free_for_the_next(broken: str) -> None:
    llm = FragileEngine()
    weights = weights_of(llm)
    llm.broken = broken
    with pytest.raises(WeightSyncError, match=r"server-0 .*collective_rpc method failed: out of memory"):
        await transfer(weights)
    assert weights.what_is_missing and weights.version is None
    llm.broken = ""
    async with asyncio.timeout(5):
        await transfer(weights)
    assert (weights.what_is_missing, weights.version, llm.done[-1]) == ("", V1, "resume_generation")


async def test_a_meeting_that_vllm_refuses_names_the_server() -> None:
    """As it does while an update is under way whose learner died."""
    llm = FragileEngine()
    llm.broken = "shutdown_weight_transfer_engine"
    with pytest.raises(WeightSyncError, match="server-0 does not leave its learner"):
        await weights_of(llm).close_transfer()


async def test_requests_that_come_while_weights_are_received_wait_as_they_do_for_a_load() -> None:
    """All servers receive at once, so that whoever was refused by one would be refused by all, and end its rollout."""
    engine = Engine(RecordingLLM(), ServerConfig(), "server-0", EngineStats())
    await transfer(engine.weights)
    await engine.weights.begin_transfer(UpdateMode.KEEP)
    request = Request(prompt_ids=[1], params=SamplingParams(), stop_ids=[])
    first = asyncio.create_task(anext(engine.generate(request, "first")))
    await asyncio.sleep(0.01)
    assert not first.done() and not engine.is_ready
    await engine.weights.end_transfer(V1, admits=False)
    second = asyncio.create_task(anext(engine.generate(request, "second")))
    await asyncio.sleep(0.01)
    assert not (first.done() or second.done() or engine.is_ready), "the weights are not proven yet"
    engine.weights.quarantine("its canary was silent")
    for asking in (first, second):
        with pytest.raises(ServerNotReady, match="its canary was silent"):
            await asking
    engine.weights.admit()
    assert engine.is_ready
