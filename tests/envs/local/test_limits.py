"""The system-call filter as the kernel would run it, and control groups of both versions on plain directories."""

import errno
import struct
from pathlib import Path

import pytest

from envs.errors import SandboxError, SandboxRefused
from envs.local.cgroups import BoxLimits, Cgroups, SlotCgroup
from envs.local.labels import make_label
from envs.local.seccomp import seccomp_filter

ALLOW, KILL = 0x7FFF0000, 0x80000000
X86, ARM = 0xC000003E, 0xC00000B7


def run_filter(program: bytes, arch: int, number: int, arg0: int = 0) -> int:
    """What the filter returns for this call: an interpreter of the four kinds of instruction it uses."""
    data = {0: number, 4: arch, 16: arg0 & 0xFFFFFFFF}
    accumulator, at = 0, 0
    while True:
        code, then, otherwise, value = struct.unpack_from("=HBBI", program, at * 8)
        at += 1
        if code == 0x06:
            return value
        if code == 0x20:
            accumulator = data[value]
            continue
        is_true = {0x15: accumulator == value, 0x35: accumulator >= value, 0x45: bool(accumulator & value)}[code]
        at += then if is_true else otherwise


def denied(number: int) -> int:
    return 0x50000 | number


@pytest.mark.parametrize(
    ("number", "arg0", "answer"),
    [
        (0, 3, ALLOW),  # read
        (59, 0, ALLOW),  # execve
        (56, 17, ALLOW),  # clone as fork
        (56, 0x01200011, ALLOW),  # clone as libc's fork
        (56, 0x10000011, denied(errno.EPERM)),  # CLONE_NEWUSER
        (56, 0x00020000, denied(errno.EPERM)),  # CLONE_NEWNS
        (56, 0x00000080, denied(errno.EPERM)),  # CLONE_NEWTIME
        (435, 0, denied(errno.ENOSYS)),  # clone3
        (165, 0, denied(errno.EPERM)),  # mount
        (425, 0, denied(errno.EPERM)),  # io_uring_setup
        (41, 1, ALLOW),  # socket AF_UNIX
        (41, 2, ALLOW),  # AF_INET
        (41, 16, ALLOW),  # AF_NETLINK
        (41, 40, denied(errno.EAFNOSUPPORT)),  # AF_VSOCK
        (302, 0, ALLOW),  # prlimit64 of itself
        (302, 1, denied(errno.EPERM)),  # prlimit64 of the agent
        (1000, 0, denied(errno.ENOSYS)),
        (0x40000027, 0, denied(errno.ENOSYS)),  # x32
    ],
)
def test_the_filter_answers(number: int, arg0: int, answer: int) -> None:
    assert run_filter(seccomp_filter("x86_64"), X86, number, arg0) == answer


def test_a_call_of_another_architecture_kills() -> None:
    assert run_filter(seccomp_filter("x86_64"), 0x40000003, 20) == KILL
    assert run_filter(seccomp_filter("aarch64"), X86, 20) == KILL
    assert run_filter(seccomp_filter("aarch64"), ARM, 40) == denied(errno.EPERM)  # mount
    assert run_filter(seccomp_filter("aarch64"), ARM, 63, 3) == ALLOW  # read


def test_a_machine_without_a_table_is_refused() -> None:
    with pytest.raises(SandboxRefused, match="riscv64"):
        seccomp_filter("riscv64")


def make_groups(root: Path, *, is_v2: bool) -> SlotCgroup:
    names = dict.fromkeys(("memory", "pids", "cpu"), "one") if is_v2 else {c: c for c in ("memory", "pids", "cpu")}
    cgroups = Cgroups(parents={c: root / name for c, name in names.items()}, is_v2=is_v2)
    for parent in set(cgroups.parents.values()):
        parent.mkdir()
    group = cgroups.create(make_label(7))
    files = ("memory.limit_in_bytes", "pids.max", "cpu.cfs_quota_us", "memory.max", "memory.swap.max", "cpu.max")
    for directory in group.unique_directories:
        for name in files:
            (directory / name).write_text("")
    return group


LIMITS = BoxLimits(memory_bytes=1 << 20, pids=9, cpus=1.5)


def test_limits_are_written_as_version_2_wants_them(tmp_path: Path) -> None:
    group = make_groups(tmp_path, is_v2=True)
    group.set_limits(LIMITS)
    (directory,) = group.unique_directories
    values = {n: (directory / n).read_text() for n in ("memory.max", "memory.swap.max", "pids.max", "cpu.max")}
    assert values == {"memory.max": "1048576", "memory.swap.max": "0", "pids.max": "9", "cpu.max": "150000 100000"}
    (directory / "memory.events").write_text("low 0\nmax 5\noom 1\noom_kill 2\n")
    assert group.oom_kills() == (5, 2)


def test_limits_are_written_as_version_1_wants_them(tmp_path: Path) -> None:
    group = make_groups(tmp_path, is_v2=False)
    group.set_limits(LIMITS)
    assert (group.directories["memory"] / "memory.limit_in_bytes").read_text() == "1048576"
    assert (group.directories["pids"] / "pids.max").read_text() == "9"
    assert (group.directories["cpu"] / "cpu.cfs_quota_us").read_text() == "150000"
    (group.directories["memory"] / "memory.failcnt").write_text("3\n")
    (group.directories["memory"] / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 4\n")
    assert group.oom_kills() == (3, 4)
    assert len(group.procs_files) == 3


def test_a_sweep_takes_what_the_dead_left_and_nothing_else(tmp_path: Path) -> None:
    cgroups = Cgroups(parents=dict.fromkeys(("memory", "pids", "cpu"), tmp_path), is_v2=True)
    mine, dead = tmp_path / make_label(1), tmp_path / "thresher-1-12345-3"
    unrelated, reused = tmp_path / "other", tmp_path / f"{make_label(1).rsplit('-', 2)[0]}-99-2"
    for directory in (mine, dead, unrelated, reused):
        directory.mkdir()
    assert cgroups.sweep() == 2
    assert {p.name for p in tmp_path.iterdir()} == {mine.name, unrelated.name}


def test_a_group_that_cannot_be_made_is_an_error_that_says_why(tmp_path: Path) -> None:
    cgroups = Cgroups(parents=dict.fromkeys(("memory", "pids", "cpu"), tmp_path / "none"), is_v2=True)
    with pytest.raises(SandboxError, match=r"create cgroup x: .*No such file"):
        cgroups.create("x")
