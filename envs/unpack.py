"""Task directories as tar archives: packed reproducibly, unpacked as if the archive came from an attacker.

Invariant: unpacking writes plain files and directories under its target and nothing else anywhere, and never more than
the limits say; an archive that asks for more is refused before its first byte is written.
Called by envs/packages.py.
"""

import bz2
import gzip
import io
import lzma
import os
import stat
import tarfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
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
        with tarfile.open(fileobj=io.BytesIO(_decompress(data, limits)), mode="r:") as tar:
            members = list(_checked(tar, limits))
            target.mkdir(parents=True)
            tar.extractall(target, members=members, filter="data")
    except TaskError:
        raise
    except (*_DAMAGE, gzip.BadGzipFile) as error:
        raise TaskError(f"not a readable tar archive ({' '.join(str(error).split())}); pack it again") from None


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


def _checked(tar: tarfile.TarFile, limits: UnpackLimits) -> Iterator[tarfile.TarInfo]:
    """The members to write, each proven harmless; raises TaskError for the first that is not."""
    files: set[PurePosixPath] = set()
    dirs: set[PurePosixPath] = set()
    num_members = num_bytes = 0
    for member in tar:
        num_members, num_bytes = num_members + 1, num_bytes + member.size
        if num_members > limits.max_members:
            raise TaskError(f"holds more than {limits.max_members} members; leave some out of the task")
        if num_bytes > limits.max_bytes:
            raise TaskError(f"its members claim more than {limits.max_bytes} bytes; leave big files out of the task")
        path = _checked_path(member, limits)
        if path.parts and _SNAPSHOTS not in path.parts:
            _refuse_overlap(member, path, files, dirs)
            yield member


def _checked_path(member: tarfile.TarInfo, limits: UnpackLimits) -> PurePosixPath:
    name, path = member.name, PurePosixPath(member.name)
    if path.is_absolute() or ".." in path.parts or "\0" in name or "\\" in name:
        raise TaskError(f"member {name!r} leaves the task directory; use relative paths without '..'")
    is_long = len(os.fsencode(name)) > limits.max_path_bytes or any(len(os.fsencode(p)) > 255 for p in path.parts)
    if is_long or len(path.parts) > limits.max_depth:
        raise TaskError(f"member {name[:80]!r}... has too long or deep a path; shorten it")
    if member.issparse() or not (member.isdir() or member.isreg()):
        raise TaskError(f"member {name!r} is {_kind(member)}; tasks hold plain files and directories only")
    return path


def _kind(member: tarfile.TarInfo) -> str:
    kinds = {tarfile.SYMTYPE: "a symbolic link", tarfile.LNKTYPE: "a hard link", tarfile.FIFOTYPE: "a pipe"}
    kinds |= {tarfile.CHRTYPE: "a device", tarfile.BLKTYPE: "a device"}
    return "a sparse file" if member.issparse() else kinds.get(member.type, f"of type {member.type!r}")


def _refuse_overlap(
    member: tarfile.TarInfo, path: PurePosixPath, files: set[PurePosixPath], dirs: set[PurePosixPath]
) -> None:
    """Refuses a file that comes twice, and one that is also a directory: which of them counts depends on the reader."""
    parents = set(path.parents) - {PurePosixPath(".")}
    if path in files or (not member.isdir() and path in dirs) or files & parents:
        raise TaskError(f"member {member.name!r} comes twice, or is both file and directory; pack it again")
    dirs |= parents
    (dirs if member.isdir() else files).add(path)


def _walk(directory: Path) -> Iterator[Path]:
    """Everything below, parents first, each directory sorted."""
    for entry in sorted(os.scandir(directory), key=lambda entry: entry.name):
        if entry.is_symlink() or not (entry.is_dir() or entry.is_file()):
            raise TaskError(f"{entry.path} is a link or no plain file; put the file itself there")
        yield Path(entry.path)
        if entry.is_dir():
            yield from _walk(Path(entry.path))
