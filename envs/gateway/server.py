"""Serving the gateway over HTTP, in the event loop of whoever asks.

Invariant: it serves for the length of the block, and leaves the process's signals alone. Called by envs/gateway/door.py
and recipes/serve.py.
"""

import asyncio
import contextlib
import socket
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager

import uvicorn
from starlette.applications import Starlette

_START_LIMIT_S = 30.0
_STOP_LIMIT_S = 10.0


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
    def capture_signals(self) -> Generator[None]:
        """Handles none."""
        yield
