"""Advantages: from the rewards of a step's Groups to one float per member.

Invariant: an excluded member is selected out before any arithmetic, so it changes nobody else's advantage.
Called by learners/plan.py; chosen by recipes; pure Python, no torch.

With r_i the reward of valid member i, mean and std over the n valid members of its Group, and b over all of the step:

    leave_one_out             r_i - mean of the others = (r_i - mean) n / (n - 1)   RLOO, arXiv 2402.14740 eq. 9
    group_mean                r_i - mean                                            Dr. GRPO, arXiv 2503.20783 sec. 3.2
    group_mean_over_std       (r_i - mean) / (std + 1e-4)                           GRPO, arXiv 2402.03300 sec. 4.1.2
    batch_normalized          (r_i - mean_b) / (std_b + 1e-4)                       REINFORCE++, arXiv 2501.03262
    group_mean_over_batch_std (r_i - mean) / (std_b(r - mean) + 1e-4)               REINFORCE++-baseline, same source
"""

import math
from collections.abc import Callable, Sequence
from statistics import fmean, stdev

from learners.config import AdvantageKind

GroupRewards = Sequence[float | None]
"""Rewards of one Group's members in order, None where a member is excluded."""
Advantages = Callable[[Sequence[GroupRewards]], list[list[float | None]]]
"""Rewards of all Groups of a step -> the members' advantages, None in the same places."""

STD_FLOOR = 1e-4
"""Added to a standard deviation before dividing by it, as TRL does; rewards that are nearly equal stay small."""


def advantages_of(kind: AdvantageKind) -> Advantages:
    """The function of this name."""
    match kind:
        case AdvantageKind.LEAVE_ONE_OUT:
            return LEAVE_ONE_OUT
        case AdvantageKind.GROUP_MEAN:
            return each_group(group_mean)
        case AdvantageKind.GROUP_MEAN_OVER_STD:
            return each_group(group_mean_over_std)
        case AdvantageKind.BATCH_NORMALIZED:
            return batch_normalized
        case AdvantageKind.GROUP_MEAN_OVER_BATCH_STD:
            return group_mean_over_batch_std


def each_group(of_group: Callable[[GroupRewards], list[float | None]]) -> Advantages:
    """Advantages in which no Group knows of another."""

    def of_groups(groups: Sequence[GroupRewards]) -> list[list[float | None]]:
        return [of_group(rewards) for rewards in groups]

    return of_groups


def leave_one_out(rewards: GroupRewards, min_valid: int = 2) -> list[float | None]:
    """Each valid reward minus the mean of the other valid rewards; None stays None.

    Fewer than `min_valid` valid members, or equal rewards, give 0.0 to each: no gradient.

    rewards [1, 0, 0] -> advantages [1.0, -0.5, -0.5]; [1, None, 0] -> [1.0, None, -1.0]
    """
    if min_valid < 2:
        raise ValueError(f"min_valid must be >= 2: a lone member has no others to compare with, got {min_valid}")
    num_valid = len(_valid(rewards))
    if num_valid < min_valid:
        return _mapped(rewards, lambda _: 0.0)
    return _mapped(group_mean(rewards), lambda centred: centred * num_valid / (num_valid - 1))


def group_mean(rewards: GroupRewards) -> list[float | None]:
    """Each valid reward minus the mean of the valid ones, itself included.

    rewards [1, 0, 0] -> advantages [2/3, -1/3, -1/3]. Equal rewards give exactly 0.0, whatever their mean rounds to.
    """
    valid = _valid(rewards)
    if not valid or min(valid) == max(valid):
        return _mapped(rewards, lambda _: 0.0)
    mean = fmean(valid)
    return _mapped(rewards, lambda reward: reward - mean)


def group_mean_over_std(rewards: GroupRewards) -> list[float | None]:
    """`group_mean` over the Group's standard deviation (n - 1 in its denominator).

    rewards [1, 0, 0] -> std 0.5774, advantages [1.1545, -0.5773, -0.5773]
    """
    std = _std(_valid(rewards))
    return _mapped(group_mean(rewards), lambda centred: centred / (std + STD_FLOOR))


LEAVE_ONE_OUT = each_group(leave_one_out)
"""RLOO: the default of `plan_batch`."""


def batch_normalized(groups: Sequence[GroupRewards]) -> list[list[float | None]]:
    """Rewards standardised over every valid member of the step; a Group of equal rewards is trained too.

    rewards [[1, 1], [0, 0]] -> mean 0.5, std 0.5774, advantages [[0.8659, 0.8659], [-0.8659, -0.8659]]
    """
    every = [reward for rewards in groups for reward in _valid(rewards)]
    if not every or min(every) == max(every):
        return [_mapped(rewards, lambda _: 0.0) for rewards in groups]
    mean, std = fmean(every), _std(every)
    return [_mapped(rewards, lambda reward: (reward - mean) / (std + STD_FLOOR)) for rewards in groups]


def group_mean_over_batch_std(groups: Sequence[GroupRewards]) -> list[list[float | None]]:
    """`group_mean`, then standardised over every valid member of the step (whose mean is 0 by then).

    Under-filled Groups and those of equal rewards stay at 0.0 but count in the standard deviation.
    """
    centred = [group_mean(rewards) for rewards in groups]
    std = _std([value for values in centred for value in values if value is not None])
    return [_mapped(values, lambda value: value / (std + STD_FLOOR)) for values in centred]


def _valid(rewards: GroupRewards) -> list[float]:
    """The rewards that count; ValueError when one is not finite, for it would spoil all the others."""
    valid = [reward for reward in rewards if reward is not None]
    for reward in valid:
        if not math.isfinite(reward):
            raise ValueError(
                f"the reward of a valid member must be finite, got {reward}; mend the Verifier, or let its Outcome "
                "exclude the member"
            )
    return valid


def _mapped(values: GroupRewards, change: Callable[[float], float]) -> list[float | None]:
    return [None if value is None else change(value) for value in values]


def _std(values: Sequence[float]) -> float:
    """Sample standard deviation; 0.0 for fewer than two values."""
    return stdev(values) if len(values) > 1 else 0.0
