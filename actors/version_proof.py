"""Proof that a server serves the version it names, by what it samples with: the probe and the canary.

Invariant: a server that fails a proof is quarantined before the error leaves here. The third proof, the digest of what
the kernels hold, is part of every load (actors/weight_extension.py). Called by actors/weight_sync.py.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Protocol

from actors.errors import DeadlineMissed
from actors.inference_config import UpdateMode
from actors.inference_engine import LoadReport
from actors.inference_errors import VersionProofError, WeightSyncError, WeightSyncTimeout
from actors.sync_config import SyncConfig
from actors.weight_noise import Noise, canary_groups
from actors.weight_stage import Manifest, version_label

logger = logging.getLogger(__name__)

CANARY_SCALES = (0.5, 4.0)
"""Sizes of the canary's noise, relative to a tensor's root mean square; the second where the first is not seen."""
CANARY_FLOOR = 1e-3
"""Least movement of a log-probability that counts as seen."""


class SyncedServer(Protocol):
    """One server as weight sync sees it; each method raises DeadlineMissed after its deadline, in seconds."""

    @property
    def name(self) -> str:
        """For messages."""
        ...

    async def load(
        self, manifest: Manifest, mode: UpdateMode, max_columns: int, admits: bool, deadline_s: float
    ) -> LoadReport:
        """Replaces the weights and reads them back; without `admits` the server samples nothing yet."""
        ...

    async def admit(self, deadline_s: float) -> None:
        """Lets it sample after such a load."""
        ...

    async def load_disturbed(self, manifest: Manifest, noise: Noise, deadline_s: float) -> None:
        """Pushes the stage with noise; the server samples nothing until the next load."""
        ...

    async def probe(self, ids: Sequence[int], deadline_s: float) -> list[float]:
        """Log-probability of each of `ids` after the first."""
        ...

    async def quarantine(self, reason: str, deadline_s: float) -> None:
        """Stops it from sampling until a later load succeeds."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """What servers have to serve."""

    manifest: Manifest
    probe_ids: tuple[int, ...]
    probe_logprobs: tuple[float, ...]
    """The learner's, of `probe_ids[1:]`."""


def probe_ids(manifest: Manifest, num_tokens: int) -> tuple[int, ...]:
    """A fixed sequence that spreads over the vocabulary."""
    embedding = next((tensor for tensor in manifest.tensors if tensor.name.endswith("embed_tokens.weight")), None)
    if embedding is None:
        raise WeightSyncError("the stage has no embed_tokens.weight: cannot tell the vocabulary for the probe")
    return tuple(7919 * (position + 1) % embedding.shape[0] for position in range(num_tokens))


async def load_published(server: SyncedServer, published: Published, config: SyncConfig, *, admits: bool) -> LoadReport:
    """Loads the published version; raises VersionProofError naming the tensors that a kernel does not hold."""
    what = f"loading version {version_label(published.manifest.version)} on {server.name}"
    async with deadline(what, config.load_timeout_s):
        return await server.load(
            published.manifest, config.mode, config.read_back_columns, admits, config.load_timeout_s
        )


async def check_probe(server: SyncedServer, published: Published, config: SyncConfig, *, is_exact: bool) -> float:
    """Mean gap of the probe's log-probabilities to the learner's; where `is_exact`, each must be within tolerance."""
    served = await _probe(server, published, config)
    gaps = _gaps(published.probe_logprobs, served)
    worst = max(gap / max(1.0, abs(value)) for gap, value in zip(gaps, published.probe_logprobs, strict=True))
    if is_exact and not worst <= config.probe_tolerance:
        await _reject(
            server,
            config,
            f"{server.name} does not serve version {version_label(published.manifest.version)}: the probe's "
            f"log-probabilities differ from the learner's by {worst:.2g} (tolerance {config.probe_tolerance:g})",
        )
    return sum(gaps) / len(gaps)


async def check_canary(server: SyncedServer, published: Published, config: SyncConfig) -> None:
    """Disturbs each group of tensors and sees the probe move; leaves the weights restored and requests kept out."""
    began = time.perf_counter()
    base = await _probe(server, published, config)
    jitter = max(_gaps(base, await _probe(server, published, config)))
    groups = canary_groups([tensor.name for tensor in published.manifest.tensors], published.probe_ids)
    silent = [
        group
        for group, noise in groups.items()
        if not await _is_visible(server, published, config, noise, base, jitter)
    ]
    await load_published(server, published, config, admits=False)
    restored = max(_gaps(base, await _probe(server, published, config)))
    if silent:
        await _reject(
            server,
            config,
            f"canary of {server.name}: new values of {', '.join(silent)} do not reach its log-probabilities",
        )
    if not restored <= 2 * jitter + config.probe_tolerance:
        await _reject(
            server,
            config,
            f"canary of {server.name}: log-probabilities differ by {restored:.2g} after the weights were restored",
        )
    logger.info("server=%s canary groups=%d passed in %.1f s", server.name, len(groups), time.perf_counter() - began)


@asynccontextmanager
async def deadline(what: str, deadline_s: float) -> AsyncIterator[None]:
    """Names the phase when it outlives its deadline; other failures of the cluster pass, dead actors among them."""
    try:
        async with asyncio.timeout(deadline_s):
            yield
    except (TimeoutError, DeadlineMissed) as error:
        raise WeightSyncTimeout(f"{what} took over {deadline_s:g} s") from error


async def _is_visible(
    server: SyncedServer, published: Published, config: SyncConfig, noise: Noise, base: list[float], jitter: float
) -> bool:
    """Whether the probe moves under this noise, first small and then large."""
    for scale in CANARY_SCALES:
        async with deadline(f"a canary push on {server.name}", config.load_timeout_s):
            await server.load_disturbed(published.manifest, replace(noise, scale=scale), config.load_timeout_s)
        if max(_gaps(base, await _probe(server, published, config))) > max(20 * jitter, CANARY_FLOOR):
            return True
    return False


async def _probe(server: SyncedServer, published: Published, config: SyncConfig) -> list[float]:
    async with deadline(f"probing {server.name}", config.probe_timeout_s):
        return await server.probe(published.probe_ids, config.probe_timeout_s)


async def _reject(server: SyncedServer, config: SyncConfig, reason: str) -> None:
    async with deadline(f"quarantining {server.name}", config.probe_timeout_s):
        await server.quarantine(reason, config.probe_timeout_s)
    raise VersionProofError(reason)


def _gaps(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    return [abs(a - b) for a, b in zip(ours, theirs, strict=True)]
