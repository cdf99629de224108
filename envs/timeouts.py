"""How long a phase of a rollout may take: Harbor's rule and the paper's, which are not the same.

Invariant: pure functions of their arguments, in seconds. Called by envs/episode.py.
"""

from enum import StrEnum

PAPER_CAP_S = 7200.0
"""2 hours."""


class TimeoutRule(StrEnum):
    """By which rule the agent's time follows from the Task's."""

    HARBOR = "harbor"
    """min(task, cap) x multiplier."""
    PAPER = "paper"
    """min(2 h, task x multiplier)."""


def harbor_timeout_s(
    task_s: float | None,
    *,
    override_s: float | None = None,
    max_s: float | None = None,
    multiplier: float = 1.0,
    phase_multiplier: float | None = None,
) -> float | None:
    """min(override or else the Task's, cap) x multiplier; a multiplier of the phase replaces the general one.

    The multiplier comes after the cap, so `max_s` is no ceiling: task 900, cap 600, multiplier 2 -> 1200. None, without
    limit, when neither Task nor override has one: the cap does not apply then. (Harbor 0.25, its trial.)
    """
    wanted_s = task_s if override_s is None else override_s
    if wanted_s is None:
        return None
    capped_s = wanted_s if max_s is None else min(wanted_s, max_s)
    return capped_s * (multiplier if phase_multiplier is None else phase_multiplier)


def paper_timeout_s(base_s: float | None, *, multiplier: float) -> float:
    """min(2 h, base x multiplier), as the evaluations of arXiv 2606.24855 (m 2 at 8B, 16 at 32B); no base: 2 h.

    900 with 2 -> 1800; 900 with 16 -> 7200.
    """
    return PAPER_CAP_S if base_s is None else min(PAPER_CAP_S, base_s * multiplier)
