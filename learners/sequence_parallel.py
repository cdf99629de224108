"""Sequence parallelism in the way of Ulysses (arXiv 2309.14509): ranks share the tokens of one micro-batch.

Invariant: outside attention a rank holds an equal slice of the tokens and all heads; inside it holds all tokens and an
equal share of the heads; two all-to-alls lie between. Made by learners/learner.py, called by learners/attention.py.

T tokens in all, t = T / ranks on this one; h heads in all.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from learners.process_group import new_group


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceParallel:
    """One set of ranks that share micro-batches, seen from one of them."""

    group: dist.ProcessGroup
    rank: int
    """Position among these ranks."""
    size: int

    def to_heads(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[t, h, dim] each -> [T, h / size, dim]; key and value heads are repeated where there are too few."""
        repeats = kv_repeats(self.size, query.shape[1], key.shape[1])
        if repeats > 1:
            key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
        to_heads = (_ToHeads.apply(states, self.group, self.size) for states in (query, key, value))
        return tuple(to_heads)  # pyright: ignore[reportReturnType]

    def to_tokens(self, attended: Tensor) -> Tensor:
        """[T, h / size, dim] -> [t, h, dim]."""
        return _ToTokens.apply(attended, self.group, self.size)


def kv_repeats(size: int, num_heads: int, num_kv_heads: int) -> int:
    """How often each key and value head is repeated so that `size` ranks get equally many.

    ValueError where heads do not divide: 2 heads over 4 ranks. 32 heads of which 8 are key heads, 16 ranks -> 2.
    """
    repeats = size // math.gcd(size, num_kv_heads)
    if num_heads % size or num_heads % (num_kv_heads * repeats):
        raise ValueError(
            f"sequence_parallel={size} must divide the model's {num_heads} attention heads, with its {num_kv_heads} "
            f"key heads repeated {repeats} times among them; lower learner.sequence_parallel"
        )
    return repeats


def join_sequence_parallel(size: int, *, rank: int, world_size: int) -> SequenceParallel | None:
    """The set that `rank` belongs to: neighbours share. None for a size of 1; all ranks must call this together."""
    if world_size % size:
        raise ValueError(f"sequence_parallel={size} must divide the {world_size} learner ranks")
    if size == 1:
        return None
    joined: SequenceParallel | None = None
    for first in range(0, world_size, size):
        group = new_group(list(range(first, first + size)))
        if group is not None:
            joined = SequenceParallel(group=group, rank=rank - first, size=size)
    return joined


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: Tensor, group: dist.ProcessGroup, size: int) -> Tensor:
        ctx.group, ctx.size = group, size
        return _exchange_to_heads(states, group, size)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _exchange_to_tokens(grad, ctx.group, ctx.size), None, None


class _ToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: Tensor, group: dist.ProcessGroup, size: int) -> Tensor:
        ctx.group, ctx.size = group, size
        return _exchange_to_tokens(states, group, size)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _exchange_to_heads(grad, ctx.group, ctx.size), None, None


def _exchange_to_heads(states: Tensor, group: dist.ProcessGroup, size: int) -> Tensor:
    """[t, h, dim] -> [T, h / size, dim]: part k of the heads goes to rank k."""
    num_tokens, num_heads, width = states.shape
    outgoing = states.reshape(num_tokens, size, num_heads // size, width).transpose(0, 1).contiguous()
    incoming = torch.empty_like(outgoing)
    dist.all_to_all_single(incoming, outgoing, group=group)
    return incoming.reshape(size * num_tokens, num_heads // size, width)


def _exchange_to_tokens(states: Tensor, group: dist.ProcessGroup, size: int) -> Tensor:
    """[T, h / size, dim] -> [t, h, dim]: slice k of the tokens goes to rank k."""
    num_tokens, num_heads, width = states.shape
    outgoing = states.contiguous()
    incoming = torch.empty_like(outgoing)
    dist.all_to_all_single(incoming, outgoing, group=group)
    parts = incoming.reshape(size, num_tokens // size, num_heads, width)
    return parts.transpose(0, 1).reshape(num_tokens // size, size * num_heads, width)
