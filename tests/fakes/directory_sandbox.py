"""A Sandbox that is a plain directory: real bash, NO isolation, for commands that this repository wrote.

The Task's paths (/app, /tests, /logs) are rewritten to lie under the directory, in commands and in uploaded files.
It keeps the same contract as a real one (tests/contracts/sandbox.py).
"""

import asyncio
import contextlib
import os
import re
import selectors
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from envs.errors import SandboxError
from envs.sandbox import ExecResult
from envs.task import Task

_INSIDE = re.compile(r"(?<![\w.}/])/(app|tests|logs|solution|\.tests-)")
_MAX_OUTPUT_BYTES = 1 << 20


class DirectorySandbox:
    """Runs commands in `root`; `calls` lists what was asked of it, in order."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.workdir = "/app"
        self.calls: list[str] = []
        self._running: set[int] = set()
        self._is_stopped = False
        (root / "app").mkdir(parents=True)

    async def exec(
        self,
        command: str,
        *,
        timeout_s: float,
        env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
        cwd: str | None = None,
    ) -> ExecResult:
        self._check("exec")
        variables = {"PATH": os.environ["PATH"], **(env or {})}
        with tempfile.TemporaryFile() as given:
            given.write(stdin)
            given.seek(0)
            process = subprocess.Popen(  # noqa: ASYNC220 - a few ms, in tests
                ["bash", "-c", self._outside(command)],
                cwd=self._path(cwd or self.workdir),
                env=variables,
                stdin=given,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        self._running.add(process.pid)
        try:
            return await asyncio.to_thread(_finish, process, time.monotonic() + timeout_s)
        except asyncio.CancelledError:
            _kill(process.pid)
            raise

    async def write_file(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        self._check("write_file")
        target = self._path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
        target.chmod(mode)

    async def read_file(self, path: str, *, max_bytes: int = 1 << 20) -> bytes | None:
        self._check("read_file")
        target = self._path(path)
        if target.is_file() and target.stat().st_size > max_bytes:
            raise SandboxError(f"read {path}: longer than max_bytes={max_bytes}")
        return target.read_bytes() if target.is_file() else None

    async def upload_dir(self, source: Path, target: str) -> None:
        self._check("upload_dir")
        for path in source.rglob("*"):
            if path.is_symlink():
                raise SandboxError(f"{path} is a link")
        shutil.copytree(source, self._path(target), dirs_exist_ok=True)
        for path in self._path(target).rglob("*"):
            if path.is_file():
                path.write_text(self._outside(path.read_text()))

    async def kill_all(self) -> None:
        self._check("kill_all")
        self._kill_all()

    async def stop(self) -> None:
        self.calls.append("stop")
        self._is_stopped = True
        self._kill_all()
        shutil.rmtree(self.root, ignore_errors=True)

    def _check(self, call: str) -> None:
        self.calls.append(call)
        if self._is_stopped:
            raise SandboxError("the sandbox is stopped")

    def _kill_all(self) -> None:
        for pid in self._running:
            _kill(pid)
        self._running.clear()

    def _path(self, path: str) -> Path:
        return self.root / path.lstrip("/")

    def _outside(self, text: str) -> str:
        return _INSIDE.sub(lambda match: f"{self.root}/{match[1]}", text)


def _finish(process: "subprocess.Popen[bytes]", deadline: float) -> ExecResult:
    """Waits for the process, not for what it left in the background, and keeps the start of its output."""
    kept = {1: bytearray(), 2: bytearray()}
    is_late = False
    assert process.stdout and process.stderr
    with process.stdout, process.stderr, selectors.DefaultSelector() as selector:
        for number, stream in ((1, process.stdout), (2, process.stderr)):
            os.set_blocking(stream.fileno(), False)
            selector.register(stream, selectors.EVENT_READ, number)
        while process.poll() is None:
            if not is_late and time.monotonic() > deadline:
                is_late = True
                _kill(process.pid)
            _read(selector, kept, 0.005)
        _read(selector, kept, 0)
    code = process.returncode
    exit_code = 124 if is_late else code if code >= 0 else 128 - code
    return ExecResult(exit_code=exit_code, stdout=bytes(kept[1]), stderr=bytes(kept[2]))


def _read(selector: selectors.BaseSelector, kept: dict[int, bytearray], timeout_s: float) -> None:
    for key, _ in selector.select(timeout_s):
        data = os.read(key.fd, 1 << 20)
        if not data:
            selector.unregister(key.fileobj)
        kept[key.data] += data[: _MAX_OUTPUT_BYTES - len(kept[key.data])]


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


class DirectoryProvider:
    """Starts DirectorySandboxes under `root`; `sandboxes` keeps them by owner."""

    name = "directory"
    box: type[DirectorySandbox] = DirectorySandbox
    """What it starts."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.sandboxes: dict[str, DirectorySandbox] = {}

    async def provenance(self) -> dict[str, str]:
        return {"provider": self.name, "isolation": "none: for tests"}

    async def close(self) -> None:
        """Nothing is kept."""

    @asynccontextmanager
    async def start(self, task: Task, *, owner: str) -> AsyncIterator[DirectorySandbox]:
        sandbox = self.sandboxes[owner] = self.box(self._root / owner)
        files = task.path / "environment" / "files"
        if files.is_dir():
            shutil.copytree(files, sandbox.root / "app", dirs_exist_ok=True)
        try:
            yield sandbox
        finally:
            await sandbox.stop()
