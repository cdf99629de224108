"""vLLM's weight transfer, wired against its own classes: no GPU, so its NCCL endpoint and broadcast are recorded."""

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from actors import learner_rank
from actors.engine_stats import EngineStats
from actors.inference_config import ServerConfig, Transport, UpdateMode
from actors.inference_engine import Engine
from actors.inference_errors import ServerNotReady, WeightSyncError
from actors.inference_request import Request
from actors.vllm_transfer import (
    FleetClient,
    Sender,
    Sending,
    TransferConfig,
    sender_init_info,
    server_init_infos,
)
from actors.weight_noise import Noise
from envs.sampler import SamplingParams
from learners.config import LearnerConfig
from learners.learner import Learner
from tests.actors.tiny_qwen3 import save_tiny_qwen3
from tests.fakes.recording_llm import RecordingLLM
from trajectories.schema import PolicyVersion

NCCL = TransferConfig(backend=Transport.NCCL, server_ranks=(2, 1), master_address="10.0.0.1", master_port=29_500)
RDT = TransferConfig(backend=Transport.SHARDED_RDT, server_ranks=(2, 2), namespace="run")
IPC = TransferConfig(backend=Transport.IPC, server_ranks=(1,))
V3 = PolicyVersion(lineage=0, n=3)
WEIGHTS = {"model.a.weight": torch.ones(2, 3), "model.b.weight": torch.zeros(4)}


def export() -> Iterator[tuple[str, torch.Tensor]]:
    return iter(WEIGHTS.items())


class Servers:
    """What would be Ray calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, list[tuple[Any, ...]]]] = []

    def __call__(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> None:
        self.calls.append((method, list(arguments)))


def test_configs_that_cannot_meet_are_refused():
    with pytest.raises(ValueError, match="nccl needs master_address"):
        TransferConfig(backend=Transport.NCCL, server_ranks=(1,))
    with pytest.raises(ValueError, match="servers of equal size"):
        TransferConfig(backend=Transport.SHARDED_RDT, server_ranks=(1, 2))
    with pytest.raises(ValueError, match="at least one GPU"):
        TransferConfig(backend=Transport.IPC, server_ranks=())
    with pytest.raises(ValueError, match="files stages weights"):
        TransferConfig(backend=Transport.FILES, server_ranks=(1,))


def test_each_server_gets_its_own_place_in_the_group():
    assert [info["rank_offset"] for info in server_init_infos(NCCL, {"rank_offset": 1, "world_size": 4})] == [1, 3]
    ranks = [(info["replica_rank"], info["num_replicas"]) for info in server_init_infos(RDT, {})]
    assert ranks == [(0, 2), (1, 2)]


async def test_a_server_pauses_receives_and_goes_on_under_the_new_version():
    llm = RecordingLLM()
    engine = Engine(llm, ServerConfig(), "server-0", EngineStats())
    await engine.weights.begin_transfer(UpdateMode.KEEP)
    assert not engine.is_ready
    await engine.weights.end_transfer(V3, admits=True)
    assert llm.names == ["pause_generation", "start_weight_update", "finish_weight_update", "resume_generation"]
    assert llm.calls[0][2] == {"mode": "keep", "clear_cache": False} and llm.calls[2][1] == ("0.3",)
    assert engine.is_ready and engine.version == V3


async def test_requests_stay_out_until_received_weights_are_proven():
    engine = Engine(RecordingLLM(), ServerConfig(), "server-0", EngineStats())
    await engine.weights.begin_transfer(UpdateMode.KEEP)
    await engine.weights.end_transfer(V3, admits=False)
    assert not engine.is_ready and engine.weights.what_is_missing.endswith("its weights are not proven yet")
    engine.weights.admit()
    assert engine.is_ready


@pytest.mark.parametrize(("lora_rank", "level"), [(0, 2), (8, 1)])
async def test_a_sleeper_drops_its_weights_unless_an_adapter_needs_them_below_it(lora_rank: int, level: int):
    llm = RecordingLLM()
    config = ServerConfig(lora_rank=lora_rank, lora_targets=("q_proj",))
    await Engine(llm, config, "server-0", EngineStats()).weights.sleep()
    assert llm.calls == [("sleep", (), {"level": level, "mode": "abort"})]


async def test_a_sleeping_server_takes_memory_for_weights_then_receives_then_takes_it_for_caches():
    llm = RecordingLLM()
    engine = Engine(llm, ServerConfig(), "server-0", EngineStats())
    await engine.weights.sleep()
    request = Request(prompt_ids=[1], params=SamplingParams(), stop_ids=[])
    asking = asyncio.create_task(anext(engine.generate(request, "r")))
    await asyncio.sleep(0.01)
    await engine.weights.begin_transfer(UpdateMode.KEEP)
    assert not asking.done()
    await engine.weights.end_transfer(V3, admits=False)
    engine.weights.quarantine("not proven")
    with pytest.raises(ServerNotReady, match="not proven"):
        await asking
    assert [(name, kwargs) for name, _, kwargs in llm.calls] == [
        ("sleep", {"level": 2, "mode": "abort"}),
        ("pause_generation", {"mode": "keep", "clear_cache": False}),
        ("wake_up", {"tags": ["weights"]}),
        ("start_weight_update", {}),
        ("finish_weight_update", {}),
        ("wake_up", {"tags": ["kv_cache"]}),
        ("resume_generation", {}),
    ]


async def test_a_server_that_could_not_receive_says_so_and_takes_a_later_update():
    class Refusing(RecordingLLM):
        async def update_weights(self, request: Any) -> None:
            raise RuntimeError("shapes differ")

    engine = Engine(Refusing(), ServerConfig(), "server-0", EngineStats())
    await engine.weights.begin_transfer(UpdateMode.KEEP)
    with pytest.raises(WeightSyncError, match="server-0 did not receive its weights: shapes differ"):
        await engine.weights.receive({})
    assert not engine.is_ready
    async with asyncio.timeout(1):
        await engine.weights.begin_transfer(UpdateMode.KEEP)


@pytest.mark.vllm
def test_vllms_own_classes_take_what_each_side_is_given():
    from vllm.distributed.weight_transfer.base import VLLMWeightSyncClient
    from vllm.distributed.weight_transfer.nccl_common import NCCLWeightTransferInitInfo
    from vllm.distributed.weight_transfer.sharded_rdt_engine import ShardedRDTWeightTransferInitInfo

    assert isinstance(FleetClient(IPC, Servers()), VLLMWeightSyncClient)
    nccl = sender_init_info(NCCL, rank=0)
    assert (nccl.backend, nccl.is_sender, nccl.world_size) == ("nccl", True, 4)  # pyright: ignore[reportAttributeAccessIssue]
    assert (sender_init_info(IPC, rank=1).backend, sender_init_info(IPC, rank=1).is_sender) == ("ipc", False)
    rdt = sender_init_info(RDT, rank=0)
    assert (rdt.num_consumers, rdt.workers_per_replica) == (4, 2)  # pyright: ignore[reportAttributeAccessIssue]
    assert rdt.trainer_actor_namespace == "run"  # pyright: ignore[reportAttributeAccessIssue]
    met = {"master_address": "10.0.0.1", "master_port": 29_500, "world_size": 4}
    assert [NCCLWeightTransferInitInfo(**info).rank_offset for info in server_init_infos(NCCL, met)] == [1, 3]
    assert [ShardedRDTWeightTransferInitInfo(**info).replica_rank for info in server_init_infos(RDT, {})] == [0, 1]


@pytest.mark.vllm
@pytest.mark.parametrize("transport", [Transport.NCCL, Transport.IPC, Transport.SHARDED_RDT])
def test_vllms_own_arguments_take_what_a_server_is_given_for_a_transport(transport: Transport, tmp_path: Path):
    from vllm import AsyncEngineArgs

    config = ServerConfig(num_gpus=1, transport=transport, colocated=transport is Transport.IPC)
    args = AsyncEngineArgs(**config.resolved_engine_args(save_tiny_qwen3(tmp_path / "model")))
    assert args.weight_transfer_config is not None and args.weight_transfer_config.backend == transport.value
    assert args.enable_sleep_mode is (transport is Transport.IPC)


@pytest.mark.vllm
def test_a_version_goes_out_in_the_order_that_vllms_sender_keeps(monkeypatch: pytest.MonkeyPatch):
    from vllm.distributed.weight_transfer import nccl_engine

    sent: list[str] = []
    monkeypatch.setattr(nccl_engine, "open_trainer_endpoint", lambda init_info: "endpoint")
    monkeypatch.setattr(
        nccl_engine,
        "packed_nccl_broadcast_producer",
        lambda iterator, **_: sent.extend(name for name, _ in iterator),
    )
    servers = Servers()
    sender = Sender(NCCL, export, rank=0)
    sending = Sending(version=V3, mode=UpdateMode.ABORT, admits=False)
    with pytest.raises(ValueError, match=r"cannot send version 0\.3: call open first"):
        sender.send(sending)
    sender.open(servers)
    sender.send(sending)
    assert [method for method, _ in servers.calls] == ["open_transfer", "begin_transfer", "receive", "end_transfer"]
    opened, begun, received, ended = (arguments for _, arguments in servers.calls)
    assert [info["rank_offset"] for (info,) in opened] == [1, 3]
    assert begun == [(UpdateMode.ABORT,)] * 2 and ended == [(V3, False)] * 2
    assert received[0][0] == {
        "names": list(WEIGHTS),
        "dtype_names": ["float32", "float32"],
        "shapes": [[2, 3], [4]],
    }
    assert sent == list(WEIGHTS)


@pytest.mark.vllm
def test_ranks_beside_the_sender_only_gather(monkeypatch: pytest.MonkeyPatch):
    servers, num_gathers = Servers(), 0

    def counted() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal num_gathers
        num_gathers += 1
        return export()

    sender = Sender(NCCL, counted, rank=1)
    sender.open(servers)
    sender.send(Sending(version=V3, mode=UpdateMode.KEEP, admits=True))
    assert servers.calls == [] and num_gathers == 2


@pytest.mark.vllm
def test_a_learner_rank_sends_its_own_weights_and_a_canary_only_what_it_disturbs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    from vllm.distributed.weight_transfer import nccl_engine

    sent: dict[str, torch.Tensor] = {}
    called: list[str] = []
    monkeypatch.setattr(nccl_engine, "open_trainer_endpoint", lambda init_info: "endpoint")
    monkeypatch.setattr(nccl_engine, "packed_nccl_broadcast_producer", lambda iterator, **_: sent.update(iterator))
    monkeypatch.setattr(learner_rank, "call_all", lambda servers, method, arguments, deadline_s: called.append(method))
    rank = learner_rank.LearnerRank(LearnerConfig(), tmp_path, tmp_path, 0, 1, 1)
    rank._learner = Learner(LearnerConfig(), model=save_tiny_qwen3(tmp_path / "model"))
    names = rank.open_transfer(NCCL, ["a", "b"], 5.0)
    rank.send_weights(Sending(version=V3, mode=UpdateMode.KEEP, admits=True))
    weights = dict(rank._learner.export_weights())
    assert tuple(weights) == names == tuple(sent)
    assert all(torch.equal(sent[name], weight) for name, weight in weights.items())
    noise = Noise(names=names[:2], scale=1.0)
    rank.send_weights(Sending(version=V3, mode=UpdateMode.KEEP, admits=False, noise=noise))
    changed = [name for name, weight in weights.items() if not torch.equal(sent[name], weight)]
    assert tuple(changed) == names[:2]
    assert called == ["open_transfer", *["begin_transfer", "receive", "end_transfer"] * 2]
