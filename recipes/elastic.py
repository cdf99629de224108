"""Growing and shrinking a run while it runs: the wish in its directory, and who fulfils it.

Invariant: a wish is one whole file, read again before each worker or server that comes or goes; what cannot be had is
an event, and the run goes on as it was. The wish holds for restarts too.
Written by `python -m recipes.scale`; read by recipes/rloo_parts.py and recipes/play.py.
"""

import asyncio
import dataclasses
import json
import logging
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from actors.errors import ClusterError
from actors.inference_pool import InferencePool, ServerHandle
from actors.rollout_pool import RolloutPool
from envs.errors import EpisodeError
from recipes.run import Run

logger = logging.getLogger(__name__)

WISH = "scale.json"
"""Name of the wish in the run directory."""
POLL_S = 1.0
DRAIN_S = 600.0
"""For what a server that goes samples; the rest goes on elsewhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """How many a run shall have; None leaves it as it is."""

    workers: int | None = None
    """Rollout workers."""
    servers: int | None = None
    """Inference servers."""

    def __post_init__(self) -> None:
        for name, count in dataclasses.asdict(self).items():
            if count is not None and not isinstance(count, int):
                raise ValueError(f"{name} must be a whole number, got {count!r}")
            if count is not None and count < 1:
                raise ValueError(f"{name} must be >= 1, got {count}; stop the run to end them all")


def ask(directory: Path, wish: Wish) -> Wish:
    """Leaves a wish in the run directory, beside what was wished before; returns what now holds."""
    new = {name: count for name, count in dataclasses.asdict(wish).items() if count is not None}
    merged = dataclasses.replace(asked(directory), **new)
    partial = directory / f".{WISH}.{os.getpid()}"
    partial.write_text(json.dumps(dataclasses.asdict(merged)) + "\n")
    os.replace(partial, directory / WISH)
    return merged


def asked(directory: Path) -> Wish:
    """The wish in the run directory; ValueError when somebody wrote something else there."""
    path = directory / WISH
    try:
        return Wish(**json.loads(path.read_text()))
    except FileNotFoundError:
        return Wish()
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path} is no wish ({error}): write it with python -m recipes.scale") from None


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """What comes and goes one at a time."""

    name: str
    wished: Callable[[Wish], int | None]
    count: Callable[[], int]
    grow: Callable[[], Awaitable[Any]]
    shrink: Callable[[], Awaitable[Any]]


def worker_fleet(pool: RolloutPool) -> Fleet:
    """The rollout workers; one that goes ends its last Groups first."""
    return Fleet(
        name="rollout workers",
        wished=lambda wish: wish.workers,
        count=lambda: len(pool.fleet.serving()),
        grow=pool.add_worker,
        shrink=lambda: pool.remove_worker(pool.fleet.serving()[-1][0]),
    )


def server_fleet(pool: InferencePool) -> Fleet:
    """The inference servers; one that comes has proven its weights, one that goes has ended what it sampled.

    The youngest goes, or before it one that is down: the others may be all that samples.
    """
    return Fleet(
        name="inference servers",
        wished=lambda wish: wish.servers,
        count=lambda: len(pool.servers),
        grow=pool.add,
        shrink=lambda: pool.remove(min(reversed(pool.servers), key=_is_sampling).name, DRAIN_S),
    )


def _is_sampling(server: ServerHandle) -> bool:
    return server.version is not None


def fixed_fleet(name: str, wished: Callable[[Wish], int | None], count: int, why: str) -> Fleet:
    """One that stays as it is, for a reason that a wish is answered with."""

    async def refuse() -> None:
        raise ValueError(why)

    return Fleet(name=name, wished=wished, count=lambda: count, grow=refuse, shrink=refuse)


@asynccontextmanager
async def scaling(run: Run, *fleets: Fleet) -> AsyncIterator[None]:
    """Fulfils the run's wishes for the length of the block, each fleet's on its own."""
    tasks = [asyncio.create_task(_follow(run, fleet)) for fleet in fleets]
    for task in tasks:
        task.add_done_callback(lambda t: t.cancelled() or logger.error("scaling ended", exc_info=t.exception()))
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _follow(run: Run, fleet: Fleet) -> None:
    refused: int | str | None = None  # asked for again, it would be refused again
    while True:
        wished: int | str | None = None
        try:
            wished = fleet.wished(asked(run.directory))
            if wished is not None and wished != refused:
                await _step_towards(run, fleet, wished)
        except (ClusterError, EpisodeError, OSError, ValueError) as error:  # SandboxRefused: a node that cannot play
            wished = str(error) if wished is None else wished
            if wished != refused:
                run.event("not scaled", fleet=fleet.name, why=str(error), now=fleet.count())
            refused = wished
        await asyncio.sleep(POLL_S)


async def _step_towards(run: Run, fleet: Fleet, wished: int) -> None:
    """One more or one less, if there are not as many as wished."""
    before, began = fleet.count(), time.monotonic()
    if before == wished:
        return
    await (fleet.grow() if before < wished else fleet.shrink())
    run.event("scaled", fleet=fleet.name, now=fleet.count(), wished=wished, seconds=time.monotonic() - began)
