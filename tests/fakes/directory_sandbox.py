"""A Sandbox that is a plain directory: real bash, no isolation, for commands that this repository wrote.

The Task's paths (/app, /tests, /logs) are rewritten to lie under the directory, in commands and in uploaded files.
"""

import asyncio
import os
import re
import shutil
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from envs.sandbox import ExecResult
from envs.task import Task

_INSIDE = re.compile(r"(?<![\w.}/])/(app|tests|logs|solution|\.tests-)")


class DirectorySandbox:
    """Runs commands in `root`; `calls` lists what was asked of it, in order."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.workdir = "/app"
        self.calls: list[str] = []
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
        self.calls.append("exec")
        process = await asyncio.create_subprocess_exec(
            "bash",
            "-c",
            self._outside(command),
            cwd=self._path(cwd or self.workdir),
            env={"PATH": os.environ["PATH"], **(env or {})},
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        try:
            stdout, stderr = await asyncio.wait_for(process.communicate(stdin), timeout_s)
        except TimeoutError:
            os.killpg(process.pid, 9)
            await process.wait()
            return ExecResult(exit_code=124, stdout=b"", stderr=b"")
        return ExecResult(exit_code=process.returncode or 0, stdout=stdout, stderr=stderr)

    async def write_file(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        self.calls.append("write_file")
        target = self._path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
        target.chmod(mode)

    async def read_file(self, path: str, *, max_bytes: int = 1 << 20) -> bytes | None:
        self.calls.append("read_file")
        target = self._path(path)
        return target.read_bytes()[:max_bytes] if target.is_file() else None

    async def upload_dir(self, source: Path, target: str) -> None:
        self.calls.append("upload_dir")
        shutil.copytree(source, self._path(target), dirs_exist_ok=True)
        for path in self._path(target).rglob("*"):
            if path.is_file():
                path.write_text(self._outside(path.read_text()))

    async def kill_all(self) -> None:
        self.calls.append("kill_all")

    async def stop(self) -> None:
        self.calls.append("stop")
        shutil.rmtree(self.root, ignore_errors=True)

    def _path(self, path: str) -> Path:
        return self.root / path.lstrip("/")

    def _outside(self, text: str) -> str:
        return _INSIDE.sub(lambda match: f"{self.root}/{match[1]}", text)


class DirectoryProvider:
    """Starts DirectorySandboxes under `root`; `sandboxes` keeps them by owner."""

    name = "directory"

    def __init__(self, root: Path) -> None:
        self._root = root
        self.sandboxes: dict[str, DirectorySandbox] = {}

    @asynccontextmanager
    async def start(self, task: Task, *, owner: str) -> AsyncIterator[DirectorySandbox]:
        sandbox = self.sandboxes[owner] = DirectorySandbox(self._root / owner)
        files = task.path / "environment" / "files"
        if files.is_dir():
            shutil.copytree(files, sandbox.root / "app", dirs_exist_ok=True)
        try:
            yield sandbox
        finally:
            await sandbox.stop()
