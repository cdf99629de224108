"""vLLM's own weight transfer, between GPUs: learner ranks send, servers receive, with a barrier.

Invariant: every server goes through open, then begin, receive, end for each version, in this order and all together; a
server that fails on the way is named and the update raises. The sender's side runs in learner ranks
(actors/learner_rank.py), the receiver's in actors/engine_weights.py; actors/transfer_sync.py says when.
NCCL broadcasts, IPC maps the memory of a GPU that learner and server share, sharded RDT lets each server rank pull the
slices that it needs from the ranks that hold them.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from actors.inference_config import Transport, UpdateMode
from actors.weight_noise import Noise, disturb
from actors.weight_stage import version_label
from trajectories.schema import PolicyVersion

if TYPE_CHECKING:
    import torch
    from vllm.distributed.weight_transfer.base import ParamMeta, TrainerInitInfo, TrainerWeightTransferEngine


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferConfig:
    """How weights go from learner ranks to servers."""

    backend: Transport
    server_ranks: tuple[int, ...]
    """GPUs of each server, in the order of the servers."""
    master_address: str = ""
    """Where NCCL's ranks meet; the node of learner rank 0."""
    master_port: int = 0
    namespace: str = ""
    """Of Ray, where sharded RDT's servers look for the actors that its learner ranks start."""

    def __post_init__(self) -> None:
        if not self.backend.is_direct:
            raise ValueError(f"{self.backend} stages weights, it does not transfer them; use nccl, ipc or sharded_rdt")
        if not self.server_ranks or min(self.server_ranks) < 1:
            raise ValueError(f"server_ranks must name at least one GPU of each server, got {self.server_ranks}")
        if self.backend is Transport.NCCL and not (self.master_address and self.master_port):
            raise ValueError("nccl needs master_address and master_port, where its ranks meet")
        if self.backend is Transport.SHARDED_RDT and len(set(self.server_ranks)) > 1:
            raise ValueError(f"sharded_rdt needs servers of equal size, got server_ranks={self.server_ranks}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sending:
    """One update, as every learner rank is told of it."""

    version: PolicyVersion
    mode: UpdateMode
    admits: bool
    """False keeps requests out of the servers until they are admitted."""
    noise: Noise | None = None
    """A canary's disturbance of what is sent; None sends the weights as they are."""


CallServers = Callable[[str, Sequence[tuple[Any, ...]]], object]
"""Calls a method on every server at once, with arguments for each, and returns when all did; raises what failed."""


class FleetClient:
    """vLLM's VLLMWeightSyncClient over many servers, each an engine of its own: gives each its place in the group."""

    def __init__(self, config: TransferConfig, call_servers: CallServers) -> None:
        self._config = config
        self._call_servers = call_servers
        self.sending: Sending
        """What the next update is; set before it."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Called once by vLLM's sender."""
        self._call_servers("open_transfer", [(info,) for info in server_init_infos(self._config, init_info)])

    def start_weight_update(self) -> None:
        """Pauses every server between two steps."""
        self._everywhere("begin_transfer", self.sending.mode)

    def update_weights(self, update_info: Any) -> None:
        """Has every server receive; vLLM's sender broadcasts meanwhile."""
        self._everywhere("receive", update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Every server goes on, under the new version."""
        self._everywhere("end_transfer", self.sending.version, self.sending.admits)

    def _everywhere(self, method: str, *arguments: Any) -> None:
        self._call_servers(method, [arguments] * len(self._config.server_ranks))


def server_init_infos(config: TransferConfig, init_info: dict[str, Any]) -> list[dict[str, Any]]:
    """The sender's init info, made each server's own: nccl servers of 2 and 1 GPUs begin at ranks 1 and 3."""
    num_servers = len(config.server_ranks)
    match config.backend:
        case Transport.NCCL:
            offsets = [1 + sum(config.server_ranks[:index]) for index in range(num_servers)]
            return [{**init_info, "rank_offset": offset} for offset in offsets]
        case Transport.SHARDED_RDT:
            return [{**init_info, "replica_rank": index, "num_replicas": num_servers} for index in range(num_servers)]
        case _:  # ipc, which meets nowhere
            return [dict(init_info)] * num_servers


def sender_init_info(config: TransferConfig, *, rank: int) -> "TrainerInitInfo":
    """vLLM's init info of one learner rank; rank 0 sends."""
    num_receivers = sum(config.server_ranks)
    match config.backend:
        case Transport.NCCL:
            from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

            return NCCLTrainerInitInfo(
                rank=rank,
                master_address=config.master_address,
                master_port=config.master_port,
                world_size=1 + num_receivers,
            )
        case Transport.SHARDED_RDT:
            from vllm.distributed.weight_transfer.sharded_rdt_trainer import ShardedRDTTrainerInitInfo

            return ShardedRDTTrainerInitInfo(
                rank=rank,
                num_consumers=num_receivers,
                workers_per_replica=config.server_ranks[0],
                trainer_actor_namespace=config.namespace,
            )
        case _:  # ipc
            from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

            return IPCTrainerInitInfo(rank=rank, packed=True)


class Sender:
    """One learner rank's end; made on every rank at once."""

    def __init__(self, config: TransferConfig, export: "Callable[[], Iterator[tuple[str, torch.Tensor]]]", rank: int):
        """`export` yields every full parameter, gathered one at a time: a collective, so all ranks iterate together."""
        self._config = config
        self._source = _source(export)
        self._rank = rank
        self._engine: TrainerWeightTransferEngine[Any] | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Every tensor that is sent."""
        return tuple(each.name for each in self._source.metadata())

    def open(self, call_servers: CallServers) -> None:
        """Meets the servers; ranks beside the first only gather."""
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

        self._client = FleetClient(self._config, call_servers)
        self._engine = WeightTransferTrainerFactory.trainer_init(
            sender_init_info(self._config, rank=self._rank), client=self._client, source=self._source
        )

    def send(self, sending: Sending) -> None:
        """Sends the current weights; returns when every server holds them."""
        if self._engine is None:
            raise ValueError(f"cannot send version {version_label(sending.version)}: call open first")
        self._client.sending, self._source.noise = sending, sending.noise
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
            self.noise: Noise | None = None

        def metadata(self) -> "list[ParamMeta]":
            return self._metadata

        def __iter__(self) -> "Iterator[tuple[str, torch.Tensor]]":
            for name, tensor in export():
                noise = self.noise
                yield name, disturb(tensor, name, noise) if noise is not None and name in noise.names else tensor

    return Export()
