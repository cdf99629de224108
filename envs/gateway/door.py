"""The door: the gateway served on a unix socket or on loopback, for as long as somebody needs it.

Invariant: it listens nowhere but on the one address that it was made for. Made by envs/build.py for a rollout worker's
sandboxes and by recipes/serve.py for people.
"""

import asyncio
import contextlib
import shutil
import socket
import tempfile
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import uvicorn
from starlette.applications import Starlette

SOCKET_NAME = "door.sock"
_START_LIMIT_S = 30.0
_STOP_LIMIT_S = 10.0


class Door:
    """The gateway on a socket in a directory of its own, which sandboxes mount. `open` it from one event loop."""

    def __init__(self, app: Starlette) -> None:
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


@asynccontextmanager
async def serve_app(app: Starlette, listener: socket.socket) -> AsyncGenerator[None]:
    """Serves the app on a bound socket for the length of the block."""
    server = _Server(
        uvicorn.Config(app, log_level="warning", access_log=False, lifespan="off", timeout_graceful_shutdown=1)
    )
    listener.listen(1024)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        async with asyncio.timeout(_START_LIMIT_S):
            while not server.started:
                if serving.done():
                    serving.result()
                    raise RuntimeError("the gateway's server ended before it had started")
                await asyncio.sleep(0.005)
        yield
    finally:
        server.should_exit = True
        with contextlib.suppress(TimeoutError, asyncio.CancelledError):
            async with asyncio.timeout(_STOP_LIMIT_S):
                await asyncio.shield(serving)
        serving.cancel()
        listener.close()


class _Server(uvicorn.Server):
    """A server that leaves the process's signals to the recipe."""

    @contextlib.contextmanager
    def capture_signals(self):  # type: ignore[override]
        """Handles none."""
        yield
