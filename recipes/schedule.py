"""The schedule: which Group is issued next, for a stream that trains.

Invariant: slot k is always the same Task (a seeded shuffle of each pass), no slot is skipped, and one is issued again
only when its last Group cannot be trained on any more. The ledger knows each issue.
Called by recipes/rloo_parts.py; the rollout stream draws from it.
"""

import heapq
import random
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby

from actors.rollout_stream import GroupRequest
from envs.task import Task
from trajectories.ledger import Ledger
from trajectories.ledger_index import GroupRow, GroupState
from trajectories.schema import PolicyVersion
from trajectories.validity import NoGradient

SPENT = frozenset(str(reason) for reason in NoGradient)
"""Reasons after which a Task had its turn; for any other one its slot is issued again, as a new Group."""


class Schedule:
    """Groups in the order of the Tasks; iterating again goes on, with what was given back meanwhile."""

    def __init__(self, tasks: Sequence[Task], ledger: Ledger, *, seed: int, epochs: int | None) -> None:
        """`epochs` passes over the Tasks, or passes without end."""
        self._tasks = {task.id: task for task in tasks}
        self._ledger = ledger
        self._seed = seed
        self._num_slots = None if epochs is None else epochs * len(tasks)
        self._next_slot = ledger.index.next_slot()
        self._due: list[tuple[int, str]] = []
        """Heap of (slot, group id) to issue before the next slot."""
        self._epoch = -1
        self._order: list[str] = []

    def __iter__(self) -> Iterator[GroupRequest]:
        while (request := self._next()) is not None:
            yield request

    def give_back(self, group_id: str, reason: str) -> None:
        """The Group will not be trained on; its slot is due again unless its Task had its turn."""
        row = self._ledger.index.group(group_id)
        assert row is not None, f"group {group_id} was given back but never issued"
        self._ledger.drop(group_id, reason)
        if reason not in SPENT:
            heapq.heappush(self._due, (row.slot, _next_attempt(group_id)))

    def slot_of(self, group_id: str) -> int | None:
        """The slot that a Group's id names; None when it is none of this schedule's."""
        task_id, _, numbers = group_id.rpartition("@")
        epoch, _, attempt = numbers.partition(".")
        if task_id not in self._tasks or not (epoch.isdigit() and attempt.isdigit()):
            return None
        return int(epoch) * len(self._tasks) + self._shuffled(int(epoch)).index(task_id)

    def go_on(self, newest_step: int) -> list[str]:
        """After a restart: makes due what no process plays any more; returns ids of stored Groups that may be reused.

        A Group that was trained on in an abandoned lineage, later than at version `newest_step`, cannot be fresh.
        """
        self._next_slot = self._ledger.index.next_slot()
        unknown = set(range(self._next_slot))
        reusable: list[str] = []
        for slot, rows in groupby(list(self._ledger.index.groups()), key=lambda row: row.slot):
            attempts = list(rows)
            unknown.discard(slot)
            if not any(row.state is GroupState.CONSUMED and self._ledger.is_consumed(row.group_id) for row in attempts):
                reusable += self._stand(attempts[-1], newest_step)
        for slot in unknown:  # a power failure took the issue, and left a later Group in the store
            heapq.heappush(self._due, (slot, self._first_group(slot)))
        return reusable

    def go_back(self, newest_step: int, is_alive: Callable[[str], bool]) -> list[str]:
        """After a restore in this process: ids of Groups that may be reused, but for those that are alive in it."""
        reusable: list[str] = []
        for row in list(self._ledger.index.groups()):
            is_open = row.state is GroupState.CONSUMED and not self._ledger.is_consumed(row.group_id)
            if (is_open or row.state is GroupState.FINISHED) and not is_alive(row.group_id):
                reusable += self._stand(row, newest_step)
        return reusable

    def _stand(self, row: GroupRow, newest_step: int) -> list[str]:
        """Decides about an open slot by its last Group."""
        match row.state:
            case GroupState.PENDING | GroupState.RUNNING:
                heapq.heappush(self._due, (row.slot, row.group_id))
            case GroupState.DROPPED if row.reason not in SPENT:
                heapq.heappush(self._due, (row.slot, _next_attempt(row.group_id)))
            case GroupState.FINISHED:
                return [row.group_id]
            case GroupState.CONSUMED if _last_step(self._ledger, row.group_id).n <= newest_step:
                return [row.group_id]
            case GroupState.CONSUMED:
                self.give_back(row.group_id, "abandoned_lineage")
            case _:
                pass
        return []

    def _next(self) -> GroupRequest | None:
        if self._due:
            slot, group_id = heapq.heappop(self._due)
        elif self._num_slots is None or self._next_slot < self._num_slots:
            slot = self._next_slot
            self._next_slot += 1
            group_id = self._first_group(slot)
        else:
            return None
        self._ledger.issue(group_id, slot)
        return GroupRequest(task=self._tasks[group_id.rpartition("@")[0]], group_id=group_id)

    def _first_group(self, slot: int) -> str:
        epoch, place = divmod(slot, len(self._tasks))
        return f"{self._shuffled(epoch)[place]}@{epoch}.0"

    def _shuffled(self, epoch: int) -> list[str]:
        if epoch != self._epoch:
            ids = list(self._tasks)
            self._epoch, self._order = epoch, random.Random(self._seed + epoch).sample(ids, len(ids))
        return self._order


def _next_attempt(group_id: str) -> str:
    """add-7@0.0 -> add-7@0.1"""
    stem, _, attempt = group_id.rpartition(".")
    return f"{stem}.{int(attempt) + 1}"


def _last_step(ledger: Ledger, group_id: str) -> PolicyVersion:
    return ledger.index.steps_of(group_id)[-1]
