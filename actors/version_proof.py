"""Proof that a server serves the version it names, by what it samples with: the probe and the canary.

Invariant: a server that fails a proof is quarantined before the error leaves here. The third proof, the digest of what
the kernels hold, is part of every load of whole weights (actors/weight_extension.py). Called by actors/weight_sync.py
and actors/transfer_sync.py.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Protocol

from actors.engine_weights import LoadReport
from actors.errors import DeadlineMissed
from actors.inference_config import UpdateMode
from actors.inference_errors import VersionProofError, WeightSyncError, WeightSyncTimeout
from actors.sync_config import SyncConfig
from actors.weight_noise import Noise, canary_groups
from actors.weight_stage import Manifest, version_label
from trajectories.schema import PolicyVersion

logger = logging.getLogger(__name__)

CANARY_SCALES = (0.5, 4.0)
"""Sizes of the canary's noise, relative to a tensor's root mean square; the second where the first is not seen."""
CANARY_FLOOR = 1e-3
"""Least movement of a log-probability that counts as seen."""


class Prober(Protocol):
    """Who knows what the current weights say: a learner group."""

    async def probe_logprobs(self, ids: Sequence[int]) -> list[float]:
        """Log-probability of each of `ids` after the first under the current weights, at temperature 1."""
        ...


class ProbedServer(Protocol):
    """One server whose version is proven; each method raises DeadlineMissed after its deadline, in seconds."""

    @property
    def name(self) -> str:
        """For messages."""
        ...

    async def admit(self, deadline_s: float) -> None:
        """Lets it sample after an update that kept requests out."""
        ...

    async def probe(self, ids: Sequence[int], deadline_s: float) -> list[float]:
        """Log-probability of each of `ids` after the first."""
        ...

    async def quarantine(self, reason: str, deadline_s: float) -> None:
        """Stops it from sampling until a later load succeeds."""
        ...


class SyncedServer(ProbedServer, Protocol):
    """One server that loads stages."""

    @property
    def pid(self) -> int:
        """Its process; 0 while that is down or out of reach."""
        ...

    async def load(
        self, manifest: Manifest, mode: UpdateMode, max_columns: int, admits: bool, deadline_s: float
    ) -> LoadReport:
        """Replaces the weights and reads them back; without `admits` the server samples nothing yet."""
        ...

    async def load_disturbed(self, manifest: Manifest, noise: Noise, deadline_s: float) -> None:
        """Pushes the stage with noise; the server samples nothing until the next load."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """What the learner says to a fixed sequence, and so must each server of the same version."""

    version: PolicyVersion
    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """The learner's, of `ids[1:]`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """What servers have to serve."""

    manifest: Manifest
    probe: Probe


class ProbeGaps:
    """Mean |server - learner| of the probe at each update, and whether it grew."""

    def __init__(self, config: SyncConfig) -> None:
        self._config = config
        self._first: float | None = None
        self._all: list[float] = []

    @property
    def mean(self) -> float:
        """Over all updates so far; NaN before the first."""
        return sum(self._all) / len(self._all) if self._all else float("nan")

    def add(self, gap: float) -> None:
        """One server's, at one update."""
        self._all.append(gap)

    def is_alarming(self, gaps: Sequence[float]) -> bool:
        """Whether the mean of one publish grew well beyond that of the first."""
        if not gaps:
            return False
        gap = sum(gaps) / len(gaps)
        if self._first is None:
            self._first = gap
        is_alarming = gap > max(self._config.alarm_factor * self._first, self._config.probe_tolerance)
        if is_alarming:
            logger.warning("probe gap %.3g, but %.3g at the first publish", gap, self._first)
        return is_alarming


def probe_ids(vocab_size: int, num_tokens: int) -> tuple[int, ...]:
    """A fixed sequence that spreads over the vocabulary."""
    return tuple(7919 * (position + 1) % vocab_size for position in range(num_tokens))


async def load_published(server: SyncedServer, published: Published, config: SyncConfig, *, admits: bool) -> LoadReport:
    """Loads the published version; raises VersionProofError naming the tensors that a kernel does not hold."""
    what = f"loading version {version_label(published.manifest.version)} on {server.name}"
    async with deadline(what, config.load_timeout_s):
        return await server.load(
            published.manifest, config.mode, config.read_back_columns, admits, config.load_timeout_s
        )


async def check_probe(server: ProbedServer, probe: Probe, config: SyncConfig, *, is_exact: bool) -> float:
    """Mean gap of the probe's log-probabilities to the learner's; where `is_exact`, each must be within tolerance."""
    gaps = gaps_of(probe.logprobs, await probe_server(server, probe, config))
    worst = max(gap / max(1.0, abs(value)) for gap, value in zip(gaps, probe.logprobs, strict=True))
    if is_exact and not worst <= config.probe_tolerance:
        await reject(
            server,
            config,
            f"{server.name} does not serve version {version_label(probe.version)}: the probe's "
            f"log-probabilities differ from the learner's by {worst:.2g} (tolerance {config.probe_tolerance:g})",
        )
    return sum(gaps) / len(gaps)


async def check_canary(server: SyncedServer, published: Published, config: SyncConfig) -> None:
    """Disturbs each group of tensors and sees the probe move; leaves the weights restored and requests kept out."""
    began = time.perf_counter()
    base = await probe_server(server, published.probe, config)
    jitter = max(gaps_of(base, await probe_server(server, published.probe, config)))
    groups = canary_groups([tensor.name for tensor in published.manifest.tensors], published.probe.ids)
    silent = [
        group
        for group, noise in groups.items()
        if not await _is_visible(server, published, config, noise, base, jitter)
    ]
    await load_published(server, published, config, admits=False)
    restored = max(gaps_of(base, await probe_server(server, published.probe, config)))
    await check_restored(server, config, silent=silent, restored=restored, jitter=jitter)
    logger.info("server=%s canary groups=%d passed in %.1f s", server.name, len(groups), time.perf_counter() - began)


async def check_restored(
    server: ProbedServer, config: SyncConfig, *, silent: Sequence[str], restored: float, jitter: float
) -> None:
    """VersionProofError for groups whose noise was not seen, or when the probe did not come back to what it was."""
    if silent:
        groups = ", ".join(silent)
        await reject(
            server, config, f"canary of {server.name}: new values of {groups} do not reach its log-probabilities"
        )
    if not restored <= 2 * jitter + config.probe_tolerance:
        await reject(
            server,
            config,
            f"canary of {server.name}: log-probabilities differ by {restored:.2g} after the weights were restored",
        )


def is_seen(before: Sequence[float], after: Sequence[float], *, jitter: float) -> bool:
    """Whether a probe moved, well beyond what it does without noise."""
    return max(gaps_of(before, after)) > max(20 * jitter, CANARY_FLOOR)


async def ask_learner(source: Prober, version: PolicyVersion, config: SyncConfig, *, vocab_size: int) -> Probe:
    """The learner's probe of its current weights, which are `version`."""
    ids = probe_ids(vocab_size, config.probe_tokens)
    async with deadline(f"the learner's probe of version {version_label(version)}", config.probe_timeout_s):
        logprobs = await source.probe_logprobs(ids)
    if len(logprobs) != len(ids) - 1:
        raise WeightSyncError(f"the learner's probe gave {len(logprobs)} values for {len(ids)} ids")
    return Probe(version=version, ids=ids, logprobs=tuple(logprobs))


async def admit(server: ProbedServer, config: SyncConfig) -> None:
    """Lets requests in after proofs that kept them out."""
    async with deadline(f"admitting requests to {server.name}", config.load_timeout_s):
        await server.admit(config.load_timeout_s)


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
        if is_seen(base, await probe_server(server, published.probe, config), jitter=jitter):
            return True
    return False


async def probe_server(server: ProbedServer, probe: Probe, config: SyncConfig) -> list[float]:
    """What the server says to the probe's ids."""
    async with deadline(f"probing {server.name}", config.probe_timeout_s):
        return await server.probe(probe.ids, config.probe_timeout_s)


async def reject(server: ProbedServer, config: SyncConfig, reason: str) -> None:
    """Quarantines the server and raises VersionProofError."""
    async with deadline(f"quarantining {server.name}", config.probe_timeout_s):
        await server.quarantine(reason, config.probe_timeout_s)
    raise VersionProofError(reason)


def gaps_of(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """Absolute differences, one by one."""
    return [abs(a - b) for a, b in zip(ours, theirs, strict=True)]
