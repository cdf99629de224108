"""The ledger: what became of every Group, from its issue to the optimizer step that trained on it.

Invariant: the truth is a checksummed append-only journal in the run directory, written by one process at a time; every
answer is what the journal says, and a Group changes state only along `_NEXT`.
Called by the rollout pool (run, finish), the schedule (issue, drop) and recipes (consume, fork); read by recipes/audit.

Rows are written in batches, one frame of the store's format each: when a Group is about to run, when `batch` rows
wait, or with the first row that comes `batch_s` after the oldest that waits. A killed process loses what waits, and
nothing of it matters: a Group that is in the store is found there, and unsaved weights died with the process.
`flush` makes everything durable (fsync); a checkpoint calls it before it is complete.
"""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from trajectories.ancestry import Ancestry, ancestry_of
from trajectories.handle import Location
from trajectories.ledger_index import GroupRow, GroupState, LedgerIndex, Verb
from trajectories.schema import PolicyVersion
from trajectories.store import StoreWriter, scan_journal

JOURNAL = "journal"
"""Name of the journal's segment."""

_NEXT: dict[GroupState | None, frozenset[GroupState]] = {
    None: frozenset({GroupState.PENDING, GroupState.FINISHED}),
    GroupState.PENDING: frozenset({GroupState.PENDING, GroupState.RUNNING, GroupState.FINISHED, GroupState.DROPPED}),
    GroupState.RUNNING: frozenset({GroupState.PENDING, GroupState.RUNNING, GroupState.FINISHED, GroupState.DROPPED}),
    GroupState.FINISHED: frozenset({GroupState.CONSUMED, GroupState.DROPPED}),
    GroupState.CONSUMED: frozenset({GroupState.CONSUMED, GroupState.DROPPED}),
    GroupState.DROPPED: frozenset(),
}
"""What may follow. Back to pending: the process that played it died. Consumed again: only in another lineage."""


class LedgerError(Exception):
    """The books do not agree with what happens, or with a checkpoint; the message names the Group and the remedy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Frontier:
    """How far the ledger was when a checkpoint was written."""

    journal_bytes: int
    """Bytes of the journal that were on the disk."""
    num_consumed: int
    """Groups consumed behind the checkpoint's weights."""


class Ledger:
    """The open ledger of a run. Use as a context manager."""

    def __init__(self, directory: Path, *, batch: int = 256, batch_s: float = 1.0) -> None:
        """Opens or creates the journal in `directory`; SegmentInUse when another process has it open."""
        self._journal = StoreWriter(directory, JOURNAL, fsync_every_s=float("inf"))
        self._index = LedgerIndex()
        for row in scan_journal(directory):
            self._index.apply(row)
        self._batch = batch
        self._batch_s = batch_s
        self._waiting: list[list[Any]] = []
        self._waits_since = 0.0
        self._ancestry: Ancestry | None = None

    @property
    def index(self) -> LedgerIndex:
        """What is known, for reading."""
        return self._index

    @property
    def ancestry(self) -> Ancestry:
        """The past of the newest lineage; LedgerError before the first `fork`."""
        if self._ancestry is None:
            parents = self._index.parents()
            if not parents:
                raise LedgerError("the ledger has no lineage yet; call fork first")
            self._ancestry = ancestry_of(max(parents), {child: each for child, each in parents.items() if each})
        return self._ancestry

    def fork(self, parent: PolicyVersion | None) -> int:
        """Starts the next lineage, restored from `parent` (None: from the first weights), and returns its number."""
        lineages = self._index.parents()
        if parent is not None and parent.lineage not in lineages:
            raise LedgerError(f"cannot restore from {parent}: the ledger knows no such lineage")
        lineage = len(lineages)
        row = [lineage, None, None] if parent is None else [lineage, parent.lineage, parent.n]
        self._record(Verb.FORK, *row)
        self._ancestry = None
        self.flush()
        return lineage

    def issue(self, group_id: str, slot: int) -> None:
        """The Group is pending; again when the process that was to play it died."""
        self._check(group_id, GroupState.PENDING)
        self._record(Verb.ISSUE, group_id, slot)

    def run(self, group_id: str) -> None:
        """A worker is about to play the Group; the journal has it, and all before it, when this returns."""
        self._check(group_id, GroupState.RUNNING)
        self._record(Verb.RUN, group_id)
        self.write()

    def finish(self, group_id: str, location: Location, *, slot: int | None = None) -> None:
        """The Group lies in the store; `slot` for one whose issue was lost with a power failure."""
        known = self._check(group_id, GroupState.FINISHED)
        place = known.slot if known is not None else slot
        if place is None:
            raise LedgerError(f"group {group_id} finished but was never issued; is this another run's store?")
        self._record(Verb.FINISH, group_id, place, location.segment, location.offset, location.length)

    def consume(self, group_ids: Iterable[str], version: PolicyVersion) -> None:
        """The optimizer step at `version` trained on these Groups; LedgerError when a step before it did too."""
        for group_id in group_ids:
            self._check(group_id, GroupState.CONSUMED)
            if self.is_consumed(group_id):
                raise LedgerError(f"group {group_id} would be trained twice: at {version} and behind its weights")
            self._record(Verb.CONSUME, group_id, version.lineage, version.n)

    def drop(self, group_id: str, reason: str) -> None:
        """The Group will not be trained on."""
        self._check(group_id, GroupState.DROPPED)
        self._record(Verb.DROP, group_id, reason)

    def prune(self, segments: Sequence[str]) -> None:
        """These segments of the store are about to be removed; on the disk when this returns."""
        for segment in segments:
            self._record(Verb.PRUNE, segment)
        if segments:
            self.flush()

    def is_consumed(self, group_id: str) -> bool:
        """Whether an optimizer step behind the present weights trained on the Group."""
        return any(self.ancestry.has_step(version) for version in self._index.steps_of(group_id))

    def frontier(self, version: PolicyVersion) -> Frontier:
        """Where the ledger stands for weights of `version`, all of it on the disk when this returns."""
        self.flush()
        return Frontier(journal_bytes=self._journal.num_bytes, num_consumed=count_behind(self._index, version))

    def check_frontier(self, frontier: Frontier, version: PolicyVersion) -> None:
        """Raises LedgerError when the journal lacks something that the checkpoint of `version` was made with."""
        if self._journal.num_bytes < frontier.journal_bytes:
            raise LedgerError(
                f"{self._journal.path} has {self._journal.num_bytes} bytes, but had {frontier.journal_bytes} when the "
                "checkpoint was written: restore the journal from a copy, or start over in another run directory"
            )
        if (num_behind := count_behind(self._index, version)) != frontier.num_consumed:
            raise LedgerError(
                f"{self._journal.path} counts {num_behind} Groups behind the checkpoint, which was made with "
                f"{frontier.num_consumed}: journal and checkpoint are of different runs"
            )

    def write(self) -> None:
        """Hands waiting rows to the operating system: they survive this process."""
        if self._waiting:
            self._journal.append_journal(self._waiting)
            self._waiting = []

    def flush(self) -> None:
        """Returns when every row is on the disk."""
        self.write()
        self._journal.flush()

    def close(self) -> None:
        """Flushes and lets the next process in; safe to call twice."""
        if self._journal.is_open:
            self.write()
        self._journal.close()
        self._index.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check(self, group_id: str, state: GroupState) -> GroupRow | None:
        known = self._index.group(group_id)
        before = None if known is None else known.state
        if state not in _NEXT[before]:
            raise LedgerError(f"group {group_id} cannot become {state}: it is {before or 'unknown'}")
        return known

    def _record(self, verb: Verb, *fields: Any) -> None:
        now = time.time()
        row: Sequence[Any] = [verb.value, *fields, now]
        self._index.apply(row)
        if not self._waiting:
            self._waits_since = now
        self._waiting.append(list(row))
        if len(self._waiting) >= self._batch or now - self._waits_since >= self._batch_s:
            self.write()


def count_behind(index: LedgerIndex, version: PolicyVersion) -> int:
    """Number of Groups that optimizer steps behind the weights of `version` were taken on."""
    parents = {child: parent for child, parent in index.parents().items() if parent is not None}
    reaches = {**ancestry_of(version.lineage, parents).forks, version.lineage: version.n}
    return sum(index.num_consumed(lineage, n) for lineage, n in reaches.items())
