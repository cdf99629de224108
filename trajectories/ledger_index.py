"""The ledger's index: a private SQLite database on a local disk, rebuilt from the journal whenever it is opened.

Invariant: what it holds follows from the journal's rows alone, applied in order, so it may be lost at any time.
Called by trajectories/ledger.py (writes and looks up) and recipes/audit.py (counts).
"""

import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from trajectories.handle import Location
from trajectories.schema import PolicyVersion

_TABLES = """
CREATE TABLE groups (group_id TEXT PRIMARY KEY, slot INTEGER, state TEXT, reason TEXT, since REAL) WITHOUT ROWID;
CREATE TABLE frames (group_id TEXT, segment TEXT, start INTEGER, length INTEGER);
CREATE TABLE steps (group_id TEXT, lineage INTEGER, n INTEGER);
CREATE TABLE forks (lineage INTEGER PRIMARY KEY, parent_lineage INTEGER, parent_n INTEGER);
CREATE TABLE pruned (segment TEXT PRIMARY KEY) WITHOUT ROWID;
CREATE INDEX groups_by_slot ON groups (slot);
CREATE INDEX frames_by_group ON frames (group_id);
CREATE INDEX steps_by_group ON steps (group_id);
CREATE INDEX steps_by_version ON steps (lineage, n);
"""


class GroupState(StrEnum):
    """How far a Group has come."""

    PENDING = "pending"
    """It has its id and its place in the order of the Tasks."""
    RUNNING = "running"
    """A rollout worker plays it."""
    FINISHED = "finished"
    """It is in the store."""
    CONSUMED = "consumed"
    """An optimizer step trained on it."""
    DROPPED = "dropped"
    """It will not be trained on; the reason is kept."""


class Verb(StrEnum):
    """What a row of the journal says; the row goes on as the verb's line tells, and ends with the time (Unix, s)."""

    ISSUE = "issue"
    """group id, slot"""
    RUN = "run"
    """group id"""
    FINISH = "finish"
    """group id, slot, segment, offset, length"""
    CONSUME = "consume"
    """group id, lineage, n"""
    DROP = "drop"
    """group id, reason"""
    FORK = "fork"
    """lineage, parent's lineage, parent's n; the parent is None for the first lineage"""
    PRUNE = "prune"
    """segment, which is removed from the store with all that it holds"""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRow:
    """What the ledger knows of one Group."""

    group_id: str
    slot: int
    """Its place in the order of the Tasks, from 0; a Group that replaces a dropped one shares its slot."""
    state: GroupState
    reason: str
    """Why it was dropped; "" otherwise."""
    since: float
    """Unix time of the last change, seconds."""


class LedgerIndex:
    """The journal's rows, ready for questions."""

    def __init__(self) -> None:
        # "" is a private database that SQLite keeps in memory until it outgrows its cache, then in an unlinked file.
        self._database = sqlite3.connect("", isolation_level=None)
        self._database.executescript(f"PRAGMA journal_mode=OFF; PRAGMA synchronous=OFF; {_TABLES} BEGIN;")

    def apply(self, row: Sequence[Any]) -> None:
        """Takes one row of the journal in."""
        verb, *fields, at = row
        run = self._database.execute
        match Verb(verb):
            case Verb.ISSUE:
                self._put(fields[0], fields[1], GroupState.PENDING, "", at)
            case Verb.RUN:
                self._move(fields[0], GroupState.RUNNING, "", at)
            case Verb.FINISH:
                group_id, slot, *location = fields
                self._put(group_id, slot, GroupState.FINISHED, "", at)
                run("INSERT INTO frames VALUES (?, ?, ?, ?)", (group_id, *location))
            case Verb.CONSUME:
                self._move(fields[0], GroupState.CONSUMED, "", at)
                run("INSERT INTO steps VALUES (?, ?, ?)", fields)
            case Verb.DROP:
                self._move(fields[0], GroupState.DROPPED, fields[1], at)
            case Verb.FORK:
                run("INSERT OR REPLACE INTO forks VALUES (?, ?, ?)", fields)
            case Verb.PRUNE:
                run("INSERT OR REPLACE INTO pruned VALUES (?)", fields)

    def group(self, group_id: str) -> GroupRow | None:
        """What is known of a Group; None when it was never issued."""
        found = self._database.execute("SELECT * FROM groups WHERE group_id = ?", (group_id,)).fetchone()
        return None if found is None else _row(found)

    def groups(self) -> Iterator[GroupRow]:
        """Every Group, by slot and then in the order of ids."""
        for found in self._database.execute("SELECT * FROM groups ORDER BY slot, length(group_id), group_id"):
            yield _row(found)

    def locations(self, group_id: str) -> list[Location]:
        """Where its frames lie: none before it finished, more than one only if it was played twice."""
        found = self._database.execute("SELECT segment, start, length FROM frames WHERE group_id = ?", (group_id,))
        return [Location(segment=segment, offset=start, length=length) for segment, start, length in found]

    def frames(self) -> Iterator[tuple[str, Location]]:
        """(group id, Location) of every frame that was reported."""
        for group_id, segment, start, length in self._database.execute("SELECT * FROM frames"):
            yield group_id, Location(segment=segment, offset=start, length=length)

    def reported_ends(self) -> dict[str, int]:
        """Segment -> the byte up to which every frame was reported; what lies behind it may not have been."""
        ends: dict[str, int] = {}
        rows = self._database.execute("SELECT segment, start, length FROM frames ORDER BY segment, start")
        for segment, start, length in rows:
            if start == ends.setdefault(segment, 0):
                ends[segment] += length
        return ends

    def pruned_segments(self) -> set[str]:
        """Segments that the store need not have any more."""
        return {segment for (segment,) in self._database.execute("SELECT segment FROM pruned")}

    def num_pruned(self) -> int:
        """Groups that lay in them."""
        return self._number("SELECT COUNT(*) FROM frames JOIN pruned USING (segment)")

    def settled_segments(self, reaches: Mapping[int, int]) -> set[str]:
        """Segments of which every Group was dropped, or consumed in a lineage of `reaches` below the n given there.

        Without those that are pruned.
        """
        is_behind = " OR ".join("(steps.lineage = ? AND steps.n < ?)" for _ in reaches) or "FALSE"
        bounds = [bound for reach in reaches.items() for bound in reach]
        open_ones = f"""SELECT segment FROM frames JOIN groups USING (group_id) WHERE state != ? AND NOT EXISTS
            (SELECT 1 FROM steps WHERE steps.group_id = frames.group_id AND ({is_behind}))"""
        query = f"SELECT DISTINCT segment FROM frames WHERE segment NOT IN ({open_ones})"
        found = self._database.execute(query, (GroupState.DROPPED.value, *bounds))
        return {segment for (segment,) in found} - self.pruned_segments()

    def steps_of(self, group_id: str) -> list[PolicyVersion]:
        """The versions at which it was consumed, in the order in which that happened."""
        found = self._database.execute("SELECT lineage, n FROM steps WHERE group_id = ? ORDER BY rowid", (group_id,))
        return [PolicyVersion(lineage=lineage, n=n) for lineage, n in found]

    def num_consumed(self, lineage: int, before_n: int) -> int:
        """Groups consumed in the lineage at versions below `before_n`."""
        return self._number("SELECT COUNT(*) FROM steps WHERE lineage = ? AND n < ?", lineage, before_n)

    def next_slot(self) -> int:
        """The first slot that no Group was issued for."""
        return self._number("SELECT COALESCE(MAX(slot) + 1, 0) FROM groups")

    def parents(self) -> dict[int, PolicyVersion | None]:
        """Lineage -> the version that it was restored from; None for the first."""
        found = self._database.execute("SELECT * FROM forks ORDER BY lineage")
        return {lineage: None if parent is None else PolicyVersion(lineage=parent, n=n) for lineage, parent, n in found}

    def close(self) -> None:
        """Frees its memory and disk."""
        self._database.close()

    def _put(self, group_id: str, slot: int, state: GroupState, reason: str, at: float) -> None:
        row = (group_id, slot, state.value, reason, at)
        self._database.execute("INSERT OR REPLACE INTO groups VALUES (?, ?, ?, ?, ?)", row)

    def _move(self, group_id: str, state: GroupState, reason: str, at: float) -> None:
        values = (state.value, reason, at, group_id)
        self._database.execute("UPDATE groups SET state = ?, reason = ?, since = ? WHERE group_id = ?", values)

    def _number(self, query: str, *values: Any) -> int:
        return self._database.execute(query, values).fetchone()[0]


def _row(found: tuple[str, int, str, str, float]) -> GroupRow:
    group_id, slot, state, reason, since = found
    return GroupRow(group_id=group_id, slot=slot, state=GroupState(state), reason=reason, since=since)
