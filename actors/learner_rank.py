"""One learner rank's actor: builds the Learner in its process and forwards to it, and sends weights to servers.

Invariant: torch is imported where the rank runs, not where it is named; what is raised to the driver needs no torch to
be read. Made and called by actors/learner_group.py, which calls a verb on all ranks together.
"""

import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import ray

from actors.calls import call_all
from actors.errors import ActorDied
from actors.inference_config import DType
from actors.inference_errors import WeightSyncError
from actors.vllm_transfer import Sender, Sending, TransferConfig
from actors.weight_objects import put_stage
from actors.weight_stage import Manifest, narrowed, write_adapter_stage, write_stage
from learners.config import LearnerConfig, LossConfig
from learners.plan import RankPlan
from trajectories.schema import PolicyVersion


class LearnerRank:
    """Rank `rank` of `num_ranks`, on the weights in directory `model`, reading Samples from `store`."""

    def __init__(
        self, config: LearnerConfig, model: Path, store: Path, rank: int, num_ranks: int, threads: int
    ) -> None:
        import torch
        from transformers.utils import logging as transformers_logging

        transformers_logging.disable_progress_bar()
        torch.set_num_threads(threads)
        self._config = config
        self._model = model
        self._store = store
        self._rank = rank
        self._num_ranks = num_ranks
        self._sender: Sender | None = None

    def rendezvous(self) -> str:
        """A tcp:// address on this rank's node at which all ranks may meet."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return f"tcp://{ray.util.get_node_ip_address()}:{probe.getsockname()[1]}"

    def build(self, address: str) -> tuple[int, str]:
        """Joins the process group, builds the Learner; returns the world size that torch reports and the sharding."""
        from learners.learner import Learner
        from learners.process_group import init_process_group

        world_size = init_process_group(address, rank=self._rank, world_size=self._num_ranks)
        self._learner = Learner(self._config, model=self._model, rank=self._rank, world_size=self._num_ranks)
        return world_size, self._learner.sharding

    def forward_backward(self, plan: RankPlan, loss: LossConfig) -> dict[str, float]:
        """See Learner."""
        return self._learner.forward_backward(plan, loss=loss, store=self._store)

    def optim_step(self) -> dict[str, float]:
        """See Learner."""
        return self._learner.optim_step()

    def sequence_logprobs(self, plan: RankPlan) -> list[float]:
        """See Learner."""
        return self._learner.sequence_logprobs(plan, store=self._store)

    def begin_save(self, directory: Path) -> None:
        """See Learner."""
        self._learner.begin_save(directory)

    def is_saved(self) -> bool:
        """See Learner."""
        return self._learner.is_saved()

    def finish_save(self) -> str | None:
        """See Learner; what kept the checkpoint from being written, in words: the driver has no torch to unpickle."""
        from learners.checkpoint import CheckpointError

        try:
            self._learner.finish_save()
        except CheckpointError as error:
            return str(error)
        return None

    def load(self, directory: Path) -> None:
        """See Learner."""
        self._learner.load(directory)

    def save_pretrained(self, directory: Path) -> None:
        """See Learner."""
        self._learner.save_pretrained(directory)

    def stage_weights(self, directory: Path, version: PolicyVersion, dtype: DType) -> Manifest | None:
        """Gathers on every rank what is trained, all weights or the adapter; rank 0 writes it and tells what.

        Weights wider than the servers' `dtype` are rounded to it, as the servers would, before they travel.
        """
        is_adapter = self._config.lora.rank > 0
        tensors = self._learner.export_adapter() if is_adapter else self._learner.export_weights()
        if self._rank == 0 and is_adapter:
            return write_adapter_stage(directory, version, tensors, self._learner.adapter_config)
        if self._rank == 0:
            return write_stage(directory, version, narrowed(tensors, dtype.value))
        for _ in tensors:
            pass
        return None

    def put_stage(self, manifest: Manifest) -> Manifest:
        """See actors/weight_objects.py."""
        return put_stage(manifest)

    def probe_logprobs(self, ids: Sequence[int]) -> list[float]:
        """See Learner.logprobs."""
        return self._learner.logprobs(ids)

    def release_memory(self) -> None:
        """See Learner."""
        self._learner.release_memory()

    def open_transfer(self, config: TransferConfig, servers: Sequence[Any], deadline_s: float) -> tuple[str, ...]:
        """Meets the servers' actors, after leaving the group before; the names of all tensors that will be sent."""
        if self._sender is not None:
            self._sender.close()
        self._sender = Sender(config, partial(self._learner.export_weights, on_device=True), self._rank)
        with _server_deaths():
            self._sender.open(partial(call_all, servers, deadline_s=deadline_s))
        return self._sender.names

    def send_weights(self, sending: Sending) -> None:
        """See Sender.send."""
        if self._sender is None:
            raise ValueError("send_weights needs open_transfer first")
        with _server_deaths():
            self._sender.send(sending)


@contextmanager
def _server_deaths() -> Iterator[None]:
    """A server's death is not a rank's own, and nobody can leave a transfer that it was part of."""
    try:
        yield
    except ActorDied as error:
        raise WeightSyncError(
            f"a server died while weights were sent ({error}); the same command goes on from the last checkpoint"
        ) from error
