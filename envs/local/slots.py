"""Slots: parked launchers, each unprivileged and inside its own control groups, that start one box at a time.

Invariant: a slot runs at most one box, and returns to the pool only when that box's last process has been reaped.
The host process is never forked: a launcher is spawned with vfork, once a slot, and starts every later box itself.
Use one pool from one event loop, on a thread that lives as long as the pool: a launcher dies with its thread.
Called by envs/local/provider.py.
"""

import asyncio
import atexit
import contextlib
import itertools
import os
import signal
import socket
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from envs.errors import SandboxError, SandboxRefused
from envs.local.cgroups import BoxLimits, Cgroups, SlotCgroup
from envs.local.labels import kill_labelled, make_label
from envs.local.staging import Staged

_HOST_FD = 3
_UID_BASE = 1 << 30
_BOXES_A_PROCESS = 1 << 8
_OOM_SCORE_ADJ = 300
"""The kernel rather kills a box than its driver."""
_numbers = itertools.count(1)
_ENDED = "the launcher was killed"
_STAT = struct.Struct("=i")


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotConfig:
    """What is the same for every slot of a pool."""

    staged: Staged
    cgroups: Cgroups | None
    """None: soft limits, which the caller opted in to."""
    max_open_files: int
    soft_max_processes: int
    """RLIMIT_NPROC under soft limits; counts every process of the user that boxes run as."""
    deadline_s: float
    """For parking a launcher, and for a box to vanish."""


class Slot:
    """A parked launcher. `start` a box, then await `ended`."""

    def __init__(self, config: SlotConfig, number: int, group: SlotCgroup | None) -> None:
        self._config = config
        self._loop = asyncio.get_running_loop()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._parked: asyncio.Future[str] = self._loop.create_future()
        self._limits: BoxLimits | None = None
        self._oom_before = (0, 0)
        self.group = group
        self.driver = os.getpid()
        self.is_broken = False
        self.ended: asyncio.Future[int | None] | None = None
        """Resolves to the box's wait status; None when the launcher itself went."""
        self._socket.setblocking(False)
        self.label = make_label(number)
        with theirs:
            try:
                self.pid = _spawn(config, theirs.fileno(), number, self.label, group)
            except SandboxError:
                self._socket.close()
                raise
        self._loop.add_reader(self._socket.fileno(), self._on_packet)

    async def parked(self) -> None:
        """Waits until boxes can be started. Raises SandboxRefused with the step that failed, or SandboxError."""
        try:
            async with asyncio.timeout(self._config.deadline_s):
                problem = await asyncio.shield(self._parked)
        except TimeoutError:
            self.is_broken = True
            raise SandboxError(f"park a launcher: no answer in {self._config.deadline_s} s") from None
        if problem == _ENDED:
            raise SandboxError(f"park a launcher: {problem}")
        if problem:
            raise SandboxRefused(f"park a launcher: {problem}; run as root, or opt in to allow_soft_limits")

    def start(self, args: Sequence[str], limits: BoxLimits, fds: tuple[int, int]) -> None:
        """Starts a box with these bwrap arguments; `fds`: its control socket and its stderr. Raises SandboxError."""
        assert self.ended is None, "one box at a time"
        if self.group is not None and limits != self._limits:
            self.group.set_limits(limits)
            self._limits = limits
        if self.group is not None:
            self._oom_before = self.group.oom_kills()
        address_space = 0 if self.group is not None else limits.memory_bytes
        packet = "\0".join([str(address_space), *args, ""]).encode()
        self.ended = self._loop.create_future()
        try:
            socket.send_fds(self._socket, [packet], list(fds))
        except OSError as error:
            self.is_broken, self.ended = True, None
            raise SandboxError(f"reach the launcher: {error}") from error

    def hit_memory_limit(self) -> bool | None:
        """Whether the current box was killed for its own memory limit; None when nothing can tell."""
        if self.group is None:
            return None
        hits, kills = self.group.oom_kills()
        return hits > self._oom_before[0] and kills > self._oom_before[1]

    async def wait_ended(self) -> int | None:
        """The box's wait status, once it is reaped; kills it, and this slot, when that takes too long."""
        assert self.ended is not None
        try:
            async with asyncio.timeout(self._config.deadline_s):
                status = await asyncio.shield(self.ended)
        except TimeoutError:
            status = None
        if status is None:
            self.is_broken = True
        self.ended = None
        return status

    async def close(self) -> None:
        """Ends the launcher and whatever runs in its groups; leaves no process, directory or descriptor."""
        self._close_socket()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        pause_s = 0.0005
        while not _is_reaped(self.pid):
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.05)
        if self.is_broken:  # a bubblewrap killed at a bad moment leaves a child that waits for it for ever
            kill_labelled(self.label.__eq__)
        if self.group is not None:
            await self.group.remove()

    def abandon(self) -> None:
        """`close` at interpreter exit, when no event loop runs any more; gives the box 2 s to vanish."""
        self._socket.close()
        with contextlib.suppress(OSError):
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        deadline = time.monotonic() + 2
        while self.group is not None and not self.group.remove_now() and time.monotonic() < deadline:
            self.group.kill()
            time.sleep(0.002)

    def _close_socket(self) -> None:
        if self._socket.fileno() >= 0:
            self._loop.remove_reader(self._socket.fileno())
            self._socket.close()

    def _on_packet(self) -> None:
        try:
            packet = self._socket.recv(4096)
        except BlockingIOError:
            return
        except OSError:
            packet = b""
        if packet[:1] == b"X" and self.ended is not None and not self.ended.done():
            self.ended.set_result(_STAT.unpack(packet[1:])[0])
        elif packet[:1] == b"R" and not self._parked.done():
            self._parked.set_result("")
        elif packet[:1] in (b"E", b""):
            self._fail(packet[1:].decode(errors="replace") or _ENDED)

    def _fail(self, problem: str) -> None:
        self.is_broken = True
        if not self._parked.done():
            self._parked.set_result(problem)
        if self.ended is not None and not self.ended.done():
            self.ended.set_result(None)
        self._close_socket()


class SlotPool:
    """Slots that wait, and those in use."""

    def __init__(self, config: SlotConfig, *, max_parked: int) -> None:
        self._config = config
        self._max_parked = max_parked
        self._waiting: list[Slot] = []

    async def take(self) -> Slot:
        """A slot whose launcher is parked, a waiting one if there is. Raises SandboxError or SandboxRefused."""
        while self._waiting:
            slot = self._waiting.pop()
            if not slot.is_broken:
                return slot
            await self._close(slot)
        number = next(_numbers)
        group = self._config.cgroups.create(make_label(number)) if self._config.cgroups else None
        try:
            slot = Slot(self._config, number, group)
        except SandboxError:
            if group is not None:
                group.remove_now()
            raise
        _open.add(slot)
        try:
            await slot.parked()
        except BaseException:
            await asyncio.shield(self._close(slot))
            raise
        return slot

    async def give_back(self, slot: Slot) -> None:
        """Keeps the slot for the next box, or closes it when it is broken or one too many."""
        if slot.is_broken or slot.ended is not None or len(self._waiting) >= self._max_parked:
            await self._close(slot)
        else:
            self._waiting.append(slot)

    async def close(self) -> None:
        """Closes every waiting slot."""
        while self._waiting:
            await self._close(self._waiting.pop())

    async def _close(self, slot: Slot) -> None:
        await slot.close()
        _open.discard(slot)


_open: set[Slot] = set()


@atexit.register
def _abandon() -> None:
    """For a driver that ends without closing its provider; a forked child leaves its parent's slots alone."""
    for slot in _open:
        if slot.driver == os.getpid():
            slot.abandon()


def _spawn(config: SlotConfig, fd: int, number: int, label: str, group: SlotCgroup | None) -> int:
    """posix_spawn: vfork, so the size of this process does not matter; only the named descriptors survive."""
    uid = _UID_BASE + (os.getpid() << 8) + number % _BOXES_A_PROCESS if os.geteuid() == 0 else -1
    max_processes = 0 if group is not None else config.soft_max_processes
    files: list[Path] = [config.staged.bwrap, config.staged.seccomp, *(group.procs_files if group else [])]
    numbers = [uid, _OOM_SCORE_ADJ, config.max_open_files, max_processes]
    launcher = str(config.staged.launcher)
    null = [(os.POSIX_SPAWN_OPEN, target, "/dev/null", os.O_RDWR, 0) for target in range(3)]
    try:
        return os.posix_spawn(
            launcher,
            [label, *map(str, numbers), *map(str, files)],
            {},
            file_actions=[(os.POSIX_SPAWN_DUP2, fd, _HOST_FD), *null],
            setsigmask=(),
            setsigdef=(signal.SIGPIPE, signal.SIGCHLD, signal.SIGINT, signal.SIGTERM),
        )
    except OSError as error:
        raise SandboxError(f"spawn the launcher: {error}") from error


def _is_reaped(pid: int) -> bool:
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return True  # someone else in this process waited for every child
