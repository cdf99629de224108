"""The cluster of a run: starts or joins Ray, and makes the groups of actors that a recipe needs.

Invariant: what a Cluster started ends with it. Called by recipes; the fleets themselves live in their own files.
"""

import logging
import os
import signal
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from actors.errors import PlacementError
from actors.threads import thread_environment

logger = logging.getLogger(__name__)

REPOSITORY = Path(__file__).resolve().parent.parent


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """Where a run's actors live."""

    address: str | None = None
    """Ray cluster to join; None joins the one of RAY_ADDRESS (as in a job) or else starts one for this run."""
    object_store_mb: int = 256
    """Object store of a cluster started here, in MiB; payloads travel by disk, so it may be small."""

    def __post_init__(self) -> None:
        if self.object_store_mb < 80:
            raise ValueError(f"object_store_mb must be >= 80, got {self.object_store_mb}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """What one actor takes."""

    num_cpus: float = 0.0
    """CPU cores reserved in Ray; 0 lets actors share the cores, as on a laptop."""
    num_gpus: float = 0.0
    threads: int = 1
    """Compute threads of the process."""

    def __post_init__(self) -> None:
        if self.num_cpus < 0 or self.num_gpus < 0 or self.threads < 1:
            raise ValueError(f"num_cpus and num_gpus must be >= 0 and threads >= 1, got {self}")

    def options(self) -> dict[str, object]:
        """Options for an actor of these resources."""
        return {
            "num_cpus": self.num_cpus,
            "num_gpus": self.num_gpus,
            "runtime_env": {"env_vars": thread_environment(self.threads)},
        }


@asynccontextmanager
async def start_cluster(config: ClusterConfig) -> AsyncIterator[None]:
    """Joins or starts Ray for the length of the block; inside another such block, that one's Ray serves."""
    if ray.is_initialized():
        yield
        return
    address = config.address or os.environ.get("RAY_ADDRESS")
    joining = {} if address else {"num_cpus": max(2, os.cpu_count() or 2), "include_dashboard": False}
    if not address:
        joining["object_store_memory"] = config.object_store_mb << 20
    handler = signal.getsignal(signal.SIGTERM)
    ray.init(
        address=address or "local",  # left to itself, Ray would join whatever a killed run left a note of
        logging_level=logging.ERROR,  # its warnings speak of defaults that this project chose
        log_to_driver=True,
        runtime_env={"env_vars": _worker_environment(joined=bool(address))},
        **joining,
    )
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)  # Ray's own exits at once; a recipe's saves the run first
    logger.info("cluster address=%s nodes=%d", address or "local", len(ray.nodes()))
    try:
        yield
    finally:
        ray.shutdown()


@asynccontextmanager
async def start_actor(of: Callable[..., Any], *args: Any, max_concurrency: int = 16) -> AsyncIterator[Any]:
    """An actor of the class `of`, for the length of the block; call its methods with actors/calls.call."""
    actor: Any = ray.remote(of).options(num_cpus=0, max_concurrency=max_concurrency).remote(*args)
    try:
        yield actor
    finally:
        ray.kill(actor)


def require(demands: Mapping[str, tuple[int, Resources]]) -> None:
    """Raises PlacementError naming the missing resource when the cluster can never hold what is asked for.

    `demands` maps the name of a fleet to (number of actors, resources of each).
    """
    total = ray.cluster_resources()
    for resource, unit in (("CPU", "num_cpus"), ("GPU", "num_gpus")):
        wanted = {name: count * getattr(each, unit) for name, (count, each) in demands.items()}
        if sum(wanted.values()) > total.get(resource, 0):
            asked = ", ".join(f"{name} {amount:g}" for name, amount in wanted.items() if amount)
            raise PlacementError(
                f"the cluster has {total.get(resource, 0):g} {resource} but this run asks for "
                f"{sum(wanted.values()):g} ({asked}); lower these counts or add nodes"
            )


def _worker_environment(*, joined: bool) -> dict[str, str]:
    """Variables for every worker. A submitted job's code arrives with its working directory; a local one's is here."""
    quiet = {"RAY_DEDUP_LOGS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    return quiet if joined else {**quiet, "PYTHONPATH": str(REPOSITORY)}
