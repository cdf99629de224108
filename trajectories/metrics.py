"""Metrics of finished Groups: flat floats for a recipe to log.

Invariant: means and shares of rewards, Turns and tokens run over valid members only; a mean over nothing is absent.
Called by actors/training_step.py after each `take`.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean

from trajectories.handle import GroupHandle, MemberSummary
from trajectories.schema import DEFAULT_TREATMENTS, Outcome, PolicyVersion, Treatment
from trajectories.validity import SOLVED_REWARD, NoGradient, member_reward, member_rewards, no_gradient

BREAKS_ALARM = 1.0
"""More breaks than this a Trajectory, on average, mean that a template rewrites history: most context is computed and
trained several times."""


def summarize_groups(
    handles: Sequence[GroupHandle],
    treatments: Mapping[Outcome, Treatment] = DEFAULT_TREATMENTS,
    *,
    version: PolicyVersion | None = None,
    min_valid: int = 2,
) -> dict[str, float]:
    """Flat metrics of the Groups; `version` is the one they are consumed at, and adds their staleness in versions."""
    members = [member for handle in handles for member in handle.members]
    scored = [(member, reward) for member in members if (reward := member_reward(member, treatments)) is not None]
    metrics = {"num_groups": float(len(handles)), "num_members": float(len(members)), "num_valid": float(len(scored))}
    if members:
        metrics["exclusion_rate"] = 1 - len(scored) / len(members)
    if scored:
        metrics |= _valid_metrics(scored)
    if handles:
        reasons = Counter(no_gradient(member_rewards(handle, treatments), min_valid=min_valid) for handle in handles)
        metrics |= {f"{reason}_share": reasons[reason] / len(handles) for reason in NoGradient}
    outcomes = Counter(member.outcome for member in members)
    metrics |= {f"outcome/{outcome}": float(outcomes[outcome]) for outcome in Outcome}
    return metrics | _staleness_metrics([member for member, _ in scored], version)


def exclusion_by_task(
    handles: Sequence[GroupHandle], treatments: Mapping[Outcome, Treatment] = DEFAULT_TREATMENTS
) -> dict[str, float]:
    """Task id -> share of its members that are excluded, for the Tasks where there are any; worst first."""
    members: Counter[str] = Counter()
    excluded: Counter[str] = Counter()
    for handle in handles:
        rewards = member_rewards(handle, treatments)
        members[handle.task_id] += len(rewards)
        excluded[handle.task_id] += rewards.count(None)
    rates = {task_id: count / members[task_id] for task_id, count in excluded.items() if count}
    return dict(sorted(rates.items(), key=lambda item: -item[1]))


def exclusion_by_turns(
    handles: Sequence[GroupHandle], treatments: Mapping[Outcome, Treatment] = DEFAULT_TREATMENTS
) -> dict[str, float]:
    """`exclusion_rate/turns_le_N` for N = 1, 2, 4, ...: a rate that grows with N means that long rollouts are lost."""
    members: Counter[int] = Counter()
    excluded: Counter[int] = Counter()
    for member in (member for handle in handles for member in handle.members):
        bucket = power_of_two_at_least(member.num_turns)
        members[bucket] += 1
        excluded[bucket] += member_reward(member, treatments) is None
    return {f"exclusion_rate/turns_le_{edge}": excluded[edge] / members[edge] for edge in sorted(members)}


def power_of_two_at_least(count: int) -> int:
    """The smallest power of two >= count and >= 1: 5 -> 8."""
    return 1 << max(0, count - 1).bit_length()


def _valid_metrics(scored: Sequence[tuple[MemberSummary, float]]) -> dict[str, float]:
    rewards = [reward for _, reward in scored]
    breaks = fmean(member.num_breaks for member, _ in scored)
    return {
        "reward_mean": fmean(rewards),
        "solved": fmean(reward >= SOLVED_REWARD for reward in rewards),
        "turns_mean": fmean(member.num_turns for member, _ in scored),
        "tokens_mean": fmean(sum(branch.num_tokens for branch in member.branches) for member, _ in scored),
        "trained_tokens_mean": fmean(sum(branch.num_trained for branch in member.branches) for member, _ in scored),
        "seconds_mean": fmean(member.seconds for member, _ in scored),
        "prefix_breaks_mean": breaks,
        "prefix_breaks_alarm": float(breaks > BREAKS_ALARM),
    }


def _staleness_metrics(valid: Sequence[MemberSummary], version: PolicyVersion | None) -> dict[str, float]:
    """Versions between a member's oldest token and `version`; an ancestor lineage's n counts like this one's."""
    if version is None:
        return {}
    ages = [version.n - member.min_version.n for member in valid if member.min_version is not None]
    return {"staleness_max": float(max(ages)), "staleness_mean": fmean(ages)} if ages else {}
