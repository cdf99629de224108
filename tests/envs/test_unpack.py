"""Archives of tasks: reproducible when packed, harmless when unpacked, whoever made them."""

import bz2
import gzip
import io
import lzma
import os
import tarfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envs.errors import TaskError
from envs.unpack import UnpackLimits, pack, unpack
from tests.envs.task_dirs import make_task_dir

SMALL = UnpackLimits(max_bytes=20_000, max_members=5)


def member(name: str, data: bytes = b"x", **fields: object) -> tuple[tarfile.TarInfo, bytes]:
    """A member of an archive, a plain file unless `type` says otherwise."""
    info = tarfile.TarInfo(name)
    info.size = len(data)
    for key, value in fields.items():
        setattr(info, key, value)
    return info, data


def archive(*members: tuple[tarfile.TarInfo, bytes]) -> bytes:
    """A plain tar of these members."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for info, data in members:
            tar.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def everything_under(root: Path) -> dict[str, bytes | None]:
    """Relative path to content, None for a directory."""
    paths = sorted(root.rglob("*"))
    return {path.relative_to(root).as_posix(): path.read_bytes() if path.is_file() else None for path in paths}


LINK = {"type": tarfile.SYMTYPE, "linkname": "/etc/passwd", "size": 0}
ATTACKS = {
    "absolute path": [member("/etc/cron.d/x")],
    "parent path": [member("../x")],
    "parent path within": [member("a/../../x")],
    "parent directory": [member("a/..", type=tarfile.DIRTYPE, size=0)],
    "backslashes": [member("..\\x")],
    "symbolic link": [member("link", b"", **LINK)],
    "file through a link": [member("link", b"", **LINK | {"linkname": ".."}), member("link/x")],
    "hard link": [member("a"), member("b", b"", type=tarfile.LNKTYPE, linkname="../../x", size=0)],
    "character device": [member("dev", b"", type=tarfile.CHRTYPE, devmajor=1, devminor=3, size=0)],
    "block device": [member("dev", b"", type=tarfile.BLKTYPE, size=0)],
    "pipe": [member("pipe", b"", type=tarfile.FIFOTYPE, size=0)],
    "unknown type": [member("x", type=b"Z")],
    "sparse file": [member("x", b"", type=tarfile.GNUTYPE_SPARSE, size=0)],
    "file twice": [member("a", b"1"), member("./a", b"2")],
    "file and directory": [member("a"), member("a/b")],
    "directory and file": [member("a/b"), member("a")],
    "file without a name": [member("./")],
    "long name": [member("a" * 300)],
    "deep path": [member("a/" * 40 + "x")],
    "too many members": [member(str(index)) for index in range(6)],
    "too many bytes": [member("a", b"x" * 15_000), member("b", b"x" * 15_000)],
}


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_is_refused_in_one_line_with_nothing_written(tmp_path: Path, name: str) -> None:
    with pytest.raises(TaskError) as caught:
        unpack(gzip.compress(archive(*ATTACKS[name])), tmp_path / "box" / "task", limits=SMALL)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ATTACKS)
def test_what_pythons_data_filter_refuses_is_refused_here(tmp_path: Path, name: str) -> None:
    for info, _ in ATTACKS[name]:
        try:
            tarfile.data_filter(info, str(tmp_path))
        except tarfile.FilterError:
            with pytest.raises(TaskError):
                unpack(archive(member("first"), (info, b"x" * info.size)), tmp_path / "task")


@pytest.mark.parametrize("compress", [gzip.compress, bz2.compress, lzma.compress])
def test_a_bomb_is_refused_before_it_fills_memory(tmp_path: Path, compress) -> None:
    bomb = compress(archive(member("zeros", bytes(10_000_000))))
    assert len(bomb) < 20_000
    with pytest.raises(TaskError, match="unpacks to more than 20000 bytes"):
        unpack(bomb, tmp_path / "task", limits=SMALL)


def test_a_header_that_claims_a_huge_file_is_refused(tmp_path: Path) -> None:
    info, _ = member("big")
    info.size = 1 << 40
    with pytest.raises(TaskError, match="claim more than"):
        unpack(info.tobuf() + bytes(1024), tmp_path / "task", limits=SMALL)
    info.size = 10_000
    with pytest.raises(TaskError, match="unexpected end of data"):
        unpack(info.tobuf() + bytes(1024), tmp_path / "task", limits=SMALL)


@given(st.binary(max_size=600), st.sampled_from([b"", b"\x1f\x8b\x08\x00", b"BZh9", b"\xfd7zXZ\x00"]))
def test_any_bytes_unpack_or_get_one_line(tmp_path_factory: pytest.TempPathFactory, data: bytes, magic: bytes) -> None:
    target = tmp_path_factory.getbasetemp() / "any" / os.urandom(8).hex()
    try:
        unpack(magic + data, target)
    except TaskError as error:
        assert "\n" not in str(error)


@given(st.integers(0, 3000), st.integers(0, 255))
def test_a_damaged_package_unpacks_or_gets_one_line(tmp_path_factory, at: int, byte: int) -> None:
    data = bytearray(PACKED)
    data[at % len(data)] = byte
    target = tmp_path_factory.getbasetemp() / "damaged" / os.urandom(8).hex()
    try:
        unpack(bytes(data), target)
    except TaskError as error:
        assert "\n" not in str(error)


PACKED = archive(member("task.toml", b""), member("tests/test.sh", b"echo 1\n", mode=0o755), member("empty/a"))


def test_setuid_and_write_bits_do_not_survive(tmp_path: Path) -> None:
    unpack(archive(member("run", mode=0o6777), member("data", mode=0o666)), tmp_path / "task")
    assert (tmp_path / "task" / "run").stat().st_mode & 0o7022 == 0
    assert (tmp_path / "task" / "run").stat().st_mode & 0o100
    assert not (tmp_path / "task" / "data").stat().st_mode & 0o111


@pytest.mark.parametrize("compress", [bytes, gzip.compress, bz2.compress, lzma.compress])
def test_any_tar_is_read_whatever_packed_it(tmp_path: Path, compress) -> None:
    root = member("./", b"", type=tarfile.DIRTYPE, size=0)
    snapshot = member("tests/.snapshot/old/test.sh")
    unpack(compress(archive(root, member("./tests/test.sh", b"echo 1\n"), snapshot)), tmp_path / "task")
    assert everything_under(tmp_path / "task") == {"tests": None, "tests/test.sh": b"echo 1\n"}


def test_a_packed_directory_comes_back_as_it_was(tmp_path: Path) -> None:
    source = make_task_dir(tmp_path)
    (source / "tests" / "test.sh").chmod(0o755)
    (source / "environment" / "data.bin").write_bytes(bytes(range(256)))
    unpack(pack(source), tmp_path / "again")
    assert everything_under(tmp_path / "again") == everything_under(source)
    assert (tmp_path / "again" / "tests" / "test.sh").stat().st_mode & 0o777 == 0o755
    assert (tmp_path / "again" / "task.toml").stat().st_mode & 0o777 == 0o644


def test_the_same_files_give_the_same_bytes(tmp_path: Path) -> None:
    first, second = (make_task_dir(tmp_path / name) for name in ("one", "two"))
    os.utime(first / "task.toml", (1, 1))
    assert pack(first) == pack(second)


def test_a_directory_with_a_link_is_not_packed(tmp_path: Path) -> None:
    source = make_task_dir(tmp_path)
    (source / "solution" / "passwd").symlink_to("/etc/passwd")
    with pytest.raises(TaskError, match="solution/passwd is a link"):
        pack(source)
