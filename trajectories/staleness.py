"""How old a Group is when it is consumed, and what an age beyond the bound makes of its weight.

Invariant: only tokens that could be trained age a Group. Called by trajectories/buffer.py, and by recipes that train on
Groups beyond the bound.
"""

from collections.abc import Mapping

from trajectories.handle import GroupHandle
from trajectories.schema import DEFAULT_TREATMENTS, Outcome, PolicyVersion, Treatment
from trajectories.validity import member_reward


def oldest_version(
    handle: GroupHandle, treatments: Mapping[Outcome, Treatment] = DEFAULT_TREATMENTS
) -> PolicyVersion | None:
    """The oldest version that sampled a token of a valid member; None when there is no such token."""
    return min(
        (
            member.min_version
            for member in handle.members
            if member.min_version is not None and member_reward(member, treatments) is not None
        ),
        default=None,
    )


def staleness(
    handle: GroupHandle, version: PolicyVersion, treatments: Mapping[Outcome, Treatment] = DEFAULT_TREATMENTS
) -> int:
    """Versions between the Group's oldest trained token and `version`; 0 without one. Lineages count alike."""
    oldest = oldest_version(handle, treatments)
    return 0 if oldest is None else version.n - oldest.n


def down_weight(
    handle: GroupHandle,
    version: PolicyVersion,
    max_staleness: int,
    treatments: Mapping[Outcome, Treatment] = DEFAULT_TREATMENTS,
) -> float:
    """1 within the bound, then 1 / (1 + versions beyond it): at a bound of 2, ages 1, 2, 3, 4 -> 1, 1, 1/2, 1/3.

    Harmonic, so that no Group is ever worth nothing and none far beyond the bound outweighs a fresh one.
    """
    return 1 / (1 + max(0, staleness(handle, version, treatments) - max_staleness))
