"""How a training run goes on: checkpoints and the ledger's frontier, restores, and Groups that are used again.

Invariant: state.json names a complete checkpoint whose Groups the ledger knows, or there is none; each restore starts a
lineage, in the ledger before anything is sampled. Called by recipes/rloo.py; recipes/play.py shares the last two.
"""

import asyncio
import dataclasses
import hashlib
import json
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from actors.errors import DeadlineMissed
from actors.learner_group import LearnerGroup
from actors.rollout_pool import RolloutPool
from envs.task import Task
from learners.retention import order_of
from recipes.checkpoints import Checkpoints, sweep
from recipes.run import Run
from recipes.schedule import Schedule
from trajectories.buffer import GroupBuffer
from trajectories.handle import GroupHandle
from trajectories.ledger import Frontier, Ledger, LedgerError
from trajectories.ledger_index import GroupState
from trajectories.schema import PolicyVersion
from trajectories.store import segments_in_use

logger = logging.getLogger(__name__)

WRITERS_DEADLINE_S = 90.0
"""How long the rollout workers of a killed process may take to end; Ray ends them when it misses their driver."""
_POLL_S = 0.5


async def begin_checkpoint(
    checkpoints: Checkpoints, ledger: Ledger, version: PolicyVersion, then: Callable[[], None] = lambda: None
) -> None:
    """Begins the checkpoint of `version`, unless its weights are in one already; `then` when the run goes on from it.

    The ledger is on the disk up to it before it counts; the Groups of later steps are not among those that it counts.
    """
    newest = checkpoints.newest_state
    if newest is not None and newest["n"] == version.n:
        return
    name = f"{version.lineage}-{version.n:06d}"
    frontier = dataclasses.asdict(ledger.frontier(version))
    state = {"checkpoint": name, "lineage": version.lineage, "n": version.n, "frontier": frontier}
    await checkpoints.begin(name, state, then)


async def restore(run: Run, learner: LearnerGroup, ledger: Ledger) -> PolicyVersion:
    """Loads the last checkpoint into a learner that holds the first weights; returns the version of a new lineage."""
    lineages = ledger.index.parents()
    state = run.load_state()
    last = (-1, -1) if state is None else (state["lineage"], state["n"])
    sweep(run.directory / "checkpoints", keep=lambda name: order_of(name) <= last)
    if state is None:
        n = 0
    elif "frontier" not in state:
        raise ValueError(f"{run.directory} was made before runs kept a ledger: give another --run")
    else:
        n = state["n"]
        ledger.check_frontier(Frontier(**state["frontier"]), PolicyVersion(lineage=state["lineage"], n=n))
        await learner.load(run.directory / "checkpoints" / state["checkpoint"])
    # The newest lineage began at this checkpoint or made it, so its weights at n are these.
    parent = PolicyVersion(lineage=max(lineages), n=n) if lineages else None
    return PolicyVersion(lineage=ledger.fork(parent), n=n)


async def reuse_groups(
    group_ids: Sequence[str], rollouts: RolloutPool, ledger: Ledger, buffer: GroupBuffer
) -> dict[str, float]:
    """Hands stored Groups to the buffer, which gives back those that are not fresh; returns counts of both."""
    locations = [ledger.index.locations(group_id)[-1] for group_id in group_ids]
    handles = await rollouts.read(locations)
    num_reused = sum(buffer.readmit(handle) for handle in sorted(handles, key=_oldest_n))
    return {"groups_reused": float(num_reused), "groups_given_back": float(len(handles) - num_reused)}


def _oldest_n(handle: GroupHandle) -> int:
    return min((member.min_version.n for member in handle.members if member.min_version is not None), default=0)


async def learn_of_stored_groups(store: Path, rollouts: RolloutPool, ledger: Ledger, schedule: Schedule) -> int:
    """Tells the ledger of Groups that were stored but not reported when a process died; returns how many."""
    starts = {path.name: 0 for path in store.glob("*.seg")} | ledger.index.reported_ends()
    num_found = 0
    for handle in await rollouts.find(starts):
        row = ledger.index.group(handle.group_id)
        if row is None or row.state in (GroupState.PENDING, GroupState.RUNNING):
            slot = schedule.slot_of(handle.group_id)
            if slot is None:
                raise LedgerError(f"{store} holds group {handle.group_id}, which this run did not play: move it away")
            ledger.finish(handle.group_id, handle.location, slot=slot)
            num_found += 1
    return num_found


async def wait_for_writers(store: Path, deadline_s: float = WRITERS_DEADLINE_S) -> None:
    """Returns when no worker of an earlier process writes to the store any more; DeadlineMissed naming its segment.

    What such a worker still stored would be played twice.
    """
    deadline = time.monotonic() + deadline_s
    while held := await asyncio.to_thread(segments_in_use, store):
        if time.monotonic() > deadline:
            raise DeadlineMissed(f"{held[0]} is still being written by a worker of an earlier process; end that first")
        logger.info("waiting for a worker of an earlier process: %s", held[0])
        await asyncio.sleep(_POLL_S)


def task_set_facts(tasks: Sequence[Task]) -> dict[str, Any]:
    """Count and digest of the Tasks in their order: ids, instructions, environments, limits. Not their files."""
    digest = hashlib.sha256()
    for task in tasks:
        facts = [task.id, task.instruction, *map(dataclasses.asdict, (task.environment, task.verifier, task.limits))]
        digest.update(json.dumps(facts, sort_keys=True, default=str).encode())
    return {"count": len(tasks), "digest": digest.hexdigest()[:16]}
