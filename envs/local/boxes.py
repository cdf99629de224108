"""Starting boxes: a parked launcher, bubblewrap around the agent, and the connection to it.

Invariant: a box that does not come up is stopped before the error leaves. A started box is no Task's yet: it is filled
by LocalSandbox.fill. Called by envs/local/{provider,warm}.py.
"""

import asyncio
import os
import socket
from dataclasses import dataclass
from functools import partial

from envs.errors import SandboxError
from envs.local.cgroups import BoxLimits
from envs.local.layout import BARE, bwrap_arguments
from envs.local.sandbox import LocalSandbox, SandboxLimits
from envs.local.slots import Slot, SlotPool
from envs.local.staging import Staged


@dataclass(frozen=True, slots=True, kw_only=True)
class BoxSize:
    """What must be known of a box before it starts."""

    disk_bytes: int
    """Of the tmpfs that holds its files."""
    limits: BoxLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class BoxStarter:
    """Starts boxes in the slots of a pool."""

    staged: Staged
    pool: SlotPool
    mounts: tuple[str, ...]
    limits: SandboxLimits

    async def start(self, size: BoxSize) -> LocalSandbox:
        """A bare box. A parked launcher may have been killed meanwhile: that is seen only now, and tried again."""
        slot = await self.pool.take()
        try:
            return await self._start_in(slot, size)
        except SandboxError:
            if not slot.is_broken:
                raise
        return await self._start_in(await self.pool.take(), size)

    async def _start_in(self, slot: Slot, size: BoxSize) -> LocalSandbox:
        sandbox = LocalSandbox(slot, partial(self.pool.give_back, slot), BARE, self.limits, owner="nobody")
        try:
            await self._start_box(slot, sandbox, size)
        except BaseException:
            await sandbox.stop()
            raise
        return sandbox

    async def _start_box(self, slot: Slot, sandbox: LocalSandbox, size: BoxSize) -> None:
        ours, theirs = socket.socketpair()
        errors, errors_inside = os.pipe()
        try:
            with theirs:
                slot.start(
                    bwrap_arguments(self.staged, disk_bytes=size.disk_bytes, mounts=self.mounts),
                    size.limits,
                    (theirs.fileno(), errors_inside),
                )
            await self._wait_ready(slot, sandbox, ours, errors)
        finally:
            if not sandbox.connection.is_attached:
                ours.close()  # else the connection owns it
            os.close(errors_inside)
            os.close(errors)

    async def _wait_ready(self, slot: Slot, sandbox: LocalSandbox, ours: socket.socket, errors: int) -> None:
        ours.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.create_connection(lambda: sandbox.connection, sock=ours)
        ready, ended = sandbox.connection.ready, slot.ended
        assert ended is not None
        deadline_s = self.limits.request_s
        await asyncio.wait({ready, ended}, timeout=deadline_s, return_when=asyncio.FIRST_COMPLETED)
        answer = ready.result() if ready.done() else None
        if answer is not None and answer.status == 0:
            return
        if not ready.done() and not ended.done():
            raise SandboxError(f"create sandbox: not ready in {deadline_s} s")
        await asyncio.wait({ended}, timeout=5)  # then all that bwrap has to say is said
        os.set_blocking(errors, False)
        raise SandboxError(f"create sandbox: {_read_text(errors) or 'the box ended at once'}")


def _read_text(fd: int) -> str:
    try:
        return os.read(fd, 4096).decode(errors="replace").strip()
    except BlockingIOError:
        return ""
