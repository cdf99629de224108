"""The Sandbox Protocol: an isolated machine that a Task runs in.

Invariant: every exec has a deadline, and `stop` leaves nothing behind.
Called by harnesses, verifiers and episodes; implemented by envs/{local,containers,daytona} and tests/fakes.
"""

from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from envs.task import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecResult:
    """What a command in a Sandbox came to."""

    exit_code: int
    """The command's exit status; 124 when it ran past its timeout and was killed."""
    stdout: bytes
    """Cut at the provider's limit (1 MiB by default)."""
    stderr: bytes


class Sandbox(Protocol):
    """A started Sandbox. Raises SandboxDied when its inside killed it, SandboxError when its provider failed."""

    workdir: str
    """Absolute path inside, where commands start."""

    async def exec(
        self,
        command: str,
        *,
        timeout_s: float,
        env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
        cwd: str | None = None,
    ) -> ExecResult:
        """Runs `command` with bash inside and waits for it. A command past its timeout is killed: exit_code 124."""
        ...

    async def write_file(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """Writes one file inside, parents included."""
        ...

    async def read_file(self, path: str, *, max_bytes: int = 1 << 20) -> bytes | None:
        """The file's bytes; None when there is no such regular file. SandboxError when it is longer than max_bytes."""
        ...

    async def upload_dir(self, source: Path, target: str) -> None:
        """Copies a directory of the host to `target` inside, modes kept, symbolic links refused."""
        ...

    async def kill_all(self) -> None:
        """Ends every process of the agent inside, so that nothing of its survives into verification."""
        ...

    async def stop(self) -> None:
        """Ends and removes the Sandbox; safe to call twice."""
        ...


class SandboxProvider(Protocol):
    """Makes Sandboxes. `name` appears in provenance and summaries ("bubblewrap")."""

    name: str

    async def provenance(self) -> Mapping[str, str]:
        """What a run's record says of the isolation. Raises SandboxRefused where this machine cannot give it."""
        ...

    async def close(self) -> None:
        """Frees what is kept for later Sandboxes; none may be running."""
        ...

    def start(self, task: Task, *, owner: str) -> AbstractAsyncContextManager[Sandbox]:
        """A started Sandbox for the Task, stopped on exit whatever happened. `owner` labels it (trajectory id)."""
        ...
