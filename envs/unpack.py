"""Task directories as tar archives: packed reproducibly, unpacked as if the archive came from an attacker.

Invariant: unpacking writes plain files and directories under its target and nothing else anywhere, and never more than
the limits say; an archive that asks for more is refused before its first byte is written.
Called by envs/packages.py, envs/artifacts.py and recipes/tasks.py.
"""

import bz2
import gzip
import io
import lzma
import os
import stat
import tarfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from envs.errors import TaskError

_OPENERS: dict[bytes, Callable[[IO[bytes]], gzip.GzipFile | bz2.BZ2File | lzma.LZMAFile]] = {
    b"\x1f\x8b": lambda file: gzip.GzipFile(fileobj=file),
    b"BZh": bz2.BZ2File,
    b"\xfd7zXZ": lzma.LZMAFile,
}
_DAMAGE = (tarfile.TarError, zlib.error, lzma.LZMAError, EOFError, ValueError, OverflowError)
_SNAPSHOTS = ".snapshot"  # of network file systems; archives made there hold them by accident, and readers skip them


@dataclass(frozen=True, slots=True, kw_only=True)
class UnpackLimits:
    """What one archive may come to."""

    max_bytes: int = 256 << 20
    """Of the tar once decompressed, so a bomb of any kind ends here: the most memory that unpacking takes."""
    max_members: int = 10_000
    max_path_bytes: int = 1024
    max_depth: int = 32


def pack(directory: Path) -> bytes:
    """The directory's content as tar.gz, empty directories included; the same files give the same bytes.

    Of modes only the owner's execute bit is kept. Raises TaskError for a link or anything but files and directories.
    """
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for path in _walk(directory):
            member = tarfile.TarInfo(path.relative_to(directory).as_posix())
            if path.is_dir():
                member.type, member.mode = tarfile.DIRTYPE, 0o755
                tar.addfile(member)
                continue
            data = path.read_bytes()
            member.size, member.mode = len(data), 0o755 if path.stat().st_mode & stat.S_IXUSR else 0o644
            tar.addfile(member, io.BytesIO(data))
    return gzip.compress(buffer.getvalue(), compresslevel=6, mtime=0)


def unpack(data: bytes, target: Path, *, limits: UnpackLimits | None = None) -> None:
    """Writes the archive's files under `target`, which must not exist yet: plain tar, or tar of gzip, bzip2 or xz.

    Modes come out as the owner's execute bit alone. Raises TaskError, one line, with nothing written.
    """
    limits = limits or UnpackLimits()
    try:
        raw = _decompress(data, limits)
        with tarfile.open(fileobj=io.BytesIO(raw), mode="r:") as tar:
            entries = list(_checked(tar, limits))
    except TaskError:
        raise
    except _DAMAGE as error:
        raise TaskError(f"not a readable tar archive ({' '.join(str(error).split())}); pack it again") from None
    assert all(entry.end <= len(raw) for entry in entries)  # tarfile looks for the last byte of each member
    _write(entries, memoryview(raw), str(target))


@dataclass(frozen=True, slots=True)
class _Entry:
    """A directory or file to write."""

    parts: tuple[str, ...]
    is_dir: bool
    mode: int
    start: int
    end: int
    """Of a file: where its bytes lie in the tar."""


# Not TarFile.extractall: the entries are proven harmless, more strictly than tarfile's data filter does (the tests
# compare them), and its looks at the real path of each member took three quarters of the time.
def _write(entries: Iterable[_Entry], raw: memoryview, root: str) -> None:
    os.makedirs(root)
    made = set[tuple[str, ...]]([()])
    for entry in entries:
        for depth in range(1, len(entry.parts) + entry.is_dir):
            if entry.parts[:depth] not in made:
                made.add(entry.parts[:depth])
                os.mkdir("/".join((root, *entry.parts[:depth])))
        if not entry.is_dir:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
            fd = os.open("/".join((root, *entry.parts)), flags, 0o755 if entry.mode & stat.S_IXUSR else 0o644)
            with os.fdopen(fd, "wb", buffering=0) as file:
                file.write(raw[entry.start : entry.end])


def _decompress(data: bytes, limits: UnpackLimits) -> bytes:
    opener = next((opener for magic, opener in _OPENERS.items() if data.startswith(magic)), None)
    if opener is None:
        raw = data
    else:
        try:
            with opener(io.BytesIO(data)) as file:
                raw = file.read(limits.max_bytes + 1)
        except OSError as error:  # of bz2 and gzip, for damage
            raise TaskError(f"not a readable archive ({error}); pack it again") from None
    if len(raw) > limits.max_bytes:
        raise TaskError(f"unpacks to more than {limits.max_bytes} bytes; leave big files out of the task")
    return raw


def _checked(tar: tarfile.TarFile, limits: UnpackLimits) -> Iterator[_Entry]:
    """What to write, each proven harmless; raises TaskError for the first member that is not."""
    files: set[tuple[str, ...]] = set()
    dirs: set[tuple[str, ...]] = set()
    num_members = num_bytes = 0
    for member in tar:
        num_members, num_bytes = num_members + 1, num_bytes + member.size
        if num_members > limits.max_members:
            raise TaskError(f"holds more than {limits.max_members} members; leave some out of the task")
        if num_bytes > limits.max_bytes:
            raise TaskError(f"its members claim more than {limits.max_bytes} bytes; leave big files out of the task")
        parts, is_dir = _checked_parts(member, limits), member.isdir()
        if parts and _SNAPSHOTS not in parts:
            _refuse_overlap(member, parts, files, dirs)
            start = member.offset_data
            yield _Entry(parts, is_dir, member.mode, start, start if is_dir else start + member.size)


def _checked_parts(member: tarfile.TarInfo, limits: UnpackLimits) -> tuple[str, ...]:
    """The member's path; () for the archive's own root."""
    name = member.name
    parts = tuple(part for part in name.split("/") if part not in ("", "."))
    if name.startswith("/") or ".." in parts or "\0" in name or "\\" in name:
        raise TaskError(f"member {name!r} leaves the task directory; use relative paths without '..'")
    if member.issparse() or not (member.isdir() or member.isreg()):
        raise TaskError(f"member {name!r} is {_kind(member)}; tasks hold plain files and directories only")
    if not parts and not member.isdir():
        raise TaskError(f"member {name!r} is a file without a name; pack it again")
    is_long = len(os.fsencode(name)) > limits.max_path_bytes or any(len(os.fsencode(part)) > 255 for part in parts)
    if is_long or len(parts) > limits.max_depth:
        raise TaskError(f"member {name[:80]!r}... has too long or deep a path; shorten it")
    return parts


def _kind(member: tarfile.TarInfo) -> str:
    kinds = {tarfile.SYMTYPE: "a symbolic link", tarfile.LNKTYPE: "a hard link", tarfile.FIFOTYPE: "a pipe"}
    kinds |= {tarfile.CHRTYPE: "a device", tarfile.BLKTYPE: "a device"}
    return "a sparse file" if member.issparse() else kinds.get(member.type, f"of type {member.type!r}")


def _refuse_overlap(
    member: tarfile.TarInfo, parts: tuple[str, ...], files: set[tuple[str, ...]], dirs: set[tuple[str, ...]]
) -> None:
    """Refuses a file that comes twice, and one that is also a directory: which of them counts depends on the reader."""
    parents = [parts[:depth] for depth in range(1, len(parts))]
    if parts in files or (parts in dirs and not member.isdir()) or not files.isdisjoint(parents):
        raise TaskError(f"member {member.name!r} comes twice, or is both file and directory; pack it again")
    dirs.update(parents)
    (dirs if member.isdir() else files).add(parts)


def _walk(directory: Path) -> Iterator[Path]:
    """Everything below, parents first, each directory sorted."""
    for entry in sorted(os.scandir(directory), key=lambda entry: entry.name):
        if entry.is_symlink() or not (entry.is_dir() or entry.is_file()):
            raise TaskError(f"{entry.path} is a link or no plain file; put the file itself there")
        yield Path(entry.path)
        if entry.is_dir():
            yield from _walk(Path(entry.path))
