"""The trajectory store: a directory of append-only segments, each of one writer.

Invariant: a frame that `append` returned for survives the writer's death, and no damaged frame is ever read or skipped.
Written by rollout workers and `recipes/harvest`; read by learner ranks, filters and exports.

A segment is a run of frames (trajectories/frames.py), the payload of each one record (trajectories/codec.py). `append`
hands the frame to the operating system at once, so `kill -9` loses nothing; what a power failure may lose is bounded by
`fsync_every_s`.
"""

import fcntl
import logging
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from trajectories.codec import (
    RecordKind,
    decode_group,
    decode_journal,
    decode_sample,
    encode_group,
    encode_journal,
    encode_sample,
    kind_of,
)
from trajectories.durable import sync_directory
from trajectories.frames import StoreError, framed, frames, read_frame
from trajectories.handle import Location
from trajectories.samples import Sample
from trajectories.schema import Group

logger = logging.getLogger(__name__)

SUFFIX = ".seg"


class SegmentInUse(StoreError):
    """Another writer holds the segment."""


class StoreWriter:
    """The one writer of `directory/<writer>.seg`; opening it cuts a torn tail. Use as a context manager."""

    def __init__(self, directory: Path, writer: str, *, fsync_every_s: float = 5.0) -> None:
        """`fsync_every_s`: an append that comes this long after the last fsync makes the next one; 0 is each append."""
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", writer):
            raise ValueError(f"writer must be letters, digits, '.', '_' and '-', got {writer!r}")
        directory.mkdir(parents=True, exist_ok=True)
        self.path = directory / f"{writer}{SUFFIX}"
        self._fsync_every_s = fsync_every_s
        self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            _lock(self._fd, self.path)
            self._end, self.cut_bytes = _cut_torn_tail(self._fd, self.path)
            """`cut_bytes`: bytes of a torn tail that opening removed; 0 after a clean end."""
            sync_directory(directory)
        except BaseException:
            os.close(self._fd)
            raise
        self._synced_at = time.monotonic()

    def append(self, group: Group) -> Location:
        """Where the Group now lies. OSError (a full disk) leaves the segment as it was before."""
        return self._append(encode_group(group))

    def append_sample(self, sample: Sample) -> Location:
        """Where the Sample now lies."""
        return self._append(encode_sample(sample))

    def append_journal(self, rows: Sequence[Sequence[Any]]) -> Location:
        """Where a batch of the ledger's rows now lies (trajectories/ledger.py)."""
        return self._append(encode_journal(rows))

    @property
    def is_open(self) -> bool:
        """Whether it may still append."""
        return self._fd >= 0

    @property
    def num_bytes(self) -> int:
        """Bytes of whole frames in the segment."""
        return self._end

    def flush(self) -> None:
        """Returns when everything appended is on the disk."""
        os.fsync(self._fd)
        self._synced_at = time.monotonic()

    def close(self) -> None:
        """Flushes and gives the segment up; safe to call twice."""
        if self._fd < 0:
            return
        try:
            self.flush()
        finally:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _append(self, payload: bytes) -> Location:
        if self._fd < 0:
            raise ValueError(f"{self.path}: the writer is closed")
        frame = memoryview(framed(payload))
        written = 0
        try:
            while written < len(frame):
                written += os.pwrite(self._fd, frame[written:], self._end + written)
        except BaseException:
            os.ftruncate(self._fd, self._end)  # else the next frame would bury half of this one
            raise
        location = Location(segment=self.path.name, offset=self._end, length=len(frame))
        self._end += len(frame)
        if time.monotonic() - self._synced_at >= self._fsync_every_s:
            self.flush()
        return location


def read_group(directory: Path, location: Location) -> Group:
    """The Group at `location`; NoSuchFrame or CorruptFrame when it is not there whole."""
    return decode_group(read_frame(directory, location))


def read_sample(directory: Path, location: Location) -> Sample:
    """The Sample at `location`; NoSuchFrame or CorruptFrame when it is not there whole."""
    return decode_sample(read_frame(directory, location))


def scan(directory: Path) -> Iterator[tuple[Location, Group]]:
    """Every Group, segment by segment in the order of names, each in the order of its appends.

    Samples are passed over. A segment that is being written, or whose writer died, ends at its last whole frame.
    """
    for location, payload in _scan_frames(directory):
        if kind_of(payload) is RecordKind.GROUP:
            yield location, decode_group(payload)


def scan_tails(directory: Path, starts: Mapping[str, int]) -> Iterator[tuple[Location, Group]]:
    """The Groups of the named segments, each read from the byte given, where a frame starts or the segment ends."""
    for segment, start in sorted(starts.items()):
        path = directory / segment
        try:
            file = open(path, "rb")  # noqa: SIM115 - closed below; it may be pruned meanwhile
        except FileNotFoundError:
            continue
        with file:
            for location, payload in frames(file, path, start):
                if kind_of(payload) is RecordKind.GROUP:
                    yield location, decode_group(payload)


def scan_journal(directory: Path) -> Iterator[list[Any]]:
    """Every row of the ledger's journal, in the order of its appends."""
    for _, payload in _scan_frames(directory):
        if kind_of(payload) is RecordKind.JOURNAL:
            yield from decode_journal(payload)


def segments_in_use(directory: Path) -> list[Path]:
    """The segments that a living writer holds; a run that goes on waits for those of its predecessor's workers."""
    return [path for path in sorted(directory.glob(f"*{SUFFIX}")) if _is_locked(path)]


def _is_locked(path: Path) -> bool:
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def _scan_frames(directory: Path) -> Iterator[tuple[Location, bytes]]:
    if not directory.is_dir():
        raise StoreError(f"{directory}: no such store; give the directory that a harvest wrote")
    for path in sorted(directory.glob(f"*{SUFFIX}")):
        with open(path, "rb") as file:
            yield from frames(file, path)


def _lock(fd: int, path: Path) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise SegmentInUse(f"{path}: another writer holds this segment; give each writer its own name") from None


def _cut_torn_tail(fd: int, path: Path) -> tuple[int, int]:
    """The end of the last whole frame and the bytes cut after it."""
    end = 0
    with open(path, "rb") as file:
        for location, _ in frames(file, path):
            end = location.offset + location.length
    cut = os.fstat(fd).st_size - end
    if cut:
        os.ftruncate(fd, end)
        os.fsync(fd)
        logger.warning("segment=%s torn tail cut: %d bytes after byte %d", path, cut, end)
    return end, cut
