"""A learner rank, vLLM's sender, its receiver and a real engine: all of a transfer but the broadcast itself."""

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import pytest_asyncio
from safetensors.torch import save_file

from actors import learner_rank
from actors.inference_config import DType, ServerConfig, Transport
from actors.inference_engine import Engine
from actors.inference_request import Part, Request, join_parts
from actors.learner_rank import LearnerRank
from actors.sync_config import SyncConfig
from actors.transfer_sync import TransferSync
from actors.vllm_transfer import Sending, TransferConfig
from envs.sampler import Completion, SamplingParams
from learners.config import LearnerConfig, LossConfig, LossKind
from learners.learner import Learner
from tests.actors.tiny_qwen3 import VOCAB_SIZE, save_tiny_qwen3
from tests.learners.conftest import make_samples
from tests.learners.test_learner import sft_plan
from trajectories.schema import PolicyVersion

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300), pytest.mark.asyncio(loop_scope="module")]

PROMPT = list(range(100, 150))


class Server:
    """A ReceivingServer around an Engine in this process; it is its own actor."""

    name, pid = "server-0", 1

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    @property
    def actor(self) -> "Server":
        return self

    @property
    def num_running(self) -> int:
        return self.engine.num_running

    async def refresh(self, deadline_s: float) -> None:
        return None

    async def close_transfer(self, deadline_s: float) -> None:
        await self.engine.weights.close_transfer()

    async def admit(self, deadline_s: float) -> None:
        self.engine.weights.admit()

    async def probe(self, ids: Sequence[int], deadline_s: float) -> list[float]:
        return await self.engine.probe(ids)

    async def quarantine(self, reason: str, deadline_s: float) -> None:
        self.engine.weights.quarantine(reason)

    async def reply(self, max_tokens: int, begun: asyncio.Event | None = None) -> Completion:
        request = Request(prompt_ids=PROMPT, params=SamplingParams(max_tokens=max_tokens), stop_ids=[])
        parts: list[Part] = []
        async for part in self.engine.generate(request, f"r-{max_tokens}"):
            parts.append(part)
            if begun is not None:
                begun.set()
        return join_parts(parts)


class Fleet:
    """A ReceivingFleet of one."""

    dtype, vocab_size, ranks_per_server = DType.FLOAT32, VOCAB_SIZE, 1

    def __init__(self, server: Server) -> None:
        self.servers = (server,)

    def heal_with(self, heal: Any) -> None:
        return None


class Source:
    """A Sender around a LearnerRank in this process, which is called from a thread as Ray would."""

    num_restarts = 0

    def __init__(self, model: Path, store: Path) -> None:
        self.rank = LearnerRank(LearnerConfig(), model, store, 0, 1, 1)
        self.rank._learner = self.learner = Learner(LearnerConfig(lr=0.05), model=model)
        self.store = store

    def step(self) -> None:
        plan = sft_plan(self.store, make_samples([30, 20])).ranks[0]
        self.learner.forward_backward(plan, LossConfig(kind=LossKind.CROSS_ENTROPY), self.store)
        self.learner.optim_step()

    async def probe_logprobs(self, ids: Sequence[int]) -> list[float]:
        return self.learner.logprobs(ids)

    async def open_transfer(
        self, backend: Transport, servers: Sequence[Any], server_ranks: Sequence[int], deadline_s: float
    ) -> tuple[str, ...]:
        config = TransferConfig(
            backend=backend, server_ranks=tuple(server_ranks), master_address="127.0.0.1", master_port=1
        )
        return await asyncio.to_thread(self.rank.open_transfer, config, servers, deadline_s)

    async def send_weights(self, sending: Sending) -> None:
        await asyncio.to_thread(self.rank.send_weights, sending)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def ends(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[Source, Server]]:
    from vllm.distributed.weight_transfer import nccl_engine

    from tests.actors.file_transfer import FILE

    scratch, loop = tmp_path_factory.mktemp("transfer"), asyncio.get_running_loop()
    # An untied head: on CPU a tied one has a packed copy that vLLM's reloading leaves old; GPUs pack nothing.
    model = save_tiny_qwen3(scratch / "model", is_tied=False)
    config = ServerConfig(
        max_model_len=256,
        max_num_seqs=8,
        transport=Transport.NCCL,
        worker_extension="tests.actors.file_transfer.FileTransfer",
    )

    def broadcast(iterator: Any, **_: Any) -> None:
        save_file({name: tensor.clone() for name, tensor in iterator}, scratch / "sent.safetensors")
        sent.set()

    def call_all(servers: Sequence[Server], method: str, arguments: Sequence[tuple[Any, ...]], deadline_s: float):
        (server,), (given,) = servers, arguments
        if method == "receive":  # vLLM's sender broadcasts meanwhile
            assert sent.wait(deadline_s)
            sent.clear()
        asyncio.run_coroutine_threadsafe(getattr(server.engine.weights, method)(*given), loop).result(deadline_s)

    sent = threading.Event()
    patch = pytest.MonkeyPatch()
    for name, value in {**config.environment(), FILE: str(scratch / "sent.safetensors")}.items():
        patch.setenv(name, value)
    endpoint = SimpleNamespace(destroy=lambda: None)
    patch.setattr(nccl_engine, "open_trainer_endpoint", lambda init_info: endpoint)
    patch.setattr(nccl_engine, "packed_nccl_broadcast_producer", broadcast)
    patch.setattr(learner_rank, "call_all", call_all)
    engine = await Engine.start(model, config, name="server-0", version=None)
    try:
        yield Source(model, scratch / "store"), Server(engine)
    finally:
        engine.close()
        patch.undo()


async def test_weights_that_a_rank_sends_are_proven_and_sampled_in_mid_reply_too(ends: tuple[Source, Server]):
    source, server = ends
    sync = TransferSync(source=source, target=Fleet(server), config=SyncConfig(transport=Transport.NCCL))
    await sync.publish(PolicyVersion(lineage=0, n=0))
    assert server.engine.is_ready, "the canary saw every group of tensors and admitted requests"
    source.step()
    begun = asyncio.Event()
    flying = asyncio.create_task(server.reply(190, begun))
    await begun.wait()
    metrics = await sync.publish(PolicyVersion(lineage=0, n=1))
    crossed = await flying
    assert [span.version.n for span in crossed.spans] == [0, 1] and metrics["sync/probe_gap"] < 1e-5
    assert (metrics["sync/in_flight"], sync.num_syncs_in_flight) == (1, 1)
    fresh = await server.reply(24)
    theirs = source.learner.logprobs([*PROMPT, *fresh.ids])[len(PROMPT) - 1 :]
    assert max(abs(a - b) for a, b in zip(fresh.logprobs, theirs, strict=True)) < 1e-5


async def test_a_sleeper_wakes_by_what_it_receives(ends: tuple[Source, Server]):
    source, server = ends
    sync = TransferSync(source=source, target=Fleet(server), config=SyncConfig(transport=Transport.NCCL, canary=False))
    await server.engine.weights.sleep()
    asking = asyncio.create_task(server.reply(16))
    source.step()
    await sync.publish(PolicyVersion(lineage=0, n=2))
    assert {span.version.n for span in (await asking).spans} == {2}
