"""The way from one process to one server: where it listens, and the connection to it.

Invariant: a Route has at most one connection, made when it is needed and made anew after the server came back.
Held by actors/inference_sampler.py.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from actors.inference_errors import ServerGone
from actors.inference_wire import Address, Channel

logger = logging.getLogger(__name__)

REST_S = 0.5
"""Pause before a server that failed is asked again."""

Locator = Callable[[], Awaitable[Address | None]]
"""Gives a server's address, or None while it samples nothing."""


class Route:
    """The way to one server."""

    def __init__(self, name: str, locate: Locator) -> None:
        self.name = name
        self._locate = locate
        self._connecting: asyncio.Task[None] | None = None
        self._channel: Channel | None = None
        self._rests_until = 0.0

    @property
    def channel(self) -> Channel:
        """The open connection."""
        assert self._channel is not None, "is_open was asked first"
        return self._channel

    @property
    def load(self) -> int:
        """Requests on the server, as far as this process knows; 0 without a connection."""
        return 0 if self._channel is None else max(self._channel.num_pending, self._channel.server_load)

    def rest(self, failed: Channel | None, *, is_gone: bool) -> None:
        """Leaves the server alone for a moment; a connection that is gone is dropped, else its other requests go on."""
        if failed is not self._channel:
            return
        self._rests_until = asyncio.get_running_loop().time() + REST_S
        if is_gone and failed is not None:
            failed.close()
            self._channel = None

    def retire(self) -> None:
        """No new request goes to this server; what is on its way there ends there."""
        self._rests_until = float("inf")

    @property
    def is_open(self) -> bool:
        """Whether requests may be sent now."""
        is_connected = self._channel is not None and not self._channel.is_closed
        return is_connected and asyncio.get_running_loop().time() >= self._rests_until

    def connect(self) -> "asyncio.Task[None] | None":
        """The attempt to connect that is under way, begun here where one is due; None where none is.

        Nobody has to wait for it: a server that starts may not say for half a minute where it listens.
        """
        if self._connecting is None or self._connecting.done():
            if self.is_open or asyncio.get_running_loop().time() < self._rests_until:
                return None
            self._connecting = asyncio.create_task(self._connect())
        return self._connecting

    async def _connect(self) -> None:
        address = await self._locate()
        try:
            self._channel = None if address is None else await Channel.open(self.name, address)
        except ServerGone as error:
            logger.warning("%s", error)
            self._channel = None
        if self._channel is None:
            self.rest(None, is_gone=True)
