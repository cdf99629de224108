"""One running container, as the engine's client process in the foreground with our agent as its first process.

Invariant: the container lives as long as the client's stdin: when this driver ends, however it ends, the agent reads
the end of its input and exits, and the engine removes the container (`--rm`).
Made by envs/containers/provider.py; what runs inside is spoken to by envs/local/sandbox.py.
"""

import asyncio
import contextlib
import os
import socket
import subprocess
import tempfile
from collections.abc import Sequence

from envs.containers.engine import Engine, last_lines, refuse_without

_ENGINE_FAILED = 125


class ContainerBox:
    """A started client process; `ended` resolves when it has exited. Implements envs.local.sandbox.Box."""

    def __init__(self, engine: Engine, name: str, args: Sequence[str], *, deadline_s: float) -> None:
        self.label = name
        self._engine = engine
        self._deadline_s = deadline_s
        self._loop = asyncio.get_running_loop()
        self._errors, errors_inside = os.pipe()
        os.set_blocking(self._errors, False)
        self.socket, theirs = socket.socketpair()
        self.socket.setblocking(False)
        try:
            with theirs:
                self._process = _spawn(engine, args, theirs.fileno(), errors_inside)
        except BaseException:
            self.socket.close()
            os.close(self._errors)
            raise
        finally:
            os.close(errors_inside)
        self.ended: asyncio.Future[None] = self._loop.create_future()
        self._exit_fd = os.pidfd_open(self._process.pid)
        self._loop.add_reader(self._exit_fd, self._on_exit)

    async def wait_ended(self) -> int | None:
        """The container's wait status; None when the engine or its client failed. Kills a client that is late."""
        try:
            async with asyncio.timeout(self._deadline_s):
                await asyncio.shield(self.ended)
        except TimeoutError:
            self._process.kill()
            await asyncio.shield(self.ended)
        code = self._process.returncode
        return None if code is None or code < 0 or code == _ENGINE_FAILED else code << 8

    def hit_memory_limit(self) -> bool | None:
        """None: a removed container tells nothing of its end. False when its client failed, so not the inside."""
        code = self._process.returncode
        return False if code is None or code < 0 or code == _ENGINE_FAILED else None

    def problem(self) -> str:
        """What the engine's client has said so far; "" for nothing."""
        with contextlib.suppress(BlockingIOError):
            return last_lines(os.read(self._errors, 1 << 16))
        return ""

    async def release(self) -> None:
        """Leaves no process, descriptor or container. The agent's connection must have been closed before."""
        try:
            status = await self.wait_ended()
            if status is None:  # the client went before the container was removed
                await self._engine.remove(self.label)
        finally:
            os.close(self._errors)

    def _on_exit(self) -> None:
        self._loop.remove_reader(self._exit_fd)
        os.close(self._exit_fd)
        self._process.wait()
        if not self.ended.done():
            self.ended.set_result(None)


def _spawn(engine: Engine, args: Sequence[str], control: int, errors: int) -> "subprocess.Popen[bytes]":
    """The client has a session of its own: an interrupt of the driver's terminal does not reach it."""
    try:
        return subprocess.Popen(
            engine.command("run", *args),
            stdin=control,
            stdout=control,
            stderr=errors,
            start_new_session=True,
            cwd=tempfile.gettempdir(),  # podman's monitor leaves a file `oom` where it stands when memory ran out
        )
    except OSError as error:
        raise refuse_without(engine, f"{engine.name} run", error) from error
