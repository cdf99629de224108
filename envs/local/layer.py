"""The files of a box, taken out of it as they are and told as the PUT entries that make them again.

Invariant: only what the box itself holds comes out, none of its mounts; what no entry can make is refused by name. The
archive is the box's word: a path in it only ever names a place in another box. Called by envs/local/prepared.py.
"""

import os
import struct
import tarfile
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import IO

from envs.errors import SandboxError, SandboxRefused
from envs.local.layout import MAX_PUT_BYTES, mount_points
from envs.local.sandbox import LocalSandbox
from envs.local.wire import Kind, encode_put

_ARCHIVE = "/.layer"
_PACK_LIMIT_S = 600.0
_CHUNK_BYTES = 1 << 20
_PACK = (
    f"/usr/bin/tar -C / -cf {_ARCHIVE} --one-file-system --exclude=.{_ARCHIVE} . ./etc && "
    f"/usr/bin/stat -c %s {_ARCHIVE}"
)
_READ = f"/usr/bin/dd if={_ARCHIVE} bs={_CHUNK_BYTES} count={_CHUNK_BYTES} iflag=skip_bytes,count_bytes status=none"
_SECONDS = struct.Struct("=q")


async def download_files(sandbox: LocalSandbox, archive: IO[bytes]) -> None:
    """Writes a tar of the box's files. The box needs as much room again as they take. Raises SandboxRefused when
    they cannot be packed, and SandboxError.
    """
    await sandbox.kill_all()
    packed = await sandbox.exec(_PACK, timeout_s=_PACK_LIMIT_S, cwd="/")
    if packed.exit_code:
        said = packed.stderr.decode(errors="replace").strip()[-300:]
        raise SandboxRefused(f"keep what RUN made: {said or packed.exit_code}; make fewer or readable files")
    size = int(packed.stdout)
    while archive.tell() < size:  # the provider may keep less of an output than was asked for
        read = await sandbox.exec(f"{_READ} skip={archive.tell()}", timeout_s=_PACK_LIMIT_S, cwd="/")
        if read.exit_code or not read.stdout:
            said = read.stderr.decode(errors="replace").strip()[-300:] or f"dd ended with {read.exit_code}"
            raise SandboxError(f"read what RUN made: {archive.tell()} of {size} bytes came, then {said}")
        archive.write(read.stdout)
    archive.seek(0)


def layer_entries(archive: IO[bytes], mounts: tuple[str, ...]) -> Iterator[bytes]:
    """PUT entries that make the files of the archive. Raises SandboxRefused."""
    outside = mount_points(mounts)
    closed: list[tuple[str, int]] = []  # directories that cannot be written to: closed again when they are full
    try:
        with tarfile.open(fileobj=archive, mode="r:") as tar:
            for member in tar:
                path = os.path.normpath(f"/{member.name}")
                if path == "/" or path in outside or any(str(p) in outside for p in PurePosixPath(path).parents):
                    continue
                if member.isdir() and member.mode & 0o700 != 0o700:
                    closed.append((path, member.mode))
                yield from _member_entries(tar, member, path)
    except (tarfile.TarError, ValueError, EOFError) as error:
        raise SandboxRefused(f"keep what RUN made: {error}; use plain files, directories and links") from error
    for path, mode in sorted(closed, reverse=True):
        yield encode_put(Kind.DIR, path, mode=mode)


def _member_entries(tar: tarfile.TarFile, member: tarfile.TarInfo, path: str) -> Iterator[bytes]:
    if member.isdir():
        yield encode_put(Kind.DIR, path, mode=member.mode | 0o700)
    elif member.issym():
        yield encode_put(Kind.LINK, path, member.linkname.encode("utf-8", "surrogateescape"))
    elif member.isfile() or member.islnk():
        file = tar.extractfile(member)  # of a hard link the file it is a link to
        assert file is not None
        yield encode_put(Kind.FILE, path, file.read(MAX_PUT_BYTES), mode=member.mode)
        while piece := file.read(MAX_PUT_BYTES):
            yield encode_put(Kind.APPEND, path, piece, mode=member.mode)
        yield encode_put(Kind.TIME, path, _SECONDS.pack(int(member.mtime)))
    else:
        raise SandboxRefused(f"keep what RUN made: {path} is no plain file, directory or link; remove it in a RUN")
