"""The learner group: one actor per rank, driven as one Learner.

Invariant: every verb runs on all ranks or raises; ranks get equal numbers of micro-batches, so none waits alone. After
LearnerLost nothing runs until `restart`, which makes all ranks anew with the first weights: no rank outlives another.
Called by recipes; actors/learner_rank.py is one rank, learners/learner.py holds the numbers.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray

from actors.calls import call
from actors.cluster import Resources
from actors.errors import ActorDied, CheckpointFailed, DeadlineMissed, LearnerLost
from actors.inference_config import DType, Transport
from actors.learner_rank import LearnerRank
from actors.placement import SHARED_GPU, Place, unplaced
from actors.vllm_transfer import Sending, TransferConfig
from actors.weight_stage import Manifest
from learners.config import LearnerConfig, LossConfig
from learners.plan import BatchPlan, RankPlan
from trajectories.schema import PolicyVersion

_SAVE_POLL_S = 0.1
_DEATH_NOTICE_S = 20.0
"""How long after one rank's failure Ray may take to tell that it was another one's death."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerGroupConfig:
    """How many ranks, where, and how long they may take."""

    num_ranks: int = 1
    step_deadline_s: float = 3600.0
    start_deadline_s: float = 600.0
    max_restarts: int = 3
    """How often dead ranks are made good between two checkpoints; one more death ends the run."""
    resources: Resources = field(default_factory=Resources)

    def __post_init__(self) -> None:
        if self.num_ranks < 1:
            raise ValueError(f"num_ranks must be >= 1, got {self.num_ranks}")


class LearnerGroup:
    """All ranks as one Learner; made by `start_learner_group`."""

    def __init__(
        self,
        config: LearnerGroupConfig,
        learner: LearnerConfig,
        *,
        model: Path,
        store: Path,
        ranks: Sequence[Any] = (),
        places: Sequence[Place] = (),
    ) -> None:
        """`ranks`: actors that are ranks already, in the place of those that `start` makes; `places`: where they go."""
        self._config = config
        self._learner = learner
        self._model = model
        self._store = store
        self._ranks: list[Any] = list(ranks)
        self._places = places
        self.num_restarts = 0
        """Times that dead ranks were made good."""
        self.world_size = 0
        """Number of ranks as torch.distributed reports it."""
        self.sharding = ""
        """How torch shards the weights: the class that `fully_shard` made of the network."""
        self.num_shares = config.num_ranks // learner.sequence_parallel
        """Into how many parts a plan divides a step (its `num_ranks`)."""

    async def start(self) -> None:
        """Starts all ranks on the first weights; LearnerLost when one dies meanwhile, PlacementError without room."""
        try:
            await self._start()
        except ActorDied as error:
            raise LearnerLost(f"the learner did not start: {error}") from error

    async def _start(self) -> None:
        config = self._config
        options = config.resources.options()
        at = [{"scheduling_strategy": place, "num_gpus": SHARED_GPU} for place in self._places]
        self._ranks = [
            ray.remote(LearnerRank)
            .options(**options | here)
            .remote(self._learner, self._model, self._store, rank, config.num_ranks, config.resources.threads)
            for rank, here in enumerate(at or [{}] * config.num_ranks)
        ]
        limit = config.start_deadline_s
        try:
            address = await call(self._ranks[0].rendezvous, deadline_s=limit, what="start of learner rank 0")
            built = await asyncio.gather(
                *(
                    call(rank.build, address, deadline_s=limit, what=f"build of learner rank {index}")
                    for index, rank in enumerate(self._ranks)
                )
            )
        except DeadlineMissed as error:
            raise unplaced(error, config.resources) from error
        self.world_size, self.sharding = built[0]

    async def restart(self) -> None:
        """Ends what is left of the ranks and starts all anew, on the first weights; `load` restores a checkpoint."""
        self.kill()
        await self.start()
        self.num_restarts += 1

    def kill(self) -> None:
        """Ends every rank's process."""
        for rank in self._ranks:
            ray.kill(rank)
        self._ranks = []

    async def forward_backward(self, plan: BatchPlan, loss: LossConfig) -> dict[str, float]:
        """Gradients of one step over all ranks; metrics are the same on each, reduced there."""
        return (await self._each("forward_backward", [(share, loss) for share in self._shares(plan)]))[0]

    async def optim_step(self) -> dict[str, float]:
        """One optimizer step; returns learning rate and gradient norm."""
        return (await self._each("optim_step"))[0]

    async def sequence_logprobs(self, plan: BatchPlan) -> list[float]:
        """Summed log-probability of each planned Sample's trained tokens, in the order of the plan, rank by rank."""
        per_rank = await self._each("sequence_logprobs", [(share,) for share in self._shares(plan)])
        return [value for values in per_rank[:: self._learner.sequence_parallel] for value in values]

    async def begin_save(self, directory: Path) -> None:
        """Copies what a checkpoint holds; the ranks write it while they train on. One begun before is waited for."""
        await self._each("begin_save", [(directory,)] * len(self._ranks))

    async def is_saved(self) -> bool:
        """Whether the checkpoint that was begun is complete; CheckpointFailed when it cannot become so."""
        if not all(await self._each("is_saved")):
            return False
        if reasons := [reason for reason in await self._each("finish_save") if reason is not None]:
            raise CheckpointFailed(f"the checkpoint could not be written: {reasons[0]}; the run's last one counts")
        return True

    async def finish_save(self) -> None:
        """Returns when the checkpoint that was begun is complete; DeadlineMissed after `step_deadline_s`."""
        deadline = time.monotonic() + self._config.step_deadline_s
        # Asked again and again, since a rank that waited for its disk could not train meanwhile.
        while not await self.is_saved():
            if time.monotonic() > deadline:
                limit = self._config.step_deadline_s
                raise DeadlineMissed(f"the checkpoint is not written within learner.step_deadline_s={limit:g} s")
            await asyncio.sleep(_SAVE_POLL_S)

    async def load(self, directory: Path) -> None:
        """Restores a complete checkpoint."""
        await self._each("load", [(directory,)] * len(self._ranks))

    async def save_pretrained(self, directory: Path) -> None:
        """Writes a Hugging Face directory that transformers and vLLM load; with LoRA, its adapter/ holds that alone."""
        await self._each("save_pretrained", [(directory,)] * len(self._ranks))

    async def stage_weights(self, directory: Path, version: PolicyVersion, dtype: DType) -> Manifest:
        """Writes the current weights, no wider than `dtype`, for servers to pull."""
        return (await self._each("stage_weights", [(directory, version, dtype)] * len(self._ranks)))[0]

    async def put_stage(self, manifest: Manifest) -> Manifest:
        """Puts what `stage_weights` wrote into Ray's object store, for nodes that share no file system."""
        rank, deadline_s = self._ranks[0], self._config.step_deadline_s
        return await call(rank.put_stage, manifest, deadline_s=deadline_s, what="put_stage on rank 0")

    async def probe_logprobs(self, ids: Sequence[int]) -> list[float]:
        """Log-probability of each of `ids` after the first under the current weights, at temperature 1."""
        return (await self._each("probe_logprobs", [(ids,)] * len(self._ranks)))[0]

    async def release_memory(self) -> None:
        """Gives back what each rank's GPU holds beyond living tensors: the end of the learner's turn."""
        await self._each("release_memory")

    async def open_transfer(
        self, backend: Transport, servers: Sequence[Any], server_ranks: Sequence[int], deadline_s: float
    ) -> tuple[str, ...]:
        """Has all ranks meet the servers' actors, of so many GPUs each; the names of all tensors that will be sent."""
        address = await call(self._ranks[0].rendezvous, deadline_s=deadline_s, what="a meeting place on learner rank 0")
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        config = TransferConfig(
            backend=backend,
            server_ranks=tuple(server_ranks),
            master_address=host,
            master_port=int(port),
            namespace=ray.get_runtime_context().namespace,
        )
        return (await self._each("open_transfer", [(config, list(servers), deadline_s)] * len(self._ranks)))[0]

    async def send_weights(self, sending: Sending) -> None:
        """Sends the current weights to the servers of `open_transfer`; returns when all hold them."""
        await self._each("send_weights", [(sending,)] * len(self._ranks))

    def _shares(self, plan: BatchPlan) -> list[RankPlan]:
        """One per rank; ranks that share their micro-batches get the same."""
        if len(plan.ranks) * self._learner.sequence_parallel != self._config.num_ranks:
            raise ValueError(
                f"a plan for {len(plan.ranks)} ranks does not fit {self._config.num_ranks} learner ranks that share "
                f"micro-batches by {self._learner.sequence_parallel}; plan with num_ranks={self.num_shares}"
            )
        return [share for share in plan.ranks for _ in range(self._learner.sequence_parallel)]

    async def _each(self, verb: str, arguments: Sequence[tuple[Any, ...]] | None = None) -> list[Any]:
        """The verb's result on every rank; LearnerLost when one's process is gone."""
        if not self._ranks:
            raise LearnerLost(f"the learner has no ranks for {verb}: they died, and are not back")
        arguments = arguments or [()] * len(self._ranks)
        limit = self._config.step_deadline_s
        calls = [
            asyncio.ensure_future(call(getattr(rank, verb), *args, deadline_s=limit, what=f"{verb} on rank {index}"))
            for index, (rank, args) in enumerate(zip(self._ranks, arguments, strict=True))
        ]
        try:
            return await asyncio.gather(*calls)
        except Exception as error:
            if (death := await _death_behind(error, calls)) is not None:
                raise LearnerLost(f"the learner is lost: {death}") from death
            raise
        finally:
            for each in calls:
                each.cancel()


async def _death_behind(error: Exception, calls: Sequence[asyncio.Future[Any]]) -> ActorDied | None:
    """The death that explains a rank's failure: others see their connection to it break, often before Ray tells."""
    deadline = time.monotonic() + _DEATH_NOTICE_S
    pending: set[asyncio.Future[Any]] = set(calls)
    while not isinstance(error, ActorDied):
        limit = max(0.0, deadline - time.monotonic())
        done, pending = await asyncio.wait(pending, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
        errors = [each.exception() for each in done]
        error = next((each for each in errors if isinstance(each, ActorDied)), error)
        if not done or not pending:
            break
    return error if isinstance(error, ActorDied) else None


@asynccontextmanager
async def start_learner_group(
    config: LearnerGroupConfig, learner: LearnerConfig, *, model: Path, store: Path, places: Sequence[Place] = ()
) -> AsyncIterator[LearnerGroup]:
    """A learner group on the weights of `model` (a Hugging Face directory) that reads Samples from `store`.

    `places`: where each rank goes, beside the server that shares its GPU; empty leaves it to Ray.
    """
    if config.num_ranks % learner.sequence_parallel:
        raise ValueError(
            f"learner.sequence_parallel={learner.sequence_parallel} must divide learner.num_ranks={config.num_ranks}"
        )
    group = LearnerGroup(config, learner, model=model, store=store, places=places)
    try:
        await group.start()
        yield group
    finally:
        group.kill()
