"""Samples: the trainable token sequences of a Trajectory, one per unbroken branch.

Invariant: each sampled token of a Trajectory is trained in exactly one Sample, in the context that the engine saw.
Called by `summarize` on rollout workers and by learner ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trajectories.schema import Trajectory, TurnTokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A trainable token sequence of length L."""

    ids: NDArray[np.int32]
    """[L] int32."""
    mask: NDArray[np.bool_]
    """[L] bool: the tokens that carry loss. Token t is predicted from ids[:t], so mask[0] is always False."""
    logprobs: NDArray[np.float32]
    """[L] float32: behaviour log-probability of ids[t] where mask[t], NaN if it was never recorded; 0 elsewhere."""

    def __post_init__(self) -> None:
        if not len(self.ids) == len(self.mask) == len(self.logprobs):
            raise ValueError(f"lengths differ: ids {len(self.ids)} mask {len(self.mask)} logprobs {len(self.logprobs)}")
        if len(self.mask) and self.mask[0]:
            raise ValueError("mask[0] must be False: the first token has no context to be predicted from")


def conversation_sample(ids: Sequence[int], mask: Sequence[bool]) -> Sample:
    """The Sample of a conversation that was written, not sampled: its trained log-probabilities are NaN."""
    trained = np.asarray(mask, np.bool_)
    return Sample(
        ids=np.asarray(ids, np.int32), mask=trained, logprobs=np.where(trained, np.float32("nan"), np.float32(0))
    )


class _Branch:
    """A growing Sample."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.mask: list[bool] = []
        self.logprobs: list[float] = []

    def fork(self, prefix_len: int) -> "_Branch":
        """A new branch that starts from this one's first ids, none of them trained again."""
        branch = _Branch()
        branch.ids = self.ids[:prefix_len]
        branch.mask = [False] * prefix_len
        branch.logprobs = [0.0] * prefix_len
        return branch

    def append(self, tokens: TurnTokens) -> None:
        self.ids += [*tokens.new_ids, *tokens.sampled_ids]
        self.mask += [False] * len(tokens.new_ids) + [True] * len(tokens.sampled_ids)
        self.logprobs += [0.0] * len(tokens.new_ids) + list(tokens.logprobs)

    def sample(self) -> Sample:
        return Sample(
            ids=np.asarray(self.ids, np.int32),
            mask=np.asarray(self.mask, np.bool_),
            logprobs=np.asarray(self.logprobs, np.float32),
        )


def trajectory_samples(trajectory: Trajectory) -> list[Sample]:
    """The Samples of a Trajectory in the order of its Turns; [] when it holds no exact tokens."""
    branches: list[_Branch] = []
    for turn in trajectory.turns:
        if turn.tokens is None:
            continue
        if not branches:
            branches.append(_Branch())
        if turn.tokens.prefix_len > len(branches[-1].ids):
            raise ValueError(f"{trajectory.id}: prefix_len {turn.tokens.prefix_len} exceeds the context before it")
        if turn.tokens.prefix_len < len(branches[-1].ids):
            branches.append(branches[-1].fork(turn.tokens.prefix_len))
        branches[-1].append(turn.tokens)
    return [branch.sample() for branch in branches]
