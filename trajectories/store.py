"""The trajectory store: a directory of append-only segments, one per writer.

Invariant: a frame that `append` returned for survives the writer's death, and no damaged frame is ever read or skipped.
Written by rollout workers and `recipes/harvest`; read by learner ranks, filters and exports.

A segment is a run of frames: a 16-byte header `<4sIII` (magic, payload bytes, CRC-32 of the payload, CRC-32 of the
header before it) and the payload (trajectories/codec.py). A file that ends inside a frame has a torn tail: the writer
died, or is still writing. Anything else that does not check out is CorruptFrame. `append` hands the frame to the
operating system at once, so `kill -9` loses nothing; what a power failure may lose is bounded by `fsync_every_s`.
"""

import fcntl
import logging
import os
import re
import struct
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

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
from trajectories.handle import Location
from trajectories.samples import Sample
from trajectories.schema import Group

logger = logging.getLogger(__name__)

SUFFIX = ".seg"
MAGIC = b"TRJ1"
HEADER = struct.Struct("<4sIII")
_CHECKED = struct.Struct("<4sII")
_MAX_PAYLOAD = 2**32 - 1


class StoreError(Exception):
    """Base of what may be wrong with a store; the message names the segment and the remedy."""


class CorruptFrame(StoreError):
    """A frame does not match its checksum."""

    def __init__(self, segment: Path, offset: int, what: str) -> None:
        super().__init__(
            f"{segment}: corrupt frame at byte {offset}: {what}. "
            f"Restore the segment from a copy, or keep what precedes it: truncate -s {offset} {segment}"
        )
        self.segment = segment
        self.offset = offset


class SegmentInUse(StoreError):
    """Another writer holds the segment."""


class NoSuchFrame(StoreError):
    """The store holds no such frame: the Location belongs to another store, or the segment was removed or cut."""


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
            _fsync_directory(directory)
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
        frame = memoryview(_header(payload) + payload)
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
    return decode_group(_read_frame(directory, location))


def read_sample(directory: Path, location: Location) -> Sample:
    """The Sample at `location`; NoSuchFrame or CorruptFrame when it is not there whole."""
    return decode_sample(_read_frame(directory, location))


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
            for location, payload in _frames(file, path, start):
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
            yield from _frames(file, path)


def _frames(file: BinaryIO, path: Path, offset: int = 0) -> Iterator[tuple[Location, bytes]]:
    """The whole frames of a segment from `offset` on, where one starts; ends at its end or at a torn tail."""
    file.seek(offset)
    while header := file.read(HEADER.size):
        length = _payload_length(header, path, offset) if len(header) == HEADER.size else None
        payload = b"" if length is None else file.read(length)
        if length is None or len(payload) < length:
            _check_torn(header, file, path, offset)
            return
        _check_payload(header, payload, path, offset)
        yield Location(segment=path.name, offset=offset, length=HEADER.size + length), payload
        offset += HEADER.size + length


def _check_torn(header: bytes, file: BinaryIO, path: Path, offset: int) -> None:
    """Returns for a torn tail: the start of a frame, or zeros (a crash grew the file before its data came)."""
    if header.startswith(MAGIC) or MAGIC.startswith(header[: len(MAGIC)]):
        return
    if any(header) or any(any(block) for block in iter(lambda: file.read(1 << 20), b"")):
        raise CorruptFrame(path, offset, "no frame starts here")


def _payload_length(header: bytes, path: Path, offset: int) -> int | None:
    """Bytes of the payload; None for a header of zeros."""
    if not any(header):
        return None
    magic, length, _, header_crc = HEADER.unpack(header)
    if magic != MAGIC:
        raise CorruptFrame(path, offset, "no frame starts here")
    if zlib.crc32(header[: _CHECKED.size]) != header_crc:
        raise CorruptFrame(path, offset, "the header does not match its checksum")
    return length


def _check_payload(header: bytes, payload: bytes, path: Path, offset: int) -> None:
    if zlib.crc32(payload) != HEADER.unpack(header)[2]:
        raise CorruptFrame(path, offset, "the payload does not match its checksum")


def _read_frame(directory: Path, location: Location) -> bytes:
    path = directory / location.segment
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        raise NoSuchFrame(f"{path}: no such segment in this store") from None
    try:
        frame = os.pread(fd, location.length, location.offset)
    finally:
        os.close(fd)
    if len(frame) < location.length or len(frame) < HEADER.size:
        raise NoSuchFrame(f"{path}: no frame of {location.length} bytes at byte {location.offset}; the file is shorter")
    header, payload = frame[: HEADER.size], frame[HEADER.size :]
    if _payload_length(header, path, location.offset) != len(payload):
        raise NoSuchFrame(f"{path}: the frame at byte {location.offset} is not {location.length} bytes long")
    _check_payload(header, payload, path, location.offset)
    return payload


def _header(payload: bytes) -> bytes:
    if len(payload) > _MAX_PAYLOAD:
        raise ValueError(f"a record must be under 4 GiB, got {len(payload)} bytes")
    checked = _CHECKED.pack(MAGIC, len(payload), zlib.crc32(payload))
    return checked + struct.pack("<I", zlib.crc32(checked))


def _lock(fd: int, path: Path) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise SegmentInUse(f"{path}: another writer holds this segment; give each writer its own name") from None


def _cut_torn_tail(fd: int, path: Path) -> tuple[int, int]:
    """The end of the last whole frame and the bytes cut after it."""
    end = 0
    with open(path, "rb") as file:
        for location, _ in _frames(file, path):
            end = location.offset + location.length
    cut = os.fstat(fd).st_size - end
    if cut:
        os.ftruncate(fd, end)
        os.fsync(fd)
        logger.warning("segment=%s torn tail cut: %d bytes after byte %d", path, cut, end)
    return end, cut


def _fsync_directory(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
