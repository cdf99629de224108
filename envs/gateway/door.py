"""The door: the gateway on a unix socket that sandboxes without a network see, and nothing else beside themselves.

Invariant: it listens on its own socket alone, and only while sandboxes may run. Made by envs/build.py, one for each
rollout worker; opened and closed by the worker's provider.
"""

import asyncio
import contextlib
import shutil
import socket
import tempfile
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from envs.sandbox import Sandbox, SandboxProvider
from envs.task import Task

if TYPE_CHECKING:  # web servers cost every recipe's --help a quarter of a second
    from starlette.applications import Starlette

SOCKET_NAME = "door.sock"
BOX_DIRECTORY = "/.thresher-door"
"""Where a Sandbox sees the door's directory."""


class Door:
    """The gateway on a socket in a directory of its own, which sandboxes mount. `open` it from one event loop."""

    def __init__(self, app: "Starlette") -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="thresher-door-"))
        self.directory.chmod(0o755)  # boxes run as another user; the socket's own mode and tokens decide
        self._app = app
        self._serving = contextlib.AsyncExitStack()
        self._opening = asyncio.Lock()
        self._is_open = False

    @property
    def path(self) -> Path:
        """The socket's path on this machine."""
        return self.directory / SOCKET_NAME

    async def open(self) -> None:
        """Returns once requests are answered; later calls return at once."""
        from envs.gateway.server import serve_app

        async with self._opening:
            if not self._is_open:
                listener = socket.socket(socket.AF_UNIX)
                listener.bind(str(self.path))
                self.path.chmod(0o666)
                await self._serving.enter_async_context(serve_app(self._app, listener))
                self._is_open = True

    async def close(self) -> None:
        """Ends every connection and removes the socket."""
        async with self._opening:
            await self._serving.aclose()
            self._is_open = False
            await asyncio.to_thread(shutil.rmtree, self.directory, ignore_errors=True)


class DoorProvider:
    """A provider whose Sandboxes see the door, which is open while they run, and nothing else outside themselves."""

    def __init__(self, provider: SandboxProvider, door: Door) -> None:
        """`provider` must mount the door's directory at BOX_DIRECTORY."""
        self.name = provider.name
        self._provider = provider
        self._door = door

    async def provenance(self) -> Mapping[str, str]:
        """That of the provider, and the door."""
        return {**await self._provider.provenance(), "network": "none but the gateway's door"}

    @asynccontextmanager
    async def start(self, task: Task, *, owner: str) -> AsyncGenerator[Sandbox]:
        """See SandboxProvider."""
        await self._door.open()
        async with self._provider.start(task, owner=owner) as sandbox:
            yield sandbox

    async def close(self) -> None:
        """Closes the door, then the provider."""
        try:
            await self._door.close()
        finally:
            await self._provider.close()
