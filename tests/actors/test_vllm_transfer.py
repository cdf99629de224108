"""vLLM's weight transfer, wired against its own classes: no GPU, so its NCCL endpoint and broadcast are recorded."""

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from actors.engine_stats import EngineStats
from actors.inference_config import ServerConfig, UpdateMode
from actors.inference_engine import Engine
from actors.inference_errors import ServerNotReady
from actors.inference_request import Request
from actors.vllm_transfer import (
    FleetClient,
    Sender,
    TransferBackend,
    TransferConfig,
    sender_init_info,
    server_init_infos,
)
from envs.sampler import SamplingParams
from tests.fakes.recording_llm import RecordingLLM
from trajectories.schema import PolicyVersion

NCCL = TransferConfig(backend=TransferBackend.NCCL, server_ranks=(2, 1), master_address="10.0.0.1", master_port=29_500)
RDT = TransferConfig(backend=TransferBackend.SHARDED_RDT, server_ranks=(2, 2))
IPC = TransferConfig(backend=TransferBackend.IPC, server_ranks=(1,))
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
        TransferConfig(backend=TransferBackend.NCCL, server_ranks=(1,))
    with pytest.raises(ValueError, match="servers of equal size"):
        TransferConfig(backend=TransferBackend.SHARDED_RDT, server_ranks=(1, 2))
    with pytest.raises(ValueError, match="at least one GPU"):
        TransferConfig(backend=TransferBackend.IPC, server_ranks=())


def test_each_server_gets_its_own_place_in_the_group():
    assert [info["rank_offset"] for info in server_init_infos(NCCL, {"rank_offset": 1, "world_size": 4})] == [1, 3]
    ranks = [(info["replica_rank"], info["num_replicas"]) for info in server_init_infos(RDT, {})]
    assert ranks == [(0, 2), (1, 2)]


async def test_a_server_pauses_receives_and_goes_on_under_the_new_version():
    llm = RecordingLLM()
    engine = Engine(llm, ServerConfig(), "server-0", EngineStats())
    await engine.begin_transfer(UpdateMode.KEEP)
    assert not engine.is_ready
    await engine.end_transfer(V3)
    assert llm.names == ["pause_generation", "start_weight_update", "finish_weight_update", "resume_generation"]
    assert llm.calls[0][2] == {"mode": "keep", "clear_cache": False} and llm.calls[2][1] == ("0.3",)
    assert engine.is_ready and engine.version == V3


async def test_a_sleeping_server_keeps_requests_waiting_until_weights_and_cache_are_back():
    llm = RecordingLLM()
    engine = Engine(llm, ServerConfig(), "server-0", EngineStats())
    await engine.sleep()
    request = Request(prompt_ids=[1], params=SamplingParams(), stop_ids=[])
    asking = asyncio.create_task(anext(engine.generate(request, "r")))
    await asyncio.sleep(0.01)
    await engine.wake_weights()
    assert not asking.done()
    await engine.wake_cache()
    with pytest.raises(ServerNotReady, match="no proven weights"):
        await asking
    assert [(name, kwargs) for name, _, kwargs in llm.calls] == [
        ("sleep", {"level": 2, "mode": "abort"}),
        ("wake_up", {"tags": ["weights"]}),
        ("wake_up", {"tags": ["kv_cache"]}),
        ("resume_generation", {}),
    ]


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
    met = {"master_address": "10.0.0.1", "master_port": 29_500, "world_size": 4}
    assert [NCCLWeightTransferInitInfo(**info).rank_offset for info in server_init_infos(NCCL, met)] == [1, 3]
    assert [ShardedRDTWeightTransferInitInfo(**info).replica_rank for info in server_init_infos(RDT, {})] == [0, 1]


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
    with pytest.raises(ValueError, match=r"cannot send version 0\.3: call open first"):
        sender.send(V3, UpdateMode.ABORT)
    sender.open(servers)
    sender.send(V3, UpdateMode.ABORT)
    assert [method for method, _ in servers.calls] == ["open_transfer", "begin_transfer", "receive", "end_transfer"]
    opened, begun, received, ended = (arguments for _, arguments in servers.calls)
    assert [info["rank_offset"] for (info,) in opened] == [1, 3]
    assert begun == [(UpdateMode.ABORT,)] * 2 and ended == [(V3,)] * 2
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
    sender.send(V3, UpdateMode.KEEP)
    assert servers.calls == [] and num_gathers == 2
