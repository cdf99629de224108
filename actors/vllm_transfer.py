"""vLLM's own weight transfer, between GPUs: learner ranks send, servers receive, with a barrier.

Invariant: every server goes through open, then begin, receive, end for each version, in this order and all together; a
server that fails on the way is named and the update raises. The sender's side runs in learner ranks (actors/
learner_group.py), the receiver's in actors/inference_engine.py. NCCL broadcasts, IPC maps the memory of a GPU that
learner and server share, sharded RDT lets each server rank pull the slices it needs from the ranks that hold them.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from actors.inference_config import UpdateMode
from actors.weight_stage import version_label
from trajectories.schema import PolicyVersion

if TYPE_CHECKING:
    import torch
    from vllm.distributed.weight_transfer.base import ParamMeta, TrainerInitInfo, TrainerWeightTransferEngine


class TransferBackend(StrEnum):
    """vLLM's engines that carry whole models."""

    NCCL = "nccl"
    IPC = "ipc"
    SHARDED_RDT = "sharded_rdt"


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferConfig:
    """How weights go from learner ranks to servers."""

    backend: TransferBackend
    server_ranks: tuple[int, ...]
    """GPUs of each server, in the order of the servers."""
    master_address: str = ""
    """Where NCCL's ranks meet; the node of learner rank 0."""
    master_port: int = 0

    def __post_init__(self) -> None:
        if not self.server_ranks or min(self.server_ranks) < 1:
            raise ValueError(f"server_ranks must name at least one GPU of each server, got {self.server_ranks}")
        if self.backend is TransferBackend.NCCL and not (self.master_address and self.master_port):
            raise ValueError("nccl needs master_address and master_port, where its ranks meet")
        if self.backend is TransferBackend.SHARDED_RDT and len(set(self.server_ranks)) > 1:
            raise ValueError(f"sharded_rdt needs servers of equal size, got server_ranks={self.server_ranks}")

    def engine_args(self) -> dict[str, Any]:
        """What a server's engine arguments need."""
        return {"weight_transfer_config": {"backend": self.backend.value}}


CallServers = Callable[[str, Sequence[tuple[Any, ...]]], None]
"""Calls a method on every server at once, with arguments for each, and returns when all did; raises what failed."""


class FleetClient:
    """vLLM's VLLMWeightSyncClient over many servers, each an engine of its own: gives each its place in the group."""

    def __init__(self, config: TransferConfig, call_servers: CallServers) -> None:
        self._config = config
        self._call_servers = call_servers
        self.mode = UpdateMode.KEEP
        self.version = PolicyVersion(lineage=0, n=0)
        """What the next update is; set before it."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Called once by vLLM's sender."""
        self._call_servers("open_transfer", [(info,) for info in server_init_infos(self._config, init_info)])

    def start_weight_update(self) -> None:
        """Pauses every server between two steps."""
        self._everywhere("begin_transfer", self.mode)

    def update_weights(self, update_info: Any) -> None:
        """Has every server receive; vLLM's sender broadcasts meanwhile."""
        self._everywhere("receive", update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Every server goes on, under the new version."""
        self._everywhere("end_transfer", self.version)

    def _everywhere(self, method: str, argument: Any) -> None:
        self._call_servers(method, [(argument,)] * len(self._config.server_ranks))


def server_init_infos(config: TransferConfig, init_info: dict[str, Any]) -> list[dict[str, Any]]:
    """The sender's init info, made each server's own: nccl servers of 2 and 1 GPUs begin at ranks 1 and 3."""
    num_servers = len(config.server_ranks)
    match config.backend:
        case TransferBackend.NCCL:
            offsets = [1 + sum(config.server_ranks[:index]) for index in range(num_servers)]
            return [{**init_info, "rank_offset": offset} for offset in offsets]
        case TransferBackend.SHARDED_RDT:
            return [{**init_info, "replica_rank": index, "num_replicas": num_servers} for index in range(num_servers)]
        case TransferBackend.IPC:
            return [dict(init_info)] * num_servers


def sender_init_info(config: TransferConfig, *, rank: int) -> "TrainerInitInfo":
    """vLLM's init info of one learner rank; rank 0 sends."""
    num_receivers = sum(config.server_ranks)
    match config.backend:
        case TransferBackend.NCCL:
            from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

            return NCCLTrainerInitInfo(
                rank=rank,
                master_address=config.master_address,
                master_port=config.master_port,
                world_size=1 + num_receivers,
            )
        case TransferBackend.IPC:
            from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

            return IPCTrainerInitInfo(rank=rank, packed=True)
        case TransferBackend.SHARDED_RDT:
            from vllm.distributed.weight_transfer.sharded_rdt_trainer import ShardedRDTTrainerInitInfo

            return ShardedRDTTrainerInitInfo(
                rank=rank, num_consumers=num_receivers, workers_per_replica=config.server_ranks[0]
            )


class Sender:
    """One learner rank's end; made on every rank at once."""

    def __init__(self, config: TransferConfig, export: "Callable[[], Iterator[tuple[str, torch.Tensor]]]", rank: int):
        """`export` yields every full parameter, gathered one at a time: a collective, so all ranks iterate together."""
        self._config = config
        self._export = export
        self._rank = rank
        self._engine: TrainerWeightTransferEngine[Any] | None = None

    def open(self, call_servers: CallServers) -> None:
        """Meets the servers; ranks beside the first only gather."""
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

        self._client = FleetClient(self._config, call_servers)
        self._engine = WeightTransferTrainerFactory.trainer_init(
            sender_init_info(self._config, rank=self._rank), client=self._client, source=_source(self._export)
        )

    def send(self, version: PolicyVersion, mode: UpdateMode) -> None:
        """Sends the current weights as `version`; returns when every server serves it."""
        if self._engine is None:
            raise ValueError(f"cannot send version {version_label(version)}: call open first")
        self._client.version, self._client.mode = version, mode
        self._engine.send_weights()

    def close(self) -> None:
        """Leaves the group."""
        if self._engine is not None:
            self._engine.shutdown()


def _source(export: "Callable[[], Iterator[tuple[str, torch.Tensor]]]") -> Any:
    """`export` as vLLM's WeightSource. Names and shapes come from one gather at the start, and are kept."""
    from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource

    class Export(WeightSource):
        def __init__(self) -> None:
            self._metadata = [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in export()]

        def metadata(self) -> "list[ParamMeta]":
            return self._metadata

        def __iter__(self) -> "Iterator[tuple[str, torch.Tensor]]":
            return export()

    return Export()
