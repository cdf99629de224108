"""Advantages: from the rewards of a Group to one float per member.

Invariant: an excluded member is selected out before any arithmetic, so it changes nobody else's advantage.
Called by learners/plan.py; pure Python, no torch.
"""

from collections.abc import Callable, Sequence

Advantages = Callable[[Sequence[float | None]], list[float | None]]
"""Rewards of a Group's members, None where excluded -> their advantages, None in the same places."""


def leave_one_out(rewards: Sequence[float | None], min_valid: int = 2) -> list[float | None]:
    """Each valid reward minus the mean of the other valid rewards; None stays None.

    A_i = r_i - mean of the others = (r_i - mean) * n / (n - 1) over the n valid members (RLOO,
    arXiv 2402.14740, eq. 9).
    Fewer than `min_valid` valid members, or equal rewards, give 0.0 to each: no gradient.

    rewards [1, 0, 0] -> advantages [1.0, -0.5, -0.5]; [1, None, 0] -> [1.0, None, -1.0]
    """
    if min_valid < 2:
        raise ValueError(f"min_valid must be >= 2: a lone member has no others to compare with, got {min_valid}")
    valid = [reward for reward in rewards if reward is not None]
    if len(valid) < min_valid or min(valid) == max(valid):
        return [None if reward is None else 0.0 for reward in rewards]
    num_valid, mean = len(valid), sum(valid) / len(valid)
    return [None if reward is None else (reward - mean) * num_valid / (num_valid - 1) for reward in rewards]
