"""Finding the servers of a pool from any process of the run: Ray's list of named actors is the directory.

Invariant: what it lists are actors of this pool that were not killed for good; whether one samples, it says itself.
Made by actors/inference_pool.py, used by actors/inference_sampler.py in workers.
"""

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

import ray
import ray.util

from actors.calls import call
from actors.errors import ClusterError
from actors.inference_errors import ServerNotReady
from actors.inference_wire import Address

logger = logging.getLogger(__name__)

LOCATE_TIMEOUT_S = 30.0


class ActorDirectory:
    """The servers of one pool. Its servers are actors named POOL/SERVER."""

    def __init__(self, pool: str) -> None:
        self._prefix = f"{pool}/"
        self._locators: dict[str, ActorLocator] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return ActorDirectory, (self._prefix.removesuffix("/"),)

    async def __call__(self) -> Mapping[str, "ActorLocator"]:
        """Server names to what tells where each listens."""
        names = await asyncio.to_thread(ray.util.list_named_actors)
        servers = [name.removeprefix(self._prefix) for name in names if name.startswith(self._prefix)]
        self._locators = {
            server: self._locators.get(server) or ActorLocator(self._prefix, server) for server in servers
        }
        return self._locators


class ActorLocator:
    """Asks a server's actor where it listens."""

    def __init__(self, prefix: str, name: str) -> None:
        self._prefix = prefix
        self._name = name
        self._actor: Any = None

    async def __call__(self) -> Address | None:
        """None while the actor is gone, restarting or without weights."""
        try:
            if self._actor is None:
                self._actor = await asyncio.to_thread(ray.get_actor, self._prefix + self._name)
            health = await call(self._actor.health, deadline_s=LOCATE_TIMEOUT_S, what=f"address of {self._name}")
        except (ClusterError, ServerNotReady, ValueError) as error:  # ValueError: no actor of that name any more
            logger.warning("server=%s has no address: %s", self._name, str(error).splitlines()[-1])
            return None
        return health.address if health.is_ready else None
