"""The validity rules: which members of a Group count, and with what reward.

Invariant: this is the only place that decides it, so baseline, loss, buffer, metrics and evaluation sum over one set.
Called by trajectories/{buffer,metrics,export}.py, plan_batch and recipes/evaluate.
"""

from collections.abc import Mapping, Sequence
from enum import StrEnum

from trajectories.handle import GroupHandle, MemberSummary
from trajectories.schema import DEFAULT_TREATMENTS, Group, Outcome, Trajectory, Treatment

SOLVED_REWARD = 1.0
"""A valid member is solved when its reward reaches this."""


class NoGradient(StrEnum):
    """Why a Group teaches nothing."""

    UNDER_FILLED = "under_filled"
    """Fewer valid members than a baseline needs."""
    ZERO_VARIANCE = "zero_variance"
    """All valid rewards are equal."""


def member_rewards(
    group: Group | GroupHandle, treatments: Mapping[Outcome, Treatment] = DEFAULT_TREATMENTS
) -> list[float | None]:
    """One entry a member, in order: the reward that counts, or None when the member is excluded.

    Outcomes (completed 1.0, agent_error 1.0, sandbox_error None) -> [1.0, 0.0, None]. A member whose Outcome is scored
    but that has no reward is excluded too.
    """
    members = group.trajectories if isinstance(group, Group) else group.members
    return [member_reward(member, treatments) for member in members]


def member_reward(
    member: Trajectory | MemberSummary, treatments: Mapping[Outcome, Treatment] = DEFAULT_TREATMENTS
) -> float | None:
    """The reward that counts; None when the member is excluded. ValueError for an Outcome without a Treatment."""
    if member.outcome not in treatments:
        raise ValueError(f"treatments name no Treatment for the Outcome {member.outcome}; give one to each Outcome")
    match treatments[member.outcome]:
        case Treatment.SCORE:
            return member.reward
        case Treatment.ZERO:
            return 0.0
        case Treatment.EXCLUDE:
            return None


def no_gradient(rewards: Sequence[float | None], *, min_valid: int = 2) -> NoGradient | None:
    """Why a Group with these member rewards carries no gradient; None when it carries one.

    `rewards` is what `member_rewards` gave: [1.0, None, 1.0] -> ZERO_VARIANCE, [1.0, None] -> UNDER_FILLED.
    """
    valid = [reward for reward in rewards if reward is not None]
    if len(valid) < min_valid:
        return NoGradient.UNDER_FILLED
    return NoGradient.ZERO_VARIANCE if min(valid) == max(valid) else None
