"""A writer's segments: a full one is closed and the next begun, and those that nobody needs any more are removed.

Invariant: the newest segment of a writer is never removed, so no name is used twice; what is removed is in the ledger
first. Written by rollout workers; pruned by recipes/rloo.py when a checkpoint is complete.

Writer "w0" writes w0.seg, then w0.0001.seg, w0.0002.seg, ...
"""

import logging
import re
from collections.abc import Iterable
from pathlib import Path

from trajectories.ancestry import ancestry_of
from trajectories.handle import Location
from trajectories.ledger import Ledger
from trajectories.schema import Group, PolicyVersion
from trajectories.store import SUFFIX, StoreWriter

logger = logging.getLogger(__name__)

MB = 1_000_000
_NUMBERED = re.compile(r"(.+)\.(\d{4,})" + re.escape(SUFFIX))


class SegmentedWriter:
    """A StoreWriter for as long as a writer lives."""

    def __init__(self, directory: Path, writer: str, *, segment_mb: float) -> None:
        """Goes on in the newest segment of `writer`, with its torn tail cut; one of `segment_mb` or more is full."""
        self._directory = directory
        self._writer = writer
        self._limit = segment_mb * MB
        self._number = max((_number(path.name)[1] for path in segments_of(directory, writer)), default=0)
        self._segment = StoreWriter(directory, _name(writer, self._number))

    def append(self, group: Group) -> Location:
        """Where the Group now lies."""
        if self._segment.num_bytes >= self._limit:
            self._segment.close()
            self._number += 1
            self._segment = StoreWriter(self._directory, _name(self._writer, self._number))
        return self._segment.append(group)

    def close(self) -> None:
        """Flushes; safe to call twice."""
        self._segment.close()


def segments_of(directory: Path, writer: str) -> list[Path]:
    """The segments of one writer that are there, oldest first."""
    found = [path for path in directory.glob(f"{writer}*{SUFFIX}") if _number(path.name)[0] == writer]
    return sorted(found, key=lambda path: _number(path.name)[1])


def later_segments(directory: Path, known: Iterable[str]) -> list[str]:
    """The segments that the writers of the `known` ones began after all of those."""
    newest: dict[str, int] = {}
    for writer, number in map(_number, known):
        newest[writer] = max(number, newest.get(writer, 0))
    return [
        path.name
        for writer, number in newest.items()
        for path in segments_of(directory, writer)
        if _number(path.name)[1] > number
    ]


def prune(ledger: Ledger, store: Path, version: PolicyVersion, *, keep_steps: int) -> tuple[list[str], int]:
    """Removes full segments of which every Group was dropped, or consumed `keep_steps` or more before `version`.

    `version` is that of the checkpoint that the run goes on from, so no restore asks for these Groups again. Returns
    the names and the bytes they had. The ledger says so first; a kill between the two is made good by the next call.
    """
    settled = ledger.index.settled_segments(_reaches(ledger, version, keep_steps))
    ends = ledger.index.reported_ends()
    doomed = [name for name in sorted(settled) if _is_whole(store / name, ends[name]) and later_segments(store, [name])]
    ledger.prune(doomed)
    removed: list[str] = []
    num_bytes = 0
    for path in (store / name for name in sorted(ledger.index.pruned_segments())):
        if path.exists():
            num_bytes += path.stat().st_size
            path.unlink()
            removed.append(path.name)
    if removed:
        logger.info("store=%s pruned: %d segments, %.3f GB", store, len(removed), num_bytes / 1e9)
    return removed, num_bytes


def _reaches(ledger: Ledger, version: PolicyVersion, keep_steps: int) -> dict[int, int]:
    """Lineage -> steps taken below this n are far enough behind the weights of `version`."""
    parents = {child: parent for child, parent in ledger.index.parents().items() if parent is not None}
    reaches = {**ancestry_of(version.lineage, parents).forks, version.lineage: version.n}
    return {lineage: min(n, version.n - keep_steps) for lineage, n in reaches.items()}


def _is_whole(path: Path, end: int) -> bool:
    """Whether the ledger was told of everything in it."""
    return path.exists() and path.stat().st_size == end


def _name(writer: str, number: int) -> str:
    return f"{writer}.{number:04d}" if number else writer


def _number(segment: str) -> tuple[str, int]:
    """(writer, number) of a segment's file name."""
    match = _NUMBERED.fullmatch(segment)
    return (match[1], int(match[2])) if match else (segment.removesuffix(SUFFIX), 0)
