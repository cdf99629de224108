"""BatchPlan: which Samples an optimizer step trains on, on which rank, in which micro-batch, with which weight.

Invariant: made from sizes alone; every rank gets equally many micro-batches, none over `max_tokens`, and the weights
of the whole step are fixed here, so how it is split changes nothing. Called by recipes; read by learner ranks, which
fetch the tokens. No torch.

With T trained tokens and S sequences in the step, and T_i of the tokens in sequence i, a token of sequence i weighs

    TOKEN_MEAN 1 / T        SEQUENCE_MEAN 1 / (S T_i)        SEQUENCE_MEAN_TOKEN_SUM 1 / S
"""

import heapq
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from learners.advantages import LEAVE_ONE_OUT, Advantages
from learners.config import Aggregation
from trajectories.handle import GroupHandle, Location, MemberSummary
from trajectories.schema import DEFAULT_TREATMENTS, Outcome, Treatment
from trajectories.validity import member_rewards

MAX_IMBALANCE = 0.05
"""Tokens more, counted whole, that the slowest ranks may get so that a Group's members stay together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SizedSample:
    """A stored Sample and its size."""

    location: Location
    num_tokens: int
    num_trained: int
    """Tokens that carry loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRef:
    """Where a rank finds one Sample, and what it counts."""

    index: int
    """Position among the Samples that the plan was made from."""
    location: Location
    member: int | None
    """Index of the Trajectory in the Group at `location`; None when `location` holds a Sample."""
    branch: int
    """Index among the Samples of that Trajectory."""
    advantage: float
    weight: float
    """Factor of each trained token's loss."""
    num_tokens: int
    num_trained: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlan:
    """One rank's share of an optimizer step."""

    micro_batches: tuple[tuple[SampleRef, ...], ...]
    """As many as on every other rank; an empty one keeps the others company and counts for nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    """One optimizer step over all ranks."""

    ranks: tuple[RankPlan, ...]
    num_samples: int
    num_tokens: int
    """Trained tokens of all valid members of Groups that carry gradient: the denominator of the token mean."""
    metrics: Mapping[str, float]

    def in_given_order(self, values: Iterable[float]) -> list[float]:
        """One value per Sample, listed rank by rank, put back into the order in which the Samples were given."""
        refs = [ref for rank in self.ranks for micro_batch in rank.micro_batches for ref in micro_batch]
        ordered = sorted(zip((ref.index for ref in refs), values, strict=True))
        return [value for _, value in ordered]


def plan_batch(
    groups: Sequence[GroupHandle],
    *,
    advantages: Advantages = LEAVE_ONE_OUT,
    aggregation: Aggregation = Aggregation.TOKEN_MEAN,
    treatments: Mapping[Outcome, Treatment] = DEFAULT_TREATMENTS,
    has_penalty: bool = False,
    num_ranks: int,
    max_tokens: int,
    group_weights: Sequence[float] | None = None,
) -> BatchPlan:
    """The plan of one policy-gradient step; `group_weights` scale the Advantages of each Group, and no denominator.

    Denominators count every valid member of a Group that carries gradient (its trained tokens, or, if it has any, 1 as
    a sequence), members with advantage 0 among them; those and Groups without gradient are not computed, since their
    gradient is 0. With `has_penalty` (a loss with a KL term) every valid member has a gradient, and all are computed.
    """
    by_group = _scaled(advantages([member_rewards(group, treatments) for group in groups]), group_weights)
    is_trained = (lambda value: value is not None) if has_penalty else bool
    trained = [(group, values) for group, values in zip(groups, by_group, strict=True) if any(map(is_trained, values))]
    lengths = [
        [0 if value is None else _num_trained(member) for member, value in zip(group.members, values, strict=True)]
        for group, values in trained
    ]
    weigh = _weights(aggregation, [length for of_group in lengths for length in of_group])
    refs = [
        ref
        for (group, values), of_group in zip(trained, lengths, strict=True)
        for ref in _group_refs(group, values, [weigh(length) for length in of_group])
        if has_penalty or ref.advantage
    ]
    metrics = {
        "plan/groups_trained": float(len(trained)),
        "plan/groups_without_gradient": float(len(groups) - len(trained)),
    }
    num_counted = sum(length for of_group in lengths for length in of_group)
    return _plan(refs, num_counted, num_ranks=num_ranks, max_tokens=max_tokens, metrics=metrics, in_order=True)


def plan_samples(
    samples: Sequence[SizedSample],
    *,
    aggregation: Aggregation = Aggregation.TOKEN_MEAN,
    num_ranks: int,
    max_tokens: int,
) -> BatchPlan:
    """The plan of one SFT step on stored Samples, each a sequence of its own."""
    weigh = _weights(aggregation, [sample.num_trained for sample in samples])
    refs = [
        SampleRef(
            index=-1,
            location=sample.location,
            member=None,
            branch=0,
            advantage=1.0,
            weight=weigh(sample.num_trained),
            num_tokens=sample.num_tokens,
            num_trained=sample.num_trained,
        )
        for sample in samples
    ]
    num_trained = sum(sample.num_trained for sample in samples)
    return _plan(refs, num_trained, num_ranks=num_ranks, max_tokens=max_tokens, metrics={})


def _scaled(
    by_group: list[list[float | None]], group_weights: Sequence[float] | None
) -> Sequence[Sequence[float | None]]:
    if group_weights is None:
        return by_group
    return [
        [None if value is None else value * weight for value in values]
        for values, weight in zip(by_group, group_weights, strict=True)
    ]


def _num_trained(member: MemberSummary) -> int:
    return sum(branch.num_trained for branch in member.branches)


def _weights(aggregation: Aggregation, lengths: Sequence[int]) -> Callable[[int], float]:
    """From a sequence's trained tokens to the weight of each; `lengths` are those of all sequences that count."""
    num_tokens = max(sum(lengths), 1)
    num_sequences = max(sum(length > 0 for length in lengths), 1)
    match aggregation:
        case Aggregation.TOKEN_MEAN:
            return lambda _: 1 / num_tokens
        case Aggregation.SEQUENCE_MEAN:
            return lambda length: 1 / (num_sequences * max(length, 1))
        case Aggregation.SEQUENCE_MEAN_TOKEN_SUM:
            return lambda _: 1 / num_sequences


def _group_refs(group: GroupHandle, advantages: Sequence[float | None], weights: Sequence[float]) -> list[SampleRef]:
    """The Samples of a Group's valid members; one weight a member."""
    return [
        SampleRef(
            index=-1,
            location=group.location,
            member=member,
            branch=branch,
            advantage=advantage,
            weight=weight,
            num_tokens=size.num_tokens,
            num_trained=size.num_trained,
        )
        for member, (summary, advantage, weight) in enumerate(zip(group.members, advantages, weights, strict=True))
        if advantage is not None
        for branch, size in enumerate(summary.branches)
        if size.num_trained
    ]


def _plan(
    refs: Sequence[SampleRef],
    num_counted: int,
    *,
    num_ranks: int,
    max_tokens: int,
    metrics: Mapping[str, float],
    in_order: bool = False,
) -> BatchPlan:
    if num_ranks < 1:
        raise ValueError(f"num_ranks must be >= 1, got {num_ranks}")
    weighted = [replace(ref, index=index) for index, ref in enumerate(refs)]
    lengths = [ref.num_tokens for ref in weighted]
    bins = balanced_bins(lengths, num_ranks=num_ranks, max_tokens=max_tokens, in_order=in_order)
    ranks = tuple(
        RankPlan(micro_batches=tuple(tuple(weighted[index] for index in bin_) for bin_ in bins[rank::num_ranks]))
        for rank in range(num_ranks)
    )
    loads = [sum(ref.num_tokens for batch in rank.micro_batches for ref in batch) for rank in ranks]
    num_tokens = sum(loads)
    return BatchPlan(
        ranks=ranks,
        num_samples=len(weighted),
        num_tokens=num_counted,
        metrics={
            "plan/samples": float(len(weighted)),
            "plan/tokens": float(num_tokens),
            "plan/micro_batches": float(len(ranks[0].micro_batches)),
            "plan/imbalance": max(loads) * num_ranks / num_tokens if num_tokens else 1.0,
            **metrics,
        },
    )


def balanced_bins(
    lengths: Sequence[int], *, num_ranks: int, max_tokens: int, in_order: bool = False
) -> list[list[int]]:
    """Indices of `lengths` in bins of at most `max_tokens`, a multiple of `num_ranks` of them, of nearly equal load.

    Bins come heaviest first, so that the ranks' k-th micro-batches (bins k * num_ranks and on) weigh about the same.
    `in_order` keeps neighbours together where the limit allows it and ranks wait little longer for each other, however
    the load of one rank's bins differs: members of a Group have their prompt in common, which a micro-batch computes
    once.
    lengths [3, 3, 2], 2 ranks, 8 tokens -> [[0, 2], [1]]
    """
    if lengths and max(lengths) > max_tokens:
        raise ValueError(f"a Sample of {max(lengths)} tokens exceeds max_tokens={max_tokens}; raise learner.max_tokens")
    num_bins = math.ceil(sum(lengths) / max_tokens / num_ranks) * num_ranks
    while (bins := _spread(lengths, num_bins, max_tokens)) is None:
        num_bins += num_ranks
    if in_order:
        neighbours = _cut(lengths, num_bins)
        fits = all(sum(lengths[item] for item in bin_) <= max_tokens for bin_ in neighbours)
        longest = _lockstep(lengths, bins, num_ranks) * (1 + MAX_IMBALANCE)
        if fits and _lockstep(lengths, neighbours, num_ranks) <= longest:
            return neighbours
    return bins


def _cut(lengths: Sequence[int], num_bins: int) -> list[list[int]]:
    """In the given order, cut where the load of a bin comes nearest to an equal share."""
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    total, before = sum(lengths), 0
    for item, length in enumerate(lengths):
        bins[int((before + length / 2) * num_bins / total)].append(item)
        before += length
    return _heaviest_first(lengths, bins)


def _lockstep(lengths: Sequence[int], bins: Sequence[Sequence[int]], num_ranks: int) -> int:
    """Tokens that the slowest rank computes, micro-batch by micro-batch."""
    loads = [sum(lengths[item] for item in bin_) for bin_ in bins]
    return sum(max(loads[first : first + num_ranks]) for first in range(0, len(loads), num_ranks))


def _heaviest_first(lengths: Sequence[int], bins: list[list[int]]) -> list[list[int]]:
    return sorted(bins, key=lambda bin_: -sum(lengths[item] for item in bin_))


def _spread(lengths: Sequence[int], num_bins: int, max_tokens: int) -> list[list[int]] | None:
    """Longest first into the lightest bin; None when that overflows one."""
    heap = [(0, index) for index in range(num_bins)]
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    for item in sorted(range(len(lengths)), key=lambda item: -lengths[item]):
        load, index = heapq.heappop(heap)
        if load + lengths[item] > max_tokens:
            return None
        bins[index].append(item)
        heapq.heappush(heap, (load + lengths[item], index))
    return _heaviest_first(lengths, bins)
