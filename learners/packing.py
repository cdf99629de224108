"""Packing: Samples laid one after the other into flat tensors, without padding, a common prefix only once.

Invariant: a token has its position in its Sample, and the layout keeps attention inside it, so a packed Sample is
computed as if it stood alone. Called by learners/learner.py for each micro-batch.

The members of a Group begin with the same prompt, and branches of a Trajectory with the same turns. A token's hidden
state depends on what is before it alone, so equal beginnings have equal states and need computing once; what is
trained in them makes no difference.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from learners.attention import PackedLayout, packed_layout
from learners.sequence_parallel import SequenceParallel
from trajectories.samples import Sample

SHARED_MIN = 0.05
"""Prefixes are shared where that saves at least this part of the tokens: less does not pay for copying them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightedSample:
    """A Sample with what its trained tokens count."""

    sample: Sample
    advantage: float
    weight: float
    """Factor of each trained token's loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedBatch:
    """A micro-batch: T tokens, N trained ones. Where Samples share tokens, S >= T are those of the whole Samples."""

    ids_T: Tensor
    """[T] int64."""
    positions_T: Tensor
    """[T] int64, in its Sample, from 0."""
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
    """The Samples as one micro-batch: layout and trained tokens longest Sample first, T tokens in that order too unless
    some are shared.

    No Samples give a single untrained token: a rank without work still walks through the model with the others.
    """
    if not samples:
        return pack([WeightedSample(sample=_filler(), advantage=0.0, weight=0.0)], device)
    order = sorted(range(len(samples)), key=lambda index: -len(samples[index].sample.ids))
    lengths = [len(samples[index].sample.ids) for index in order]
    ids_S = np.concatenate([samples[index].sample.ids for index in order]).astype(np.int64)
    positions_S = np.concatenate([np.arange(length) for length in lengths])
    trained_N = np.flatnonzero(np.concatenate([samples[index].sample.mask for index in order]))
    members_N = np.repeat(np.asarray(order), lengths)[trained_N]
    sources_S = _sources([samples[index].sample.ids for index in order])
    num_tokens = int(sources_S.max()) + 1
    is_shared = len(ids_S) - num_tokens >= SHARED_MIN * len(ids_S)
    if not is_shared:
        sources_S, num_tokens = np.arange(len(ids_S)), len(ids_S)
    ids_T, positions_T = np.empty((2, num_tokens), np.int64)
    ids_T[sources_S], positions_T[sources_S] = ids_S, positions_S
    columns = {
        "ids_T": ids_T,
        "positions_T": positions_T,
        "predictors_N": sources_S[trained_N - 1],
        "targets_N": ids_S[trained_N],
        "behaviour_N": np.concatenate([samples[index].sample.logprobs for index in order])[trained_N],
        "advantages_N": np.asarray([s.advantage for s in samples], np.float32)[members_N],
        "weights_N": np.asarray([s.weight for s in samples], np.float32)[members_N],
        "members_N": members_N,
    }
    return PackedBatch(
        layout=packed_layout(lengths, device, torch.from_numpy(sources_S) if is_shared else None),
        num_samples=len(samples),
        **{name: torch.from_numpy(column).to(device) for name, column in columns.items()},
    )


def _sources(sequences: Sequence[NDArray[np.int32]]) -> NDArray[np.int64]:
    """[S] the packed token that each token of the sequences is, laid one after the other.

    In the order of a dictionary, what a sequence has in common with any before it, it has with the one just before.
    [7, 8, 9], [7, 8, 5] -> 0 1 3, 0 1 2
    """
    starts = np.cumsum([0, *map(len, sequences)])
    sources_S = np.empty(starts[-1], np.int64)
    before, num_tokens = sequences[0][:0], 0
    sources_before = sources_S[:0]
    for index in sorted(range(len(sequences)), key=lambda index: sequences[index].astype(">u4").tobytes()):
        ids = sequences[index]
        common = _num_common(before, ids)
        sources = sources_S[starts[index] : starts[index + 1]]
        sources[:common] = sources_before[:common]
        sources[common:] = np.arange(num_tokens, num_tokens + len(ids) - common)
        num_tokens += len(ids) - common
        before, sources_before = ids, sources
    return sources_S


def _num_common(first: NDArray[np.int32], second: NDArray[np.int32]) -> int:
    """Length of the common prefix."""
    length = min(len(first), len(second))
    differs = np.flatnonzero(first[:length] != second[:length])
    return int(differs[0]) if len(differs) else length


def share(batch: PackedBatch, parallel: SequenceParallel) -> PackedBatch:
    """The slice of `batch` that this rank of `parallel` computes: equally many tokens on each, and the trained ones
    whose predictor lies there.

    Untrained Samples of one token fill up to a multiple of the ranks.
    """
    device, num_tokens = batch.ids_T.device, batch.ids_T.numel()
    fillers = torch.zeros(-num_tokens % parallel.size, dtype=torch.int64, device=device)
    sources = None
    if batch.layout.shared is not None:
        sources = torch.cat([batch.layout.shared.sources, num_tokens + torch.arange(len(fillers), device=device)])
    layout = packed_layout([*batch.layout.lengths, *[1] * len(fillers)], device, sources)
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
