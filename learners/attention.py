"""Attention over packed Samples.

Invariant: a token attends to its own Sample's earlier tokens and to nothing else, whatever lies beside it.
Called by decoder layers (learners/hugging_face.py registers it with transformers), which hand down the PackedLayout
that learners/packing.py built.

Everything but attention runs on the flat [T] tokens without padding, and only once on the tokens of a prefix that
Samples have in common. Attention alone sees the Samples whole: S tokens, prefixes copied into each. It is computed per
bucket of Samples of like length, right-padded inside the kernel's input: under a causal mask no real token sees what
is to its right, so the padding changes nothing, and no [S, S] mask is ever made.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from learners.sequence_parallel import SequenceParallel

BUCKET_FILL = 0.85
"""A Sample shorter than this share of its bucket's longest opens the next bucket: padding stays under 15%."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Neighbouring Samples of like length."""

    start: int
    """First token of the bucket among those of the whole Samples."""
    stop: int
    """One past its last token."""
    num_samples: int
    longest: int
    """Tokens of the longest Sample."""
    slots: Tensor | None
    """[stop - start] int64: each token's row among num_samples * longest; None when all are equally long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedPrefixes:
    """Which packed token each token of the whole Samples is."""

    sources: Tensor
    """[S] int64: its index among the T packed tokens; those of a shared prefix occur several times."""
    firsts: Tensor
    """[T] int64: where each packed token occurs first."""
    repeats: Tensor
    """[S - T] int64: all other occurrences."""

    def unfold(self, packed: Tensor) -> Tensor:
        """[T, ...] -> [S, ...]."""
        return _Unfold.apply(packed, self)

    def fold(self, whole: Tensor) -> Tensor:
        """[S, ...] -> [T, ...], of equals the first."""
        return _Gather.apply(whole, self.firsts)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedLayout:
    """How packed tokens divide into Samples."""

    lengths: tuple[int, ...]
    """Tokens of each Sample, longest first."""
    buckets: tuple[Bucket, ...]
    boundaries: Tensor
    """[Samples + 1] int32: where each Sample starts, and where the last one ends."""
    shared: SharedPrefixes | None = None
    """None where every token is packed on its own."""
    parallel: SequenceParallel | None = None
    """Ranks that hold a slice of these tokens each; None where this rank holds all of them."""


def packed_layout(
    lengths: Sequence[int], device: torch.device | str = "cpu", sources: Tensor | None = None
) -> PackedLayout:
    """The layout of Samples that lie one after the other, longest first; `sources` as in SharedPrefixes.

    lengths [5, 5, 2] -> buckets [5, 5] without padding and [2].
    """
    if list(lengths) != sorted(lengths, reverse=True):
        raise ValueError(f"Samples must be packed longest first, got lengths {list(lengths)}")
    buckets: list[Bucket] = []
    start = first = 0
    for last in range(1, len(lengths) + 1):
        if last == len(lengths) or lengths[last] < BUCKET_FILL * lengths[first]:
            bucket = _bucket(lengths[first:last], start, device)
            buckets.append(bucket)
            start, first = bucket.stop, last
    boundaries = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
    shared = None if sources is None else _shared_prefixes(sources, device)
    return PackedLayout(lengths=tuple(lengths), buckets=tuple(buckets), boundaries=boundaries, shared=shared)


def _shared_prefixes(sources: Tensor, device: torch.device | str) -> SharedPrefixes:
    _, firsts = np.unique(sources.cpu().numpy(), return_index=True)
    repeats = np.setdiff1d(np.arange(sources.numel()), firsts)
    return SharedPrefixes(
        sources=sources.to(device),
        firsts=torch.from_numpy(firsts).to(device),
        repeats=torch.from_numpy(repeats).to(device),
    )


def _bucket(lengths: Sequence[int], start: int, device: torch.device | str) -> Bucket:
    longest = lengths[0]
    slots = None
    if lengths[-1] != longest:
        rows = [torch.arange(row * longest, row * longest + length) for row, length in enumerate(lengths)]
        slots = torch.cat(rows).to(device)
    stop = start + sum(lengths)
    return Bucket(start=start, stop=stop, num_samples=len(lengths), longest=longest, slots=slots)


class _Spread(torch.autograd.Function):
    """Rows [N, ...] laid into `slots` of a zero tensor [num_slots, ...]; the inverse of _Gather.

    Indexing both ways by copies keeps the backward free of index_add, which is several times slower on CPUs.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, slots: Tensor, num_slots: int) -> Tensor:
        ctx.save_for_backward(slots)
        return rows.new_zeros(num_slots, *rows.shape[1:]).index_copy_(0, slots, rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (slots,) = ctx.saved_tensors
        return grad.index_select(0, slots), None, None


class _Gather(torch.autograd.Function):
    """The rows at `slots` of [num_slots, ...]; the inverse of _Spread, so no slot may occur twice."""

    @staticmethod
    def forward(ctx: Any, padded: Tensor, slots: Tensor) -> Tensor:
        ctx.save_for_backward(slots)
        ctx.num_slots = padded.shape[0]
        return padded.index_select(0, slots)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (slots,) = ctx.saved_tensors
        return grad.new_zeros(ctx.num_slots, *grad.shape[1:]).index_copy_(0, slots, grad), None


class _Unfold(torch.autograd.Function):
    """Packed tokens [T, ...] laid out as whole Samples [S, ...]; gradients of the copies add up."""

    @staticmethod
    def forward(ctx: Any, packed: Tensor, shared: SharedPrefixes) -> Tensor:
        ctx.shared = shared
        return packed.index_select(0, shared.sources)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        shared: SharedPrefixes = ctx.shared
        packed = grad.index_select(0, shared.firsts).float()  # many copies: half precision would lose what they add
        owners = shared.sources.index_select(0, shared.repeats)
        return packed.index_add_(0, owners, grad.index_select(0, shared.repeats).float()).to(grad.dtype), None


Kernel = Callable[[PackedLayout, Tensor, Tensor, Tensor, float], Tensor]
"""(layout, query [S, heads, dim], key and value [S, kv heads, dim], scale) -> [S, heads, dim]."""


def attend_buckets(layout: PackedLayout, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
    """PyTorch's own attention, bucket by bucket."""
    sizes = [bucket.stop - bucket.start for bucket in layout.buckets]
    parts = zip(layout.buckets, query.split(sizes), key.split(sizes), value.split(sizes), strict=True)
    outputs = [_attend(*part, scaling) for part in parts]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def attend_flash(layout: PackedLayout, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
    """The variable-length kernel of the flash-attn package, on GPUs in half precision."""
    from flash_attn import flash_attn_varlen_func  # pyright: ignore[reportMissingImports]

    ends = (layout.boundaries, layout.boundaries, layout.lengths[0], layout.lengths[0])
    return flash_attn_varlen_func(query, key, value, *ends, causal=True, softmax_scale=scaling)


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    *,
    layout: PackedLayout,
    scaling: float,
    kernel: Kernel = attend_buckets,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """[1, T, heads, dim]: causal attention inside each Sample.

    query [1, heads, T, dim], key and value [1, kv heads, T, dim]. ValueError for attention of another kind.
    """
    if softcap is not None or s_aux is not None or dropout:
        raise ValueError("packed attention knows no soft cap, attention sinks or dropout; choose a model without them")
    if sliding_window is not None and layout.lengths and sliding_window < layout.lengths[0]:
        raise ValueError(
            f"a sliding window of {sliding_window} tokens is not supported for Samples of {layout.lengths[0]}; "
            "lower the context limit below the window"
        )
    query, key, value = (each[0].transpose(0, 1) for each in (query, key, value))
    if layout.parallel is not None:
        query, key, value = layout.parallel.to_heads(query, key, value)
    if layout.shared is None:
        attended = kernel(layout, query, key, value, scaling)
    else:
        query, key, value = map(layout.shared.unfold, (query, key, value))
        attended = layout.shared.fold(kernel(layout, query, key, value, scaling))
    if layout.parallel is not None:
        attended = layout.parallel.to_tokens(attended)
    return attended.unsqueeze(0), None


def _attend(bucket: Bucket, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
    """[N, heads, dim] attended within each Sample of one bucket."""
    attended = F.scaled_dot_product_attention(
        _pad(query, bucket),
        _pad(key, bucket),
        _pad(value, bucket),
        is_causal=True,
        scale=scaling,
        enable_gqa=key.shape[1] != query.shape[1],
    )
    rows = attended.transpose(1, 2).reshape(bucket.num_samples * bucket.longest, *query.shape[1:])
    return rows if bucket.slots is None else _Gather.apply(rows, bucket.slots)


def _pad(states: Tensor, bucket: Bucket) -> Tensor:
    """[N, heads, dim] -> [num_samples, heads, longest, dim]."""
    if bucket.slots is not None:
        states = _Spread.apply(states, bucket.slots, bucket.num_samples * bucket.longest)
    return states.reshape(bucket.num_samples, bucket.longest, *states.shape[1:]).transpose(1, 2)
