"""One Group: the same Task played several times at once.

Invariant: a Group always has exactly `size` members, in order; one that did not end in time is a member too, with
Outcome `cancelled`. Called by rollout workers (actors/rollout_worker.py) and by recipes that run without Ray.
"""

import asyncio

from envs.episode import Episode, run_episode
from envs.errors import AgentCommandError, BudgetExceeded, TeacherRefused
from envs.task import Task
from trajectories.schema import Group, Trajectory


async def run_group(task: Task, *, size: int, episode: Episode, group_id: str, deadline_s: float) -> Group:
    """The Group of `size` rollouts, run concurrently for at most `deadline_s` seconds and the stop of their sandboxes.

    Members are named `{group_id}.{member}`. A bug in any of them cancels the others and propagates (an ExceptionGroup),
    but for AgentCommandError, BudgetExceeded and TeacherRefused, which end the run as themselves.
    """
    if size < 1:
        raise ValueError(f"size must be >= 1, got {size}")
    try:
        members = await _run_members(task, size, episode, group_id, deadline_s)
    except ExceptionGroup as errors:
        endings, bugs = errors.split((AgentCommandError, BudgetExceeded, TeacherRefused))
        if bugs is None and endings is not None:
            raise endings.exceptions[0] from None
        raise
    return Group(id=group_id, task_id=task.id, trajectories=tuple(members))


async def _run_members(task: Task, size: int, episode: Episode, group_id: str, deadline_s: float) -> list[Trajectory]:
    async with asyncio.TaskGroup() as rollouts:
        members = [
            rollouts.create_task(
                run_episode(
                    task,
                    episode=episode,
                    trajectory_id=f"{group_id}.{member}",
                    group_id=group_id,
                    member=member,
                    deadline_s=deadline_s,
                )
            )
            for member in range(size)
        ]
    return [member.result() for member in members]
