"""LocalSandbox: one box on this machine, spoken to through the agent inside it.

Invariant: after `stop` no process of the box lives and its box was released. How a box ended decides the error:
killed from inside is SandboxDied, anything else SandboxError.
Made by envs/local/provider.py (its box is a Slot) and envs/containers/provider.py (its box is a container).
"""

import asyncio
import errno
import os
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from envs.errors import SandboxDied, SandboxError
from envs.local.layout import Layout, dir_entries, file_entries, gather
from envs.local.wire import Answer, Connection, Operation, encode_exec, encode_get
from envs.sandbox import ExecResult

_FORK_RETRY_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxLimits:
    """Limits of one Sandbox that the host side enforces."""

    max_output_bytes: int
    """Kept of each of stdout and stderr."""
    grace_s: float
    """How much later than its timeout a command's answer may come before the box counts as dead."""
    request_s: float
    """Deadline of everything that is not a command."""


class Box(Protocol):
    """What a LocalSandbox knows of the box around its agent."""

    @property
    def label(self) -> str:
        """What its processes on the host are called by."""
        ...

    @property
    def ended(self) -> object | None:
        """None before the box was started."""
        ...

    async def wait_ended(self) -> int | None:
        """The box's wait status; None when what held it failed."""
        ...

    def hit_memory_limit(self) -> bool | None:
        """Whether it was killed for its own memory limit; None when nothing can tell."""
        ...


class LocalSandbox:
    """Implements envs.sandbox.Sandbox. `release` is awaited once, at `stop`, when the connection is closed."""

    def __init__(
        self,
        box: Box,
        release: Callable[[], Awaitable[None]],
        layout: Layout,
        limits: SandboxLimits,
        *,
        owner: str,
    ) -> None:
        self.workdir = layout.workdir
        self.owner = owner
        self._box = box
        self._release = release
        self._env = layout.env
        self._limits = limits
        self._connection = Connection(self._on_lost)
        self._stopping: asyncio.Task[None] | None = None
        self._judging: asyncio.Task[SandboxDied | SandboxError] | None = None

    @property
    def label(self) -> str:
        """Of its box's processes on the host; see envs/local/labels.py."""
        return self._box.label

    @property
    def connection(self) -> Connection:
        """The protocol to attach to the box's control socket."""
        return self._connection

    async def fill(self, layout: Layout, content: int, *, owner: str) -> None:
        """Makes the box a Task's: writes the PUT entries of an open file, and takes the layout. Raises as `put` does.

        The first request of a box; its file stays the caller's to close.
        """
        self.workdir, self._env, self.owner = layout.workdir, layout.env, owner
        _check_put(await self._request(Operation.FILL, b"", self._limits.request_s, file=content))

    async def exec(
        self,
        command: str,
        *,
        timeout_s: float,
        env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
        cwd: str | None = None,
    ) -> ExecResult:
        """See Sandbox."""
        body = encode_exec(
            command,
            timeout_s=timeout_s,
            max_output=self._limits.max_output_bytes,
            cwd=cwd or self.workdir,
            stdin=stdin,
            env=self._env | dict(env) if env else self._env,
        )
        answer = await self._start_command(body, timeout_s + self._limits.grace_s)
        return ExecResult(exit_code=answer.status, stdout=answer.first, stderr=answer.second)

    async def write_file(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """See Sandbox."""
        await self.put(gather(file_entries(self._absolute(path), data, mode)))

    async def read_file(self, path: str, *, max_bytes: int = 1 << 20) -> bytes | None:
        """See Sandbox."""
        body = encode_get(self._absolute(path), max_bytes)
        answer = await self._request(Operation.GET, body, self._limits.request_s)
        if answer.status == -errno.EFBIG:
            raise SandboxError(f"read {path}: longer than max_bytes={max_bytes}")
        return None if answer.status else answer.first

    async def upload_dir(self, source: Path, target: str) -> None:
        """See Sandbox."""
        await self.put(gather(dir_entries(source, self._absolute(target))))

    async def kill_all(self) -> None:
        """See Sandbox."""
        await self._request(Operation.KILL, b"", self._limits.request_s)

    async def put(self, bodies: Iterable[bytes]) -> None:
        """Writes the files of these PUT messages. Raises SandboxDied when the disk is full or a path is barred."""
        for body in bodies:
            _check_put(await self._request(Operation.PUT, body, self._limits.request_s))

    async def stop(self) -> None:
        """See Sandbox."""
        if self._stopping is None:
            self._stopping = asyncio.create_task(self._stop())
        await asyncio.shield(self._stopping)

    async def _stop(self) -> None:
        self._connection.close()
        if self._judging is not None:
            await self._judging
        elif self._box.ended is not None:
            await self._box.wait_ended()
        await self._release()

    async def _start_command(self, body: bytes, deadline_s: float) -> Answer:
        """The command's answer. A box that cannot start one for 2 s has used up its processes or memory."""
        pause_s, waited_s = 0.02, 0.0
        while True:
            answer = await self._request(Operation.EXEC, body, deadline_s)
            if answer.status >= 0:
                return answer
            if answer.status not in (-errno.EAGAIN, -errno.ENOMEM) or waited_s >= _FORK_RETRY_S:
                raise SandboxDied(f"start a command inside: {os.strerror(-answer.status)}")
            await asyncio.sleep(pause_s)
            waited_s, pause_s = waited_s + pause_s, 2 * pause_s

    async def _request(
        self, operation: Operation, body: bytes, deadline_s: float, *, file: int | None = None
    ) -> Answer:
        if self._stopping is not None:
            raise SandboxError(f"sandbox of {self.owner} is stopped")
        try:
            answer = await self._connection.request(operation, body, deadline_s=deadline_s, file=file)
        except TimeoutError as error:
            self._connection.close()
            raise SandboxDied(f"the box did not answer {operation.name} in {deadline_s:.0f} s") from error
        if answer is None:
            raise await self.why_lost()
        return answer

    async def why_lost(self) -> SandboxDied | SandboxError:
        """What to raise now that the connection has ended."""
        if self._judging is None:
            return SandboxError(f"sandbox of {self.owner} is stopped")
        error = await asyncio.shield(self._judging)
        return type(error)(*error.args)  # one for each who asks, since raising fills in a traceback

    def _on_lost(self) -> None:
        if self._stopping is None and self._box.ended is not None:
            self._judging = asyncio.create_task(self._judge())

    async def _judge(self) -> SandboxDied | SandboxError:
        status = await self._box.wait_ended()
        hit_memory_limit = self._box.hit_memory_limit()
        if hit_memory_limit:
            return SandboxDied("the box's first process was killed: memory limit")
        how = "with its launcher" if status is None else f"with wait status {status:#x}"
        if hit_memory_limit is None or (status is not None and os.WIFEXITED(status) and os.WEXITSTATUS(status) < 128):
            # Nothing can tell a kill from outside, or the agent itself gave up: a policy must not gain by that.
            return SandboxDied(f"the box ended {how}")
        return SandboxError(f"the box was killed from outside, {how}")

    def _absolute(self, path: str) -> str:
        return os.path.join(self.workdir, path)


def _check_put(answer: Answer) -> None:
    if answer.status:
        problem = f"write {answer.first.decode(errors='replace')} inside: {os.strerror(-answer.status)}"
        # Only what runs inside can fill the disk or bar a path; the read-only parts are the provider's.
        raise SandboxError(problem) if answer.status == -errno.EROFS else SandboxDied(problem)
