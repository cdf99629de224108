"""How a run's weights get from its learner to its servers: what cannot be is refused, the rest is filled in and made.

Invariant: what learner and servers must agree on (adapters, transport, turns on a GPU) is said once, in the recipe's
config, and copied here. Called by recipes/rloo.py and recipes/rloo_parts.py.
"""

import dataclasses
import importlib.util
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from actors.inference_config import InferencePoolConfig, Transport
from actors.placement import Place, shared_gpus
from actors.sync_config import SyncConfig
from learners.config import Precision

if TYPE_CHECKING:
    from recipes.rloo import Config

logger = logging.getLogger(__name__)

STAGED = "files or object_store"


def refuse_impossible(config: "Config") -> None:
    """ValueError, with its remedy, for a transport or turns that learner and servers as configured cannot have."""
    transport, server, has_gpus = config.sync.transport, config.policy.pool.server, _on_gpus(config)
    if has_gpus != (config.learners.resources.num_gpus > 0) and (transport.is_direct or server.colocated):
        raise ValueError(
            "learner and servers must both have GPUs here: set policy.server.num_gpus and learner.resources.num_gpus"
        )
    if transport.is_direct and not has_gpus:
        raise ValueError(
            f"sync.transport {transport} goes from GPU to GPU, and the servers have none (policy.server.num_gpus=0); "
            f"use {STAGED}"
        )
    if transport.is_direct and config.learner.lora.rank:
        raise ValueError(f"adapters are small and do not go by sync.transport {transport}; use {STAGED}")
    if transport is Transport.IPC and not server.colocated:
        raise ValueError("sync.transport ipc maps memory of one GPU: set policy.server.colocated, or use nccl")
    if transport in (Transport.NCCL, Transport.SHARDED_RDT) and server.colocated:
        raise ValueError(
            f"sync.transport {transport} goes between different GPUs, and policy.server.colocated shares them; use ipc"
        )
    if server.colocated:
        _refuse_turns(config)


def _refuse_turns(config: "Config") -> None:
    """Whoever sleeps while the learner trains samples nothing ahead of it."""
    if config.max_staleness:
        raise ValueError(
            f"policy.server.colocated takes turns, so nothing is sampled ahead: set max_staleness 0, "
            f"got {config.max_staleness}"
        )
    num_servers, num_ranks = config.policy.pool.num_servers, config.learners.num_ranks
    if _on_gpus(config) and num_servers != num_ranks:
        raise ValueError(
            f"policy.server.colocated pairs each server with a learner rank on one GPU: got "
            f"policy.num_servers={num_servers} and learner.num_ranks={num_ranks}"
        )


def require_packages(transport: Transport) -> None:
    """ValueError for a transport whose own package is not installed."""
    if transport is Transport.SHARDED_RDT and importlib.util.find_spec("nixl") is None:
        raise ValueError(
            "sync.transport sharded_rdt needs the package nixl on every node: pip install nixl, or use nccl"
        )


def serving(config: "Config") -> InferencePoolConfig:
    """The servers of the run, told how weights come to them."""
    lora = config.learner.lora
    server = dataclasses.replace(
        config.policy.pool.server,
        lora_rank=lora.rank,
        lora_targets=lora.targets if lora.rank else (),
        transport=config.sync.transport,
    )
    return dataclasses.replace(config.policy.pool, server=server)


def serving_evaluation(config: "Config") -> InferencePoolConfig:
    """The servers of an evaluation beside training: on GPUs of their own, never asleep, and weights are staged."""
    pool = serving(config)
    transport = evaluation_sync(config).transport
    return dataclasses.replace(pool, server=dataclasses.replace(pool.server, colocated=False, transport=transport))


def evaluation_sync(config: "Config") -> SyncConfig:
    """How an evaluation's servers get weights: staged, for a direct transfer moves all servers of training at once."""
    sync = proven(config)
    return dataclasses.replace(sync, transport=Transport.OBJECT_STORE) if sync.transport.is_direct else sync


def proven(config: "Config") -> SyncConfig:
    """The run's sync, its probe exact where learner and servers compute alike."""
    return dataclasses.replace(config.sync, probe_is_exact=config.learner.precision is Precision.FP32)


def training_sync(config: "Config") -> SyncConfig:
    """How the run's own servers get weights."""
    # At staleness 0 a Group may start only when every server has the version, so publishing waits for them all.
    return dataclasses.replace(proven(config), barrier=config.sync.barrier or config.max_staleness == 0)


@asynccontextmanager
async def shared_places(config: "Config") -> AsyncIterator[list[Place]]:
    """Where pairs of a learner rank and a server go that take turns on a GPU; none where they do not."""
    server, learners = config.policy.pool.server, config.learners
    if server.colocated and not server.num_gpus:
        logger.info("servers pause while the learner trains; on CPU vLLM frees no memory of a server that sleeps")
    if not (server.colocated and server.num_gpus):
        yield []
        return
    async with shared_gpus(
        learners.num_ranks,
        num_cpus=server.num_cpus + learners.resources.num_cpus,
        what=f"{learners.num_ranks} pairs of a learner rank and a server",
        deadline_s=learners.start_deadline_s,
    ) as places:
        yield places


def _on_gpus(config: "Config") -> bool:
    return config.policy.pool.server.num_gpus > 0
