"""Audit: holds a run's ledger against its store, its checkpoint and its config, and counts what does not agree.

    lost            stored Groups that are not there, slots that were skipped, Groups that a checkpoint counts and the
                    ledger does not, a checkpoint that is not complete, Tasks that a finished harvest did not play
    duplicated      Groups that are in the store more than once
    trained twice   Groups, or other Groups of their slot, with two optimizer steps behind the same weights
    too stale       Groups consumed with a token of more than `max_staleness` versions before (any, with `down_weight`)
                    or of other weights
    unaccounted     Groups in the store that the ledger never heard of

Exits with 1 if one of these is not 0. Reads only; a run that is still going on is refused.

    python -m recipes.audit runs/rloo
"""

import json
import math
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations, groupby
from pathlib import Path
from typing import Any

import tyro

from recipes.launch import launch
from trajectories.ancestry import Ancestry, ancestry_of
from trajectories.buffer import StalenessPolicy
from trajectories.handle import Location, summarize
from trajectories.ledger import JOURNAL, count_behind
from trajectories.ledger_index import GroupState, LedgerIndex
from trajectories.schema import DEFAULT_TREATMENTS, PolicyVersion
from trajectories.store import SUFFIX, scan, scan_journal, segments_in_use
from trajectories.validity import member_reward

KINDS = ("lost", "duplicated", "trained_twice", "too_stale", "unaccounted")
"""What may be wrong."""
_MAX_NAMED = 8


@dataclass(frozen=True, kw_only=True)
class Config:
    """Audit a run directory."""

    run: tyro.conf.Positional[Path]
    """Run directory of rloo, harvest or evaluate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """One line for each thing that is wrong, by kind."""

    lost: tuple[str, ...]
    duplicated: tuple[str, ...]
    trained_twice: tuple[str, ...]
    too_stale: tuple[str, ...]
    unaccounted: tuple[str, ...]
    num_pruned: int
    """Groups whose payloads were removed by retention, as the ledger says; nothing is wrong with them."""

    @property
    def num_findings(self) -> int:
        """0 when everything agrees."""
        return sum(len(getattr(self, kind)) for kind in KINDS)


async def main(config: Config) -> None:
    """Prints the counts; SystemExit with 1 when one is not 0."""
    ledgers = sorted((config.run / "ledger").glob(f"*/{JOURNAL}{SUFFIX}"))
    if not ledgers:
        raise ValueError(f"{config.run} holds no ledger: give the run directory of rloo, harvest or evaluate")
    num_findings = 0
    for journal in ledgers:
        audit, states = audit_store(config.run, journal.parent.name)
        num_findings += audit.num_findings
        counts = ", ".join(f"{states[state]} {state}" for state in GroupState)
        pruned = f"; {audit.num_pruned} payloads pruned" if audit.num_pruned else ""
        print(f"{config.run / journal.parent.name}: {sum(states.values())} Groups: {counts}{pruned}")
        for kind in KINDS:
            found: tuple[str, ...] = getattr(audit, kind)
            print(f"  {kind.replace('_', ' '):<14}{len(found):>6}")
            for line in found[:_MAX_NAMED]:
                print(f"    {line}")
    if num_findings:
        sys.exit(1)


def audit_store(run: Path, store: str) -> tuple[Audit, Counter[GroupState]]:
    """What is wrong with one store of a run, and how many Groups are in which state."""
    if held := segments_in_use(run / "ledger" / store):
        raise ValueError(f"{held[0]} is being written: audit {run} when its run has ended")
    index = LedgerIndex()
    for row in scan_journal(run / "ledger" / store):
        index.apply(row)
    config = json.loads((run / "config.json").read_text())
    stored = _read_store(run / store)
    audit = Audit(
        lost=(
            *_missing_frames(index, stored, run / store),
            *_skipped_slots(index),
            *_behind_checkpoint(run, index),
            *_not_played(run, config, index),
        ),
        duplicated=tuple(
            f"group {group_id} is stored {len(found.locations)} times"
            for group_id, found in stored.items()
            if len(found.locations) > 1
        ),
        trained_twice=tuple(_trained_twice(index)),
        too_stale=tuple(_too_stale(index, stored, _bound(config["config"]))),
        unaccounted=tuple(f"group {group_id} is in the store only" for group_id in stored if not index.group(group_id)),
        num_pruned=index.num_pruned(),
    )
    return audit, Counter(row.state for row in index.groups())


@dataclass(slots=True)
class _Stored:
    """What the store holds of one Group."""

    locations: list[Location]
    versions: tuple[PolicyVersion, ...]
    """Oldest and newest version of each valid member's tokens."""


def _read_store(store: Path) -> dict[str, _Stored]:
    stored: dict[str, _Stored] = {}
    for location, group in scan(store) if store.is_dir() else ():
        valid = [m for m in summarize(group, location).members if member_reward(m, DEFAULT_TREATMENTS) is not None]
        versions = tuple(v for member in valid for v in (member.min_version, member.max_version) if v is not None)
        stored.setdefault(group.id, _Stored([], versions)).locations.append(location)
    return stored


def _missing_frames(index: LedgerIndex, stored: dict[str, _Stored], store: Path) -> Iterator[str]:
    pruned = index.pruned_segments()
    for group_id, location in index.frames():
        if location.segment in pruned:
            continue
        if group_id not in stored or location not in stored[group_id].locations:
            yield f"group {group_id} is not at {store / location.segment}:{location.offset}"


def _skipped_slots(index: LedgerIndex) -> Iterator[str]:
    slots = {row.slot for row in index.groups()}
    for slot in range(index.next_slot()):
        if slot not in slots:
            yield f"slot {slot} was skipped"


def _behind_checkpoint(run: Path, index: LedgerIndex) -> Iterator[str]:
    """What the checkpoint was made with and the ledger, or the disk, does not have."""
    if not (run / "state.json").exists() or not index.parents():
        return
    state = json.loads((run / "state.json").read_text())
    if not (run / "checkpoints" / state["checkpoint"] / "COMPLETE").is_file():
        yield f"checkpoint {state['checkpoint']} is not complete"
    counted = count_behind(index, PolicyVersion(lineage=state["lineage"], n=state["n"]))
    for number in range(abs(state["frontier"]["num_consumed"] - counted)):
        yield f"checkpoint {state['checkpoint']}: Group {number} of those it counts more or less than the ledger"


def _not_played(run: Path, config: Any, index: LedgerIndex) -> Iterator[str]:
    """Tasks that a finished harvest or evaluation has no Group of; a training run ends amid its Tasks."""
    summary = json.loads((run / "summary.json").read_text()) if (run / "summary.json").exists() else {}
    if index.parents() or not summary.get("finished"):
        return
    finished = {row.slot for row in index.groups() if row.state is GroupState.FINISHED}
    for slot in range(config["pinned"]["tasks"]["count"]):
        if slot not in finished:
            yield f"the Task at slot {slot} was not played to its end"


def _trained_twice(index: LedgerIndex) -> Iterator[str]:
    pasts = _pasts(index)
    for slot, rows in groupby(index.groups(), key=lambda row: row.slot):
        steps = [(row.group_id, version) for row in rows for version in index.steps_of(row.group_id)]
        for (one, first), (other, second) in combinations(steps, 2):
            if pasts[second.lineage].has_step(first) or pasts[first.lineage].has_step(second):
                yield f"slot {slot}: group {one} at {_name(first)} and {other} at {_name(second)}"


def _bound(config: dict[str, Any]) -> float | None:
    """The staleness that the run promised: none without a learner, any age where older Groups weigh less."""
    return math.inf if config.get("staleness") == StalenessPolicy.DOWN_WEIGHT else config.get("max_staleness")


def _too_stale(index: LedgerIndex, stored: dict[str, _Stored], max_staleness: float | None) -> Iterator[str]:
    if max_staleness is None:
        return
    pasts = _pasts(index)
    for row in index.groups():
        for step in index.steps_of(row.group_id):
            for version in stored[row.group_id].versions if row.group_id in stored else ():
                if version.n < step.n - max_staleness or not pasts[step.lineage].has_weights(version):
                    yield f"group {row.group_id} of {_name(version)} was consumed at {_name(step)}"
                    break


def _pasts(index: LedgerIndex) -> dict[int, Ancestry]:
    parents = index.parents()
    known = {child: parent for child, parent in parents.items() if parent is not None}
    return defaultdict(lambda: Ancestry(lineage=-1, forks={}), {each: ancestry_of(each, known) for each in parents})


def _name(version: PolicyVersion) -> str:
    return f"version {version.lineage}:{version.n}"


if __name__ == "__main__":
    launch(Config, main)
