"""DaytonaSandbox: one remote sandbox, used through its toolbox API.

Invariant: a command runs once however often its request is repeated, and no request waits longer than `poll_s` and a
margin. What the service does is SandboxError; what only the inside can have caused is SandboxDied.
Made by envs/daytona/provider.py.
"""

import asyncio
import io
import math
import os
import shlex
import stat
import tarfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TypeVar
from uuid import uuid4

from daytona import AsyncSandbox, FileUpload
from daytona.common.errors import DaytonaNotFoundError

from envs.daytona.config import DaytonaConfig
from envs.daytona.errors import retried
from envs.daytona.scripts import (
    DIR,
    IN_FILE,
    Command,
    kill_all_script,
    parse_result,
    result_path,
    start_script,
    wait_script,
)
from envs.errors import SandboxDied, SandboxError, SandboxRefused
from envs.sandbox import ExecResult

T = TypeVar("T")

_MAX_INLINE = 64 << 10
"""A longer script goes up as a file: one argument of a program may have 128 KiB at most."""
_MARGIN_S = 30
_MAX_SENSELESS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Inside:
    """What commands inside find."""

    workdir: str
    env: Mapping[str, str]
    baseline: Sequence[str]
    """pid.start of the service's own processes."""


class DaytonaSandbox:
    """Implements envs.sandbox.Sandbox. `delete` is awaited once, at `stop`."""

    def __init__(
        self,
        remote: AsyncSandbox,
        inside: Inside,
        config: DaytonaConfig,
        delete: Callable[[], Awaitable[None]],
        *,
        owner: str,
    ) -> None:
        self.workdir = inside.workdir
        self.owner = owner
        self._remote = remote
        self._inside = inside
        self._config = config
        self._delete = delete
        self._stopping: asyncio.Task[None] | None = None
        self._spent: list[str] = []
        self._num_kills = 0

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
        request = Command(
            id=uuid4().hex,
            command=command,
            timeout_s=timeout_s,
            cwd=cwd or self.workdir,
            env={**self._inside.env, **(env or {})},
            stdin=stdin,
            max_output_bytes=self._config.max_output_bytes,
        )
        spent, self._spent = self._spent, []
        start = await self._fit(start_script(request, spent=spent), f"{request.id}.start")
        deadline = time.monotonic() + timeout_s + self._config.grace_s
        result = await self._await_result(request.id, start, timeout_s, deadline)
        self._spent.append(request.id)
        return result

    async def write_file(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """See Sandbox."""
        target = shlex.quote(self._absolute(path))
        staged = await self._stage(data)
        await self._must(
            f"mkdir -p -- $(dirname -- {target}) && chmod {mode:o} {staged} && mv -fT -- {staged} {target}",
            f"write {path} inside",
        )

    async def read_file(self, path: str, *, max_bytes: int = 1 << 20) -> bytes | None:
        """See Sandbox."""
        full = self._absolute(path)
        quoted = shlex.quote(full)
        size = await self._script(f"if [[ -f {quoted} ]]; then stat -L -c %s -- {quoted}; else echo none; fi")
        if size.strip() == "none":
            return None
        if not size.strip().isdigit() or int(size) > max_bytes:
            raise SandboxError(f"read {path}: longer than max_bytes={max_bytes}")
        return await self._download(full)

    async def upload_dir(self, source: Path, target: str) -> None:
        """See Sandbox."""
        full = shlex.quote(self._absolute(target))
        staged = await self._stage(await asyncio.to_thread(_pack, source))
        await self._must(
            f"mkdir -p -- {full} && tar -x -p --no-same-owner -C {full} -f {staged} && rm -f {staged}",
            f"unpack {target} inside",
        )

    async def kill_all(self) -> None:
        """See Sandbox."""
        self._num_kills += 1
        if "done" not in await self._script(kill_all_script(self._inside.baseline)):
            raise SandboxDied("processes inside cannot be ended")

    async def stop(self) -> None:
        """See Sandbox."""
        if self._stopping is None:
            self._stopping = asyncio.ensure_future(self._delete())
        await asyncio.shield(self._stopping)

    async def _await_result(self, command_id: str, start: str, timeout_s: float, deadline: float) -> ExecResult:
        """Starts and waits; a request that was answered without sense is followed by another that only waits."""
        num_kills, senseless = self._num_kills, 0
        while True:
            wait_s = max(0.1, min(self._config.poll_s, timeout_s + 1, deadline - time.monotonic()))
            text = await self._script(f"{start}\n{wait_script(command_id, wait_s=wait_s)}", wait_s=wait_s)
            if text.strip() == IN_FILE:
                text = (await self._download(result_path(command_id)) or b"").decode(errors="replace")
            try:
                result = parse_result(text)
            except ValueError as error:
                if self._num_kills != num_kills:  # it ended the script that waits, too
                    return ExecResult(exit_code=137, stdout=b"", stderr=b"")
                senseless += 1
                if senseless >= _MAX_SENSELESS:
                    raise SandboxDied(f"run a command inside: {error}") from error
                result = None
            if result is not None:
                return result
            if time.monotonic() > deadline:
                raise SandboxDied(f"a command with a timeout of {timeout_s:g} s did not end inside")
            if not senseless:
                start = ""

    async def _must(self, command: str, what: str) -> None:
        """Only what runs inside can bar a path or fill the disk."""
        answer = await self._script(f"if {{ {command}; }} 2>&1; then echo done; fi")
        if not answer.endswith("done\n"):
            raise SandboxDied(f"{what}: {answer.strip()[-500:] or 'no answer'}")

    async def _script(self, script: str, *, wait_s: float = 0.0) -> str:
        """What a script prints; it may be run twice when the first answer is lost."""
        script = await self._fit(script, f"{uuid4().hex}.sh")
        limit_s = math.ceil(wait_s) + _MARGIN_S
        command = f"bash -c {shlex.quote(script)}"
        response = await self._service(lambda: self._remote.process.exec(command, timeout=limit_s), "run a command")
        return response.result or ""

    async def _fit(self, script: str, name: str) -> str:
        """The script itself, or a line that runs it from a file when it is too long for an argument."""
        if len(script.encode("utf-8", "surrogateescape")) <= _MAX_INLINE:
            return script
        await self._upload(script.encode("utf-8", "surrogateescape"), f"{DIR}/{name}")
        self._spent.append(name)
        return f"source {DIR}/{name}"

    async def _stage(self, data: bytes) -> str:
        """Uploads to a place of its own, from which a script moves it to where it belongs."""
        path = f"{DIR}/{uuid4().hex}"
        await self._upload(data, path)
        return path

    async def _upload(self, data: bytes, path: str) -> None:
        timeout_s = math.ceil(self._config.request_timeout_s)
        await self._service(lambda: self._remote.fs.upload_files([FileUpload(data, path)], timeout_s), "upload")

    async def _download(self, path: str) -> bytes | None:
        """A file's bytes, None when there is none."""
        timeout_s = math.ceil(self._config.request_timeout_s)

        async def download() -> bytes | None:
            try:
                return await self._remote.fs.download_file(path, timeout_s)
            except DaytonaNotFoundError:
                return None

        return await self._service(download, f"read {path}")

    async def _service(self, call: Callable[[], Awaitable[T]], what: str) -> T:
        if self._stopping is not None:
            raise SandboxError(f"sandbox of {self.owner} is stopped")
        where = f"{what} in daytona sandbox {self._remote.id}"
        return await retried(call, where, deadline_s=self._config.request_timeout_s)

    def _absolute(self, path: str) -> str:
        return os.path.join(self.workdir, path)


def _pack(source: Path) -> bytes:
    """A tar of the directory's content. Raises SandboxRefused for a link or device."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for path in sorted(source.rglob("*")):
            found = path.lstat()
            if not (stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)):
                raise SandboxRefused(f"{path} is a link or no plain file; give plain files and directories")
            member = tarfile.TarInfo(str(PurePosixPath(path.relative_to(source))))
            member.mode, member.mtime = stat.S_IMODE(found.st_mode), int(found.st_mtime)
            if path.is_dir():
                member.type = tarfile.DIRTYPE
                tar.addfile(member)
            else:
                content = path.read_bytes()
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    return packed.getvalue()
