"""GroupHandle: what the control loop knows of a finished Group; its tokens stay in the store.

Invariant: a handle holds sizes, rewards, outcomes and versions, never token ids or text.
Made by rollout workers with `summarize`; read by the buffer, plan_batch, metrics and filters.
"""

from dataclasses import dataclass

from trajectories.samples import trajectory_samples
from trajectories.schema import Group, Outcome, PolicyVersion, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Location:
    """Where a record lies: one frame of one segment of a store directory."""

    segment: str
    """File name inside the store directory."""
    offset: int
    """Byte offset of the frame."""
    length: int
    """Bytes of the frame, header included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BranchSize:
    """One Sample that a Trajectory yields."""

    num_tokens: int
    num_trained: int
    """Tokens that carry loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberSummary:
    """One Trajectory, without its tokens."""

    trajectory_id: str
    outcome: Outcome
    reward: float | None
    num_turns: int
    branches: tuple[BranchSize, ...]
    """Empty when the Trajectory holds no exact tokens."""
    min_version: PolicyVersion | None
    """Oldest version that sampled one of its tokens; None when it holds none."""
    max_version: PolicyVersion | None
    seconds: float
    """Wall time of the rollout."""

    @property
    def num_breaks(self) -> int:
        """How often the prefix broke."""
        return max(0, len(self.branches) - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupHandle:
    """One finished Group, without its tokens."""

    group_id: str
    task_id: str
    location: Location
    members: tuple[MemberSummary, ...]


def summarize(group: Group, location: Location) -> GroupHandle:
    """The handle of a stored Group."""
    return GroupHandle(
        group_id=group.id,
        task_id=group.task_id,
        location=location,
        members=tuple(_summarize_member(trajectory) for trajectory in group.trajectories),
    )


def _summarize_member(trajectory: Trajectory) -> MemberSummary:
    versions = [span.version for turn in trajectory.turns if turn.tokens for span in turn.tokens.spans]
    samples = trajectory_samples(trajectory)
    return MemberSummary(
        trajectory_id=trajectory.id,
        outcome=trajectory.outcome,
        reward=trajectory.reward,
        num_turns=len(trajectory.turns),
        branches=tuple(BranchSize(num_tokens=len(s.ids), num_trained=int(s.mask.sum())) for s in samples),
        min_version=min(versions, default=None),
        max_version=max(versions, default=None),
        seconds=sum(trajectory.timings_s.values()),
    )
