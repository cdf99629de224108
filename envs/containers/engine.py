"""Calls of a container engine's command line: docker's or podman's, which agree on all that is used here.

Invariant: every call has a deadline and is killed at it; what the engine cannot do becomes a SandboxError that holds
its last words. No daemon library: the binary is the interface. Called by the other files of envs/containers/.
"""

import asyncio
import contextlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, cast

from envs.errors import SandboxError, SandboxRefused

_NO_SUCH = ("no such container", "no container with name or id", "no such object")


class EngineName(StrEnum):
    """Whose command line it is."""

    DOCKER = "docker"
    PODMAN = "podman"


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """A command line and what goes before and after its verbs."""

    name: EngineName
    binary: str
    args: Sequence[str] = field(default_factory=tuple[str, ...])
    """Before the verb."""
    runtime: str | None = None
    """The OCI runtime; "runsc" is gVisor."""

    def command(self, verb: str, *args: str) -> list[str]:
        """The words of a call; podman takes the runtime before the verb, docker with `run` alone."""
        if self.runtime is None:
            return [self.binary, *self.args, verb, *args]
        if self.name is EngineName.PODMAN:
            return [self.binary, *self.args, "--runtime", self.runtime, verb, *args]
        return [self.binary, *self.args, verb, *(("--runtime", self.runtime) if verb == "run" else ()), *args]

    async def call(self, verb: str, *args: str, deadline_s: float = 60.0, stdin: bytes = b"") -> str:
        """What the call printed. Raises SandboxRefused without the binary, SandboxError when it fails or is late."""
        command = self.command(verb, *args)
        what = f"{self.name} {verb}"
        process = await self._spawn(command, what)
        try:
            async with asyncio.timeout(deadline_s):
                out, err = await process.communicate(stdin)
        except TimeoutError:
            raise SandboxError(f"{what}: not done within {deadline_s:g} s") from None
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
        if process.returncode != 0:
            raise SandboxError(f"{what}: {last_lines(err) or f'exit status {process.returncode}'}")
        return out.decode(errors="replace")

    async def version(self) -> str:
        """The engine's version, from the engine itself. Raises SandboxRefused when it does not answer."""
        side = "Client" if self.name is EngineName.PODMAN else "Server"
        try:
            return (await self.call("version", "--format", "{{." + side + ".Version}}", deadline_s=30)).strip()
        except SandboxRefused:
            raise
        except SandboxError as error:
            raise SandboxRefused(f"{error}; start the {self.name} engine, or use another sandbox provider") from error

    async def inspect(self, kind: str, name: str) -> dict[str, Any] | None:
        """What the engine knows of an image or a container; None when there is none."""
        try:
            found = json.loads(await self.call(kind, "inspect", name))
        except SandboxError as error:
            if is_missing(error):
                return None
            raise
        return cast(dict[str, Any], found[0]) if found else None

    async def remove(self, container: str) -> None:
        """Ends and removes a container; one that is gone is no error."""
        try:
            # podman would give the agent, which ignores signals, 10 s to end first
            at_once = ("--time=0",) if self.name is EngineName.PODMAN else ()
            await self.call("rm", "--force", "--volumes", *at_once, container)
        except SandboxError as error:
            if not is_missing(error):
                raise

    async def _spawn(self, command: Sequence[str], what: str) -> asyncio.subprocess.Process:
        pipe = asyncio.subprocess.PIPE
        try:
            return await asyncio.create_subprocess_exec(
                *command, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True
            )
        except OSError as error:
            raise refuse_without(self, what, error) from error


def refuse_without(engine: Engine, what: str, error: OSError) -> SandboxRefused:
    """The refusal for a binary that cannot be started."""
    return SandboxRefused(
        f"{what}: {engine.binary}: {error.strerror}; install {engine.name}, name its binary, or use another provider"
    )


def is_missing(error: SandboxError) -> bool:
    """Whether the engine says that there is no such container or image."""
    text = str(error).lower()
    return any(words in text for words in (*_NO_SUCH, "no such image", "image not known", "failed to find image"))


def last_lines(text: bytes, *, num_lines: int = 4) -> str:
    """The last lines as one."""
    lines = [line.strip() for line in text.decode(errors="replace").splitlines() if line.strip()]
    return "; ".join(lines[-num_lines:])[-1000:]
