"""Control groups that bound a box's memory, processes and CPU time; cgroup v1 and v2.

Invariant: every directory made here is named by its driver's label, so any later driver can sweep what a killed one
left. Called by envs/local/slots.py and envs/local/provider.py.
"""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from envs.errors import SandboxError, SandboxRefused
from envs.local.labels import PREFIX, is_orphan, make_label

_CONTROLLERS = ("memory", "pids", "cpu")
_CPU_PERIOD_US = 100_000
_REMEDY = "run as root or in a delegated cgroup (cgroup_parent), or opt in to rlimits with allow_soft_limits"


@dataclass(frozen=True, slots=True, kw_only=True)
class BoxLimits:
    """What a box may use at most."""

    memory_bytes: int
    """Processes, page cache and files of the box together: its tmpfs counts as memory."""
    pids: int
    cpus: float
    """0 is unlimited."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cgroups:
    """Where this driver makes its control groups."""

    parents: Mapping[str, Path]
    """A directory for each controller; one and the same under cgroup v2."""
    is_v2: bool

    def create(self, name: str) -> "SlotCgroup":
        """New, empty groups of that name. Raises SandboxError."""
        group = SlotCgroup(directories={c: parent / name for c, parent in self.parents.items()}, is_v2=self.is_v2)
        try:
            for directory in group.unique_directories:
                directory.mkdir()
        except OSError as error:
            group.remove_now()
            raise SandboxError(f"create cgroup {name}: {error}") from error
        return group

    def sweep(self) -> int:
        """Ends and removes what dead drivers left; returns how many groups that were. Blocks for 2 s at most."""
        names = {d.name for p in self.parents.values() for d in p.glob(f"{PREFIX}*") if is_orphan(d.name)}
        deadline = time.monotonic() + 2
        for name in names:
            group = SlotCgroup(directories={c: parent / name for c, parent in self.parents.items()}, is_v2=self.is_v2)
            while not group.remove_now() and time.monotonic() < deadline:
                group.kill()
                time.sleep(0.002)
        return len(names)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotCgroup:
    """The groups of one slot, one directory a controller."""

    directories: Mapping[str, Path]
    is_v2: bool

    @property
    def unique_directories(self) -> list[Path]:
        """One for each hierarchy."""
        return list(dict.fromkeys(self.directories.values()))

    @property
    def procs_files(self) -> list[Path]:
        """A process that writes "0" to each of these is in."""
        return [directory / "cgroup.procs" for directory in self.unique_directories]

    def set_limits(self, limits: BoxLimits) -> None:
        """Raises SandboxError when one cannot be set."""
        memory, pids, cpu = (self.directories[c] for c in _CONTROLLERS)
        quota = int(limits.cpus * _CPU_PERIOD_US)
        try:
            _write(pids / "pids.max", limits.pids)
            if self.is_v2:
                _write(memory / "memory.max", limits.memory_bytes)
                _write_if_there(memory / "memory.swap.max", 0)
                _write(cpu / "cpu.max", f"{quota or 'max'} {_CPU_PERIOD_US}")
            else:
                _write(memory / "memory.limit_in_bytes", limits.memory_bytes)
                _write_if_there(memory / "memory.swappiness", 0)
                _write(cpu / "cpu.cfs_quota_us", quota or -1)
        except OSError as error:
            raise SandboxError(f"set limits of cgroup {memory.name}: {error}") from error

    def oom_kills(self) -> tuple[int, int]:
        """How often the memory limit was hit, and how many processes were killed for memory, so far."""
        memory = self.directories["memory"]
        try:
            if self.is_v2:
                events = _flat(memory / "memory.events")
                return events.get("max", 0), events.get("oom_kill", 0)
            hits = int((memory / "memory.failcnt").read_text())
            return hits, _flat(memory / "memory.oom_control").get("oom_kill", 0)
        except OSError:
            return 0, 0  # removed from outside: no evidence

    def kill(self) -> None:
        """SIGKILL to every process inside."""
        for path in self.procs_files:
            with contextlib.suppress(OSError):
                for line in path.read_text().split():
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.kill(int(line), signal.SIGKILL)

    def remove_now(self) -> bool:
        """Whether no directory is left; one with a process inside stays."""
        for directory in self.unique_directories:
            with contextlib.suppress(OSError):
                directory.rmdir()
        return not any(directory.exists() for directory in self.unique_directories)

    async def remove(self, *, deadline_s: float = 5.0) -> None:
        """Kills what is inside and removes the directories. Raises SandboxError when one stays past the deadline."""
        waited_s, pause_s = 0.0, 0.001
        while not self.remove_now():
            if waited_s > deadline_s:
                name = self.unique_directories[0].name
                raise SandboxError(f"remove cgroup {name}: still in use after {deadline_s} s")
            self.kill()
            await asyncio.sleep(pause_s)
            waited_s, pause_s = waited_s + pause_s, min(2 * pause_s, 0.1)


def find_cgroups(parent: Path | None = None) -> Cgroups:
    """The groups this process may make, proven by making one. Raises SandboxRefused with step, errno and remedy."""
    mounts = _mounts()
    paths = _own_paths()
    if "memory" in mounts:
        cgroups = Cgroups(parents={c: _v1_parent(c, mounts, paths) for c in _CONTROLLERS}, is_v2=False)
    elif "" in mounts:
        chosen = parent or mounts[""] / paths.get("", "/").lstrip("/")
        _enable_v2(chosen)
        cgroups = Cgroups(parents=dict.fromkeys(_CONTROLLERS, chosen), is_v2=True)
    else:
        raise SandboxRefused(f"find cgroups: ENOENT: no cgroup file system with memory; {_REMEDY}")
    _prove(cgroups)
    return cgroups


def _prove(cgroups: Cgroups) -> None:
    try:
        group = cgroups.create(f"{make_label(0)}-probe")
        try:
            group.set_limits(BoxLimits(memory_bytes=1 << 28, pids=64, cpus=1.0))
            for path in group.procs_files:
                if not os.access(path, os.W_OK):
                    raise SandboxError(f"enter cgroup: {path} is not writable")
        finally:
            group.remove_now()
    except SandboxError as error:
        raise SandboxRefused(f"{error}; {_REMEDY}") from error


def _v1_parent(controller: str, mounts: Mapping[str, Path], paths: Mapping[str, str]) -> Path:
    if controller not in mounts:
        raise SandboxRefused(f"find cgroups: ENOENT: no {controller} controller; {_REMEDY}")
    own = mounts[controller] / paths.get(controller, "/").lstrip("/")
    return own if own.is_dir() else mounts[controller]  # in a container the path is the host's, the mount is its own


def _enable_v2(parent: Path) -> None:
    wanted = " ".join(f"+{c}" for c in _CONTROLLERS)
    try:
        enabled = (parent / "cgroup.subtree_control").read_text().split()
        if not set(_CONTROLLERS) <= set(enabled):
            _write(parent / "cgroup.subtree_control", wanted)
    except OSError as error:
        raise SandboxRefused(f"enable {wanted} in {parent}: {error.strerror} ({error.errno}); {_REMEDY}") from error


def _mounts() -> dict[str, Path]:
    """Mount point by controller; "" is cgroup v2."""
    found: dict[str, Path] = {}
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, after = line.split(" - ")
        kind, _, options = after.split(" ")[:3]
        if kind == "cgroup2":
            found.setdefault("", Path(before.split(" ")[4]))
        elif kind == "cgroup":
            for option in options.split(","):
                found.setdefault(option, Path(before.split(" ")[4]))
    return found


def _own_paths() -> dict[str, str]:
    paths: dict[str, str] = {}
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        paths |= dict.fromkeys(controllers.split(","), path)
    return paths


def _flat(path: Path) -> dict[str, int]:
    return {key: int(value) for key, value in (line.split() for line in path.read_text().splitlines())}


def _write(path: Path, value: int | str) -> None:
    fd = os.open(path, os.O_WRONLY)
    try:
        os.write(fd, str(value).encode())
    finally:
        os.close(fd)


def _write_if_there(path: Path, value: int) -> None:
    with contextlib.suppress(FileNotFoundError):
        _write(path, value)
