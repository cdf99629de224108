"""The learner group: one actor per rank, driven as one Learner.

Invariant: every verb runs on all ranks or the run ends; ranks get equal numbers of micro-batches, so none waits alone.
Called by recipes; learners/learner.py holds the numbers.
"""

import asyncio
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray

from actors.calls import call
from actors.cluster import Resources
from actors.weight_objects import put_stage
from actors.weight_stage import Manifest, write_stage
from learners.config import LearnerConfig, LossConfig
from learners.plan import BatchPlan, RankPlan
from trajectories.schema import PolicyVersion


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerGroupConfig:
    """How many ranks, where, and how long they may take."""

    num_ranks: int = 1
    step_deadline_s: float = 3600.0
    start_deadline_s: float = 600.0
    resources: Resources = field(default_factory=Resources)

    def __post_init__(self) -> None:
        if self.num_ranks < 1:
            raise ValueError(f"num_ranks must be >= 1, got {self.num_ranks}")


class LearnerRank:
    """One rank's process. Imports torch where it runs, not where it is named."""

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

    def rendezvous(self) -> str:
        """A tcp:// address on this rank's node at which all ranks may meet."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return f"tcp://{ray.util.get_node_ip_address()}:{probe.getsockname()[1]}"

    def build(self, address: str) -> tuple[int, str]:
        """Joins the process group, builds the Learner; returns the world size that torch reports and the sharding."""
        from learners.learner import Learner, init_process_group

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

    def save(self, directory: Path) -> None:
        """See Learner."""
        self._learner.save(directory)

    def load(self, directory: Path) -> None:
        """See Learner."""
        self._learner.load(directory)

    def save_pretrained(self, directory: Path) -> None:
        """See Learner."""
        self._learner.save_pretrained(directory)

    def stage_weights(self, directory: Path, version: PolicyVersion) -> Manifest | None:
        """Gathers all parameters on every rank; rank 0 writes them and returns what it wrote."""
        tensors = self._learner.export_weights()
        if self._rank == 0:
            return write_stage(directory, version, tensors)
        for _ in tensors:
            pass
        return None

    def put_stage(self, manifest: Manifest) -> Manifest:
        """See actors/weight_objects.py."""
        return put_stage(manifest)

    def probe_logprobs(self, ids: Sequence[int]) -> list[float]:
        """See Learner.logprobs."""
        return self._learner.logprobs(ids)


class LearnerGroup:
    """All ranks as one Learner; made by `start_learner_group`."""

    def __init__(self, config: LearnerGroupConfig, ranks: list[Any], *, world_size: int, sharding: str) -> None:
        self._config = config
        self._ranks = ranks
        self.world_size = world_size
        """Number of ranks as torch.distributed reports it."""
        self.sharding = sharding
        """How torch shards the weights: the class that `fully_shard` made of the network."""

    async def forward_backward(self, plan: BatchPlan, loss: LossConfig) -> dict[str, float]:
        """Gradients of one step over all ranks; metrics are the same on each, reduced there."""
        per_rank = await self._each("forward_backward", [(rank_plan, loss) for rank_plan in plan.ranks])
        return per_rank[0]

    async def optim_step(self) -> dict[str, float]:
        """One optimizer step; returns learning rate and gradient norm."""
        return (await self._each("optim_step"))[0]

    async def sequence_logprobs(self, plan: BatchPlan) -> list[float]:
        """Summed log-probability of each planned Sample's trained tokens, in the order of the plan, rank by rank."""
        per_rank = await self._each("sequence_logprobs", [(rank_plan,) for rank_plan in plan.ranks])
        return [value for values in per_rank for value in values]

    async def save(self, directory: Path) -> None:
        """Writes a complete checkpoint."""
        await self._each("save", [(directory,)] * len(self._ranks))

    async def load(self, directory: Path) -> None:
        """Restores a complete checkpoint."""
        await self._each("load", [(directory,)] * len(self._ranks))

    async def save_pretrained(self, directory: Path) -> None:
        """Writes a Hugging Face directory that transformers and vLLM load."""
        await self._each("save_pretrained", [(directory,)] * len(self._ranks))

    async def stage_weights(self, directory: Path, version: PolicyVersion) -> Manifest:
        """Writes the current weights for servers to pull."""
        return (await self._each("stage_weights", [(directory, version)] * len(self._ranks)))[0]

    async def put_stage(self, manifest: Manifest) -> Manifest:
        """Puts what `stage_weights` wrote into Ray's object store, for nodes that share no file system."""
        rank, deadline_s = self._ranks[0], self._config.step_deadline_s
        return await call(rank.put_stage, manifest, deadline_s=deadline_s, what="put_stage on rank 0")

    async def probe_logprobs(self, ids: Sequence[int]) -> list[float]:
        """Log-probability of each of `ids` after the first under the current weights, at temperature 1."""
        return (await self._each("probe_logprobs", [(ids,)] * len(self._ranks)))[0]

    async def _each(self, verb: str, arguments: Sequence[tuple[Any, ...]] | None = None) -> list[Any]:
        arguments = arguments or [()] * len(self._ranks)
        return await asyncio.gather(
            *(
                call(
                    getattr(rank, verb), *args, deadline_s=self._config.step_deadline_s, what=f"{verb} on rank {index}"
                )
                for index, (rank, args) in enumerate(zip(self._ranks, arguments, strict=True))
            )
        )


@asynccontextmanager
async def start_learner_group(
    config: LearnerGroupConfig, learner: LearnerConfig, *, model: Path, store: Path
) -> AsyncIterator[LearnerGroup]:
    """A learner group on the weights of `model` (a Hugging Face directory) that reads Samples from `store`."""
    # Threads that spin at a barrier for one that lost its core: a step of 2 s took 36 s beside other processes.
    actor = ray.remote(LearnerRank).options(**config.resources.options(OMP_WAIT_POLICY="PASSIVE"))
    ranks = [
        actor.remote(learner, model, store, rank=rank, num_ranks=config.num_ranks, threads=config.resources.threads)
        for rank in range(config.num_ranks)
    ]
    try:
        address = await call(ranks[0].rendezvous, deadline_s=config.start_deadline_s, what="start of learner rank 0")
        built = await asyncio.gather(
            *(
                call(rank.build, address, deadline_s=config.start_deadline_s, what=f"build of learner rank {index}")
                for index, rank in enumerate(ranks)
            )
        )
        yield LearnerGroup(config, ranks, world_size=built[0][0], sharding=built[0][1])
    finally:
        for rank in ranks:
            ray.kill(rank)  # pyright: ignore[reportArgumentType]  # Ray types a proxy, not the handle it is
