"""Frames: how records lie in a file, so that damage is seen and a torn tail is told from damage.

Invariant: a payload is given out only when its checksum, and that of its header, are right.
Called by trajectories/store.py.

A frame is a 16-byte header `<4sIII` (magic, payload bytes, CRC-32 of the payload, CRC-32 of the header before it) and
the payload. A file that ends inside a frame has a torn tail: the writer died, or is still writing. Anything else that
does not check out is CorruptFrame.
"""

import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from trajectories.handle import Location

_MAGIC = b"TRJ1"
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


class NoSuchFrame(StoreError):
    """The store holds no such frame: the Location belongs to another store, or the segment was removed or cut."""


def framed(payload: bytes) -> bytes:
    """The payload with its header before it. ValueError for one of 4 GiB or more."""
    if len(payload) > _MAX_PAYLOAD:
        raise ValueError(f"a record must be under 4 GiB, got {len(payload)} bytes")
    checked = _CHECKED.pack(_MAGIC, len(payload), zlib.crc32(payload))
    return checked + struct.pack("<I", zlib.crc32(checked)) + payload


def frames(file: BinaryIO, path: Path, offset: int = 0) -> Iterator[tuple[Location, bytes]]:
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


def read_frame(directory: Path, location: Location) -> bytes:
    """The payload of the frame at `location`; NoSuchFrame or CorruptFrame when it is not there whole."""
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


def _check_torn(header: bytes, file: BinaryIO, path: Path, offset: int) -> None:
    """Returns for a torn tail: the start of a frame, or zeros (a crash grew the file before its data came)."""
    if header.startswith(_MAGIC) or _MAGIC.startswith(header[: len(_MAGIC)]):
        return
    if any(header) or any(any(block) for block in iter(lambda: file.read(1 << 20), b"")):
        raise CorruptFrame(path, offset, "no frame starts here")


def _payload_length(header: bytes, path: Path, offset: int) -> int | None:
    """Bytes of the payload; None for a header of zeros."""
    if not any(header):
        return None
    magic, length, _, header_crc = HEADER.unpack(header)
    if magic != _MAGIC:
        raise CorruptFrame(path, offset, "no frame starts here")
    if zlib.crc32(header[: _CHECKED.size]) != header_crc:
        raise CorruptFrame(path, offset, "the header does not match its checksum")
    return length


def _check_payload(header: bytes, payload: bytes, path: Path, offset: int) -> None:
    if zlib.crc32(payload) != HEADER.unpack(header)[2]:
        raise CorruptFrame(path, offset, "the payload does not match its checksum")
