"""Packing: Samples laid one after the other into flat tensors, without padding.

Invariant: positions restart at each Sample, and the layout keeps attention inside it, so a packed Sample is computed
as if it stood alone. Called by learners/learner.py for each micro-batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from learners.attention import PackedLayout, packed_layout
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


def _filler() -> Sample:
    return Sample(ids=np.zeros(1, np.int32), mask=np.zeros(1, np.bool_), logprobs=np.zeros(1, np.float32))
