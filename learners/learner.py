"""The Learner: one rank of the policy's optimisation.

Invariant: every verb is collective; ranks that call the same verbs with their shares of one plan hold shards of the
same weights, the same step and the same metrics. Called by learner actors and tests.
"""

import logging
from collections.abc import Iterator, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from learners.checkpoint import CheckpointWriter, load_checkpoint
from learners.config import LearnerConfig, LossConfig, RatioLevel
from learners.export import save_pretrained
from learners.lora import is_adapter, merged_weights, peft_config, peft_name, save_adapter
from learners.loss_metrics import SUMMED, metric_sums, metrics_from_sums
from learners.losses import token_loss
from learners.model import COMPUTE_DTYPE, compute_device, full_tensor, load_policy, reshard
from learners.optimizer import NonFiniteGradients, build_optimizer, describe_nonfinite, learning_rate
from learners.packing import PackedBatch, WeightedSample, is_here, pack, share
from learners.plan import RankPlan, SampleRef
from learners.process_group import init_process_group
from learners.reference import Reference, embedding_rows
from learners.sequence_parallel import join_sequence_parallel
from learners.vector_math import settle_vector_math
from trajectories.samples import Sample, trajectory_samples
from trajectories.store import read_group, read_sample

logger = logging.getLogger(__name__)

CACHED_GROUPS = 32
"""Decoded Groups that a rank keeps while it walks through its micro-batches."""


class Learner:
    """Weights, optimizer and schedule of one rank."""

    def __init__(self, config: LearnerConfig, *, model: Path, rank: int = 0, world_size: int = 1) -> None:
        """Loads the Hugging Face directory `model`; ranks must have met in `init_process_group` unless there is one."""
        settle_vector_math()
        if world_size == 1 and not dist.is_initialized():
            init_process_group()
        if not dist.is_initialized() or dist.get_world_size() != world_size:
            raise ValueError(f"call init_process_group with world_size={world_size} on every rank first")
        self._config = config = config.for_run_of(None)
        self._model = model
        self._rank = rank
        self._world_size = world_size
        self._parallel = join_sequence_parallel(config.sequence_parallel, rank=rank, world_size=world_size)
        self._network = load_policy(config, model, world_size=world_size)
        self._device = compute_device()
        self._optimizer = build_optimizer(config, self._network.named_weights())
        self._writer = CheckpointWriter(rank=rank)
        self._reference = None
        if config.reference is not None:
            self._reference = Reference(
                config, config.reference, num_embeddings=embedding_rows(self._network), world_size=world_size
            )
        self._has_gradient = False
        self._nonfinite_in_a_row = 0
        self.step = 0
        """Optimizer steps taken, skipped ones included; the position in the schedule."""
        self.num_skipped = 0
        """Steps that changed nothing: no gradient, or one that was not finite."""

    @property
    def sharding(self) -> str:
        """Class of the network as `fully_shard` made it: "FSDPPolicyNetwork"."""
        return type(self._network).__name__

    def forward_backward(self, plan: RankPlan, loss: LossConfig, store: Path) -> dict[str, float]:
        """Adds the gradients of this rank's share; metrics of the whole step over all ranks.

        ValueError for a ratio at sequence level where ranks share sequences: each would see its own tokens only.

        May be called several times before `optim_step` if the plans' weights were made for all of them. Ranks that
        share micro-batches (`sequence_parallel`) get the same plan.
        """
        if self._parallel is not None and loss.ratio_level is RatioLevel.SEQUENCE:
            raise ValueError("loss.ratio_level sequence needs learner.sequence_parallel 1; use ratio_level token")
        sums = torch.zeros(len(SUMMED), dtype=torch.float64)
        largest_ratio = 0.0
        reader = _Reader(store)
        for refs in plan.micro_batches:
            batch = self._share(pack(reader.read(refs), self._device))
            logprobs_N, entropy_N = self._network(batch, loss.temperature)
            result = token_loss(
                loss,
                logprobs_N,
                batch.behaviour_N,
                batch.advantages_N,
                members_N=batch.members_N,
                reference_N=self._reference_logprobs(batch, loss),
            )
            # FSDP averages gradients over ranks; the weights are made for a sum.
            (torch.dot(result.loss_N, batch.weights_N) * self._world_size).backward()
            sums += metric_sums(result, batch.weights_N, logprobs_N, batch.behaviour_N, entropy_N)
            if result.ratio_N is not None and result.ratio_N.numel():
                largest_ratio = max(largest_ratio, float(result.ratio_N.max()))
            self._has_gradient = True
        return metrics_from_sums(loss, *self._reduce(sums, largest_ratio))

    def optim_step(self) -> dict[str, float]:
        """One optimizer step on the gradients added so far; NonFiniteGradients after too many bad ones in a row."""
        rate = learning_rate(self._config, self.step)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        norm = self._clip() if self._has_gradient else 0.0
        is_finite = bool(np.isfinite(norm))
        where = "" if is_finite else describe_nonfinite(self._network.named_weights())
        is_skipped = not (self._has_gradient and is_finite)
        if not is_skipped:
            self._optimizer.step()
        self._optimizer.zero_grad()
        self._has_gradient = False
        self.step += 1
        self.num_skipped += is_skipped
        self._nonfinite_in_a_row = 0 if is_finite else self._nonfinite_in_a_row + 1
        if self._nonfinite_in_a_row >= self._config.max_nonfinite_steps:
            raise NonFiniteGradients(self.step, self._nonfinite_in_a_row, where)
        if not is_finite:
            logger.warning("step=%s skipped: gradient norm %s in %s", self.step, norm, where)
        return {
            "optim/lr": rate,
            "optim/grad_norm": norm,
            "optim/skipped": float(is_skipped),
            "optim/num_skipped": float(self.num_skipped),
        }

    def sequence_logprobs(self, plan: RankPlan, store: Path) -> list[float]:
        """Summed log-probability of each planned Sample's trained tokens at temperature 1, in the order of the plan."""
        sequences: list[float] = []
        reader = _Reader(store)
        for refs in plan.micro_batches:
            batch = pack(reader.read(refs), self._device)
            logprobs_N = self._logprobs(batch)
            totals = torch.zeros(batch.num_samples, dtype=torch.float64)
            totals.index_add_(0, batch.members_N.cpu(), logprobs_N.double().cpu())
            sequences += totals.tolist()[: len(refs)]
        return sequences

    def logprobs(self, ids: Sequence[int]) -> list[float]:
        """Log-probability of each of `ids` after the first, at temperature 1: len(ids) - 1 floats."""
        mask = np.arange(len(ids)) > 0
        sample = Sample(ids=np.asarray(ids, np.int32), mask=mask, logprobs=np.zeros(len(ids), np.float32))
        batch = pack([WeightedSample(sample=sample, advantage=0.0, weight=0.0)], self._device)
        return self._logprobs(batch).tolist()

    def export_weights(self, *, on_device: bool = False) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, whole tensor in the compute dtype), one at a time; all ranks must exhaust it.

        On CPU, or with `on_device` where the learner computes. A tied lm_head comes once, as the embedding.
        """
        device, dtype = self._device if on_device else "cpu", COMPUTE_DTYPE[self._config.precision]
        for name, tensor in self._whole_weights():
            yield name, tensor.to(device, dtype)

    def release_memory(self) -> None:
        """Gives back what PyTorch keeps of a GPU beyond the tensors that live, for whoever shares the GPU."""
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def save_pretrained(self, directory: Path) -> None:
        """Writes a Hugging Face directory that transformers and vLLM load; with LoRA, its adapter/ holds that alone."""
        save_pretrained(self.export_weights(), source=self._model, directory=directory, is_writer=self._rank == 0)
        dist.barrier()
        if self._config.lora.rank:
            self.save_adapter(directory / "adapter")

    def save_adapter(self, directory: Path) -> None:
        """Writes the adapter alone, as a directory that peft and vLLM load beside the base model."""
        if not self._config.lora.rank:
            raise ValueError("there is no adapter to save: learner.lora.rank is 0; use save_pretrained")
        adapter, config = self.export_adapter(), self.adapter_config
        save_adapter(adapter, config, directory=directory, is_writer=self._rank == 0)
        dist.barrier()

    @property
    def adapter_config(self) -> dict[str, Any]:
        """The adapter's configuration in peft's form."""
        return peft_config(self._config.lora, self._model)

    def export_adapter(self) -> Iterator[tuple[str, Tensor]]:
        """(peft's name, whole float32 CPU tensor) of each of the adapter's matrices; all ranks must exhaust it."""
        for name, weight in self._network.named_weights():
            if is_adapter(name):
                yield peft_name(name), full_tensor(weight).to("cpu")

    def save(self, directory: Path) -> None:
        """Writes a complete checkpoint: weights, optimizer, step, skipped steps and random state."""
        self.begin_save(directory)
        self.finish_save()

    def begin_save(self, directory: Path) -> None:
        """Copies what a checkpoint holds and writes it while training goes on; `finish_save` says when it is there."""
        self._writer.begin(directory, self._checkpointed_weights(), self._optimizer, self._progress())

    def finish_save(self) -> None:
        """Waits for the checkpoint that `begin_save` began; CheckpointError saying what kept it from being written."""
        self._writer.finish()

    def is_saved(self) -> bool:
        """Whether `finish_save` would not wait."""
        return self._writer.is_done

    def load(self, directory: Path) -> None:
        """Restores a complete checkpoint, saved by any number of ranks; CheckpointError when it is not one of ours."""
        progress = load_checkpoint(directory, self._checkpointed_weights(), self._optimizer, rank=self._rank)
        self.step = progress["step"]
        self.num_skipped = progress["num_skipped"]
        self._nonfinite_in_a_row = progress["nonfinite_in_a_row"]
        self._optimizer.zero_grad()
        self._has_gradient = False

    @torch.no_grad()
    def _logprobs(self, batch: PackedBatch) -> Tensor:
        """[N] of the whole micro-batch, on every rank that shares it."""
        here_N, _ = self._network(self._share(batch), 1.0)
        reshard(self._network)
        if self._parallel is None:
            return here_N
        logprobs_N = here_N.new_zeros(batch.targets_N.numel())
        logprobs_N[is_here(batch, self._parallel)] = here_N
        dist.all_reduce(logprobs_N, group=self._parallel.group)
        return logprobs_N

    def _share(self, batch: PackedBatch) -> PackedBatch:
        return batch if self._parallel is None else share(batch, self._parallel)

    def _whole_weights(self) -> Iterator[tuple[str, Tensor]]:
        weights = dict(self._network.named_weights())
        if self._config.lora.rank:
            yield from merged_weights(weights, self._config.lora, full_tensor)
            return
        for name, weight in weights.items():
            yield name, full_tensor(weight)

    def _checkpointed_weights(self) -> dict[str, torch.nn.Parameter]:
        """All weights, or the adapters alone where nothing else is trained."""
        weights = dict(self._network.named_weights())
        return {name: weight for name, weight in weights.items() if not self._config.lora.rank or is_adapter(name)}

    def _progress(self) -> dict[str, int]:
        return {"step": self.step, "num_skipped": self.num_skipped, "nonfinite_in_a_row": self._nonfinite_in_a_row}

    def _reference_logprobs(self, batch: PackedBatch, loss: LossConfig) -> Tensor | None:
        if self._reference is None or not loss.kl_coef:
            return None
        return self._reference.logprobs(batch, loss.temperature)

    def _clip(self) -> float:
        """Scales gradients down to `max_grad_norm`; their norm over all ranks before. One that is not finite stays."""
        parameters = list(self._network.parameters())
        norm = get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
        whole = float(full_tensor(norm))
        if np.isfinite(whole):  # another would spread to every gradient, and hide whose it was
            clip_grads_with_norm_(parameters, self._config.max_grad_norm, norm)
        return whole

    def _reduce(self, sums: Tensor, largest_ratio: float) -> tuple[Tensor, float]:
        """Sums and maximum over all ranks."""
        if self._world_size == 1:
            return sums, largest_ratio
        sums = sums.to(self._device)
        largest = torch.tensor(largest_ratio, device=self._device)
        dist.all_reduce(sums)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        return sums.cpu(), float(largest)


class _Reader:
    """Fetches planned Samples; Groups are read once while their members are near each other in the plan."""

    def __init__(self, store: Path) -> None:
        self._store = store
        self._group = lru_cache(maxsize=CACHED_GROUPS)(partial(read_group, store))

    def read(self, refs: Sequence[SampleRef]) -> list[WeightedSample]:
        return [WeightedSample(sample=self._sample(ref), advantage=ref.advantage, weight=ref.weight) for ref in refs]

    def _sample(self, ref: SampleRef) -> Sample:
        if ref.member is None:
            return read_sample(self._store, ref.location)
        return trajectory_samples(self._group(ref.location).trajectories[ref.member])[ref.branch]
