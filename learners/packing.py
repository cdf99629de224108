"""Packing: Samples laid one after the other into flat tensors, without padding.

Invariant: positions restart at each Sample, and the layout keeps attention inside it, so a packed Sample is computed
as if it stood alone. Called by learners/learner.py for each micro-batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from learners.attention import PackedLayout, packed_layout
from learners.sequence_parallel import SequenceParallel
from trajectories.samples import Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightedSample:
    """A Sample with what its trained tokens count."""

    sample: Sample
    advantage: float
    weight: float
    """Factor of each trained token's loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedBatch:
    """A micro-batch: T tokens of which N are trained."""

    ids_T: Tensor
    """[T] int64."""
    positions_T: Tensor
    """[T] int64, from 0 in each Sample."""
    layout: PackedLayout
    predictors_N: Tensor
    """[N] int64: the token before each trained one, whose hidden state predicts it."""
    targets_N: Tensor
    """[N] int64: ids of the trained tokens."""
    behaviour_N: Tensor
    """[N] float32: recorded log-probabilities; NaN where none was recorded."""
    advantages_N: Tensor
    """[N] float32."""
    weights_N: Tensor
    """[N] float32."""
    members_N: Tensor
    """[N] int64: which of the given Samples each trained token belongs to."""
    num_samples: int


def pack(samples: Sequence[WeightedSample], device: torch.device | str = "cpu") -> PackedBatch:
    """The Samples as one micro-batch, longest first.

    No Samples give a single untrained token: a rank without work still walks through the model with the others.
    """
    if not samples:
        return pack([WeightedSample(sample=_filler(), advantage=0.0, weight=0.0)], device)
    order = sorted(range(len(samples)), key=lambda index: -len(samples[index].sample.ids))
    lengths = [len(samples[index].sample.ids) for index in order]
    mask_T = np.concatenate([samples[index].sample.mask for index in order])
    ids_T = np.concatenate([samples[index].sample.ids for index in order]).astype(np.int64)
    trained_N = np.flatnonzero(mask_T)
    owners_T = np.repeat(np.asarray(order), lengths)
    members_N = owners_T[trained_N]
    columns = {
        "ids_T": ids_T,
        "positions_T": np.concatenate([np.arange(length) for length in lengths]),
        "predictors_N": trained_N - 1,
        "targets_N": ids_T[trained_N],
        "behaviour_N": np.concatenate([samples[index].sample.logprobs for index in order])[trained_N],
        "advantages_N": np.asarray([s.advantage for s in samples], np.float32)[members_N],
        "weights_N": np.asarray([s.weight for s in samples], np.float32)[members_N],
        "members_N": members_N,
    }
    return PackedBatch(
        layout=packed_layout(lengths, device),
        num_samples=len(samples),
        **{name: torch.from_numpy(column).to(device) for name, column in columns.items()},
    )


def share(batch: PackedBatch, parallel: SequenceParallel) -> PackedBatch:
    """The slice of `batch` that this rank of `parallel` computes: equally many tokens on each, and the trained ones
    whose predictor lies there.

    Untrained Samples of one token fill up to a multiple of the ranks.
    """
    device = batch.ids_T.device
    num_fillers = -batch.ids_T.numel() % parallel.size
    layout = packed_layout([*batch.layout.lengths, *[1] * num_fillers], device)
    fillers = torch.zeros(num_fillers, dtype=torch.int64, device=device)
    num_here = _tokens_per_rank(batch, parallel)
    start = parallel.rank * num_here
    is_here_N = is_here(batch, parallel)
    return PackedBatch(
        ids_T=torch.cat([batch.ids_T, fillers])[start : start + num_here],
        positions_T=torch.cat([batch.positions_T, fillers])[start : start + num_here],
        layout=replace(layout, parallel=parallel),
        predictors_N=batch.predictors_N[is_here_N] - start,
        targets_N=batch.targets_N[is_here_N],
        behaviour_N=batch.behaviour_N[is_here_N],
        advantages_N=batch.advantages_N[is_here_N],
        weights_N=batch.weights_N[is_here_N],
        members_N=batch.members_N[is_here_N],
        num_samples=batch.num_samples,
    )


def is_here(batch: PackedBatch, parallel: SequenceParallel) -> Tensor:
    """[N] bool: the trained tokens of the whole `batch` whose predictor lies in this rank's slice."""
    num_here = _tokens_per_rank(batch, parallel)
    return batch.predictors_N // num_here == parallel.rank


def _tokens_per_rank(batch: PackedBatch, parallel: SequenceParallel) -> int:
    return -(-batch.ids_T.numel() // parallel.size)


def _filler() -> Sample:
    return Sample(ids=np.zeros(1, np.int32), mask=np.zeros(1, np.bool_), logprobs=np.zeros(1, np.float32))
