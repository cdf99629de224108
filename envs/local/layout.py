"""What a box looks like from inside: its mounts, its first files, its variables.

Invariant: of a Task only environment/ goes in; tests/ and solution/ are never read here. All that can be written lies
in one tmpfs of limited size (and /dev/shm). Called by envs/local/{prepared,boxes,sandbox}.py.
"""

import functools
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from envs.errors import SandboxRefused
from envs.local.dockerfile import Copy, Dockerfile, MakeDir, Run, Step, parse_dockerfile
from envs.local.staging import Staged
from envs.local.wire import Kind, encode_put
from envs.task import Task
from envs.templating import resolve_variables

DEFAULT_WORKDIR = "/app"
MAX_PUT_BYTES = 1 << 20
"""Longest piece of a file in one message."""
_SHM_BYTES = 64 << 20
_ETC_BYTES = 16 << 20
_BOX_DIR = "/.thresher"

_VARIABLES = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": "/root",
    "USER": "root",
    "LOGNAME": "root",
    "SHELL": "/bin/bash",
    "LANG": "C.UTF-8",
    "TERM": "xterm-256color",
}
_DIRS = {
    "/etc": 0o755, "/tmp": 0o1777, "/run": 0o755,
    "/var/tmp": 0o1777, "/var/log": 0o755, "/var/lib": 0o755, "/var/cache": 0o755,
    "/root": 0o700, "/home": 0o755, "/opt": 0o755, "/srv": 0o755, "/mnt": 0o755, "/logs": 0o777,
    "/logs/agent": 0o777, "/logs/verifier": 0o777, "/logs/artifacts": 0o777,
}  # fmt: skip
# Bash has set its own default by the time it reads these; a PS1 of the environment differs from it and is kept.
_PROMPT = """[ "$PS1" = '\\s-\\v\\$ ' ] && PS1='$ '\n"""
_FILES = {
    "/etc/passwd": "root:x:0:0:root:/root:/bin/bash\nnobody:x:65534:65534:nobody:/:/usr/sbin/nologin\n",
    "/etc/group": "root:x:0:\ntty:x:5:\nnogroup:x:65534:\n",
    "/etc/hosts": "127.0.0.1 localhost sandbox\n::1 localhost\n",
    "/etc/hostname": "sandbox\n",
    "/etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
    "/etc/resolv.conf": "",
    "/etc/profile": _PROMPT,
    "/etc/bash.bashrc": _PROMPT,
    "/etc/shells": "/bin/sh\n/bin/bash\n",
}
_HOST_ROOTS = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_HOST_ETC = ("/etc/alternatives", "/etc/ld.so.cache")
"""Parts of /etc that programs of /usr are found and loaded by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How the commands of one Task's boxes start."""

    workdir: str
    env: dict[str, str]


BARE = Layout(workdir="/", env=_VARIABLES)
"""Of a box that is no Task's yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What one Task's boxes hold; nothing is read of its files yet."""

    layout: Layout
    steps: tuple[Step, ...]
    num_bytes: int
    """Of the files that are copied."""

    @property
    def has_run(self) -> bool:
        """Whether a box is needed to find out what the boxes hold."""
        return any(isinstance(step, Run) for step in self.steps)


def plan_layout(task: Task) -> Plan:
    """What the Task's boxes hold. Raises SandboxRefused for a Dockerfile that boxes cannot do."""
    path = task.path / "environment" / "Dockerfile"
    file = Dockerfile(workdir=DEFAULT_WORKDIR, env={}, steps=())
    if path.is_file():
        file = parse_dockerfile(path, workdir=DEFAULT_WORKDIR)
    workdir = task.environment.workdir or file.workdir
    if not workdir.startswith("/"):
        raise SandboxRefused(f"task {task.id}: workdir {workdir!r} must be an absolute path")
    sources = (source for step in file.steps if isinstance(step, Copy) for source in step.sources)
    return Plan(
        layout=Layout(workdir=workdir, env=_VARIABLES | file.env | resolve_variables(task.environment.env)),
        steps=(*file.steps, MakeDir(path=workdir)),
        num_bytes=sum(map(_num_bytes, sources)),
    )


def first_entries() -> Iterator[bytes]:
    """PUT entries of what every box holds."""
    for path, mode in _DIRS.items():
        yield encode_put(Kind.DIR, path, mode=mode)
    for path, text in _FILES.items():
        yield encode_put(Kind.FILE, path, text.encode(), mode=0o644)


def step_entries(step: MakeDir | Copy) -> Iterator[bytes]:
    """PUT entries of a step. As Docker's COPY: a directory's content, a file by its name into a directory, or to the
    name given.
    """
    if isinstance(step, MakeDir):
        yield encode_put(Kind.DIR, step.path)
        return
    for source in step.sources:
        if source.is_dir():
            yield from dir_entries(source, step.target)
        else:
            target = str(PurePosixPath(step.target) / source.name) if step.target_is_dir else step.target
            yield from file_entries(target, source.read_bytes(), stat.S_IMODE(source.stat().st_mode))


def run_environment(step: Run) -> dict[str, str]:
    """The variables of a step's command."""
    return _VARIABLES | step.env


def mount_points(mounts: tuple[str, ...]) -> frozenset[str]:
    """Paths inside that are no part of a box's own files."""
    read_only = ("/usr", *_HOST_ROOTS, *_HOST_ETC, "/etc/ld.so.preload", "/proc", "/dev", _BOX_DIR)
    return frozenset([*read_only, *(mount.split(":")[1] for mount in mounts)])


@functools.lru_cache(maxsize=64)
def bwrap_arguments(staged: Staged, *, disk_bytes: int, mounts: tuple[str, ...] = ()) -> tuple[str, ...]:
    """Everything after "bwrap": namespaces, mounts, filter (descriptor 4) and the agent as the first process.

    `mounts`: further directories of the host, "HOST:INSIDE" each, read-only inside.
    """
    namespaces = ("user", "pid", "ipc", "uts", "net", "cgroup")
    args = [f"--unshare-{namespace}" for namespace in namespaces]
    args += ["--die-with-parent", "--as-pid-1", "--cap-drop", "ALL", "--uid", "0", "--gid", "0"]
    args += ["--hostname", "sandbox", "--seccomp", "4"]
    args += ["--size", str(disk_bytes), "--tmpfs", "/", "--ro-bind", "/usr", "/usr"]
    # Mounts, where a host has links into /usr: a link could be replaced, and with it the loader that the tests run by.
    for path in _HOST_ROOTS:
        if os.path.isdir(path):
            args += ["--ro-bind", os.path.realpath(path), path]
    # A mount of its own cannot be renamed away, and with it the two files that every program is loaded by.
    args += ["--size", str(_ETC_BYTES), "--tmpfs", "/etc", "--ro-bind", "/dev/null", "/etc/ld.so.preload"]
    for path in _HOST_ETC:
        if os.path.exists(path):
            args += ["--ro-bind", path, path]
    args += ["--proc", "/proc", "--dev", "/dev"]
    args += ["--size", str(_SHM_BYTES), "--tmpfs", "/dev/shm", "--remount-ro", "/dev"]
    for mount in mounts:
        args += ["--ro-bind", *mount.split(":")]
    args += ["--ro-bind", str(staged.agent.parent), _BOX_DIR, "--chdir", "/", "--", f"{_BOX_DIR}/{staged.agent.name}"]
    return tuple(args)


def dir_entries(source: Path, target: str) -> Iterator[bytes]:
    """PUT entries that copy a host directory's content into `target`, modes kept. Raises SandboxRefused for a link."""
    yield encode_put(Kind.DIR, target, mode=stat.S_IMODE(source.stat().st_mode) | 0o700)
    for entry in _plain_entries(source):
        inside = str(PurePosixPath(target) / entry.name)
        if entry.is_dir():
            yield from dir_entries(Path(entry.path), inside)
        else:
            yield from file_entries(inside, Path(entry.path).read_bytes(), stat.S_IMODE(entry.stat().st_mode))


def file_entries(path: str, data: bytes, mode: int) -> Iterator[bytes]:
    """PUT entries that write one file, in pieces."""
    yield encode_put(Kind.FILE, path, data[:MAX_PUT_BYTES], mode=mode)
    for at in range(MAX_PUT_BYTES, len(data), MAX_PUT_BYTES):
        yield encode_put(Kind.APPEND, path, data[at : at + MAX_PUT_BYTES], mode=mode)


def gather(entries: Iterator[bytes]) -> Iterator[bytes]:
    """Joins entries to messages of about MAX_PUT_BYTES."""
    held: list[bytes] = []
    size = 0
    for entry in entries:
        if held and size + len(entry) > MAX_PUT_BYTES:
            yield b"".join(held)
            held, size = [], 0
        held.append(entry)
        size += len(entry)
    if held:
        yield b"".join(held)


def _num_bytes(source: Path) -> int:
    """Raises SandboxRefused as `dir_entries` does."""
    if not source.is_dir():
        return source.stat().st_size
    return sum(
        _num_bytes(Path(entry.path)) if entry.is_dir() else entry.stat().st_size for entry in _plain_entries(source)
    )


def _plain_entries(directory: Path) -> Iterator[os.DirEntry[str]]:
    """The files and directories in it, by name. Raises SandboxRefused for anything else."""
    for entry in sorted(os.scandir(directory), key=lambda entry: entry.name):
        if entry.is_symlink() or not (entry.is_dir() or entry.is_file()):
            raise SandboxRefused(f"{entry.path} is a link or no plain file; give plain files and directories")
        yield entry
