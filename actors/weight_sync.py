"""Weight sync: new weights from the learner into every server, with proof that they arrived.

Invariant: a server that does not provably serve the version it names samples nothing more, and `publish` raises.
Called by recipes (`publish` after each optimizer step); the source is a learner group, the target an inference pool.
"""

import asyncio
import atexit
import logging
import os
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from actors.errors import ActorDied, DeadlineMissed
from actors.inference_config import UpdateMode
from actors.inference_engine import LoadReport
from actors.inference_errors import ServerNotReady, VersionProofError, WeightSyncError, WeightSyncTimeout
from actors.weight_proof import Noise, canary_groups
from actors.weight_stage import Manifest, version_label
from trajectories.schema import PolicyVersion

logger = logging.getLogger(__name__)

CANARY_SCALES = (0.5, 4.0)
"""Sizes of the canary's noise, relative to a tensor's root mean square; the second where the first is not seen."""
CANARY_FLOOR = 1e-3
"""Least movement of a log-probability that counts as seen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncConfig:
    """How weights travel and how hard they are checked."""

    directory: Path | None = None
    """Where stages lie; None takes shared memory. Servers on other nodes need a file system that they share."""
    mode: UpdateMode = UpdateMode.KEEP
    barrier: bool = True
    """True: `publish` returns when every server has the version. False: when it is staged; servers follow, and what fails
    there raises at the next publish."""
    canary: bool = True
    """Before a server's first use, disturb each group of tensors and see its log-probabilities move."""
    probe_tokens: int = 48
    """Length of the probe sequence."""
    probe_tolerance: float = 1e-5
    """Largest gap of a probe's log-probabilities to the learner's where both compute in float32."""
    probe_is_exact: bool = True
    """False where the learner computes in bfloat16: the gap is then an alarm, as it is for bfloat16 servers."""
    alarm_factor: float = 3.0
    """Alarm when the mean gap exceeds this many times the one of the first publish."""
    read_back_columns: int = 64
    """Columns of each prepacked weight that are read back at a sync; others at each version."""
    stage_timeout_s: float = 300.0
    load_timeout_s: float = 120.0
    """For one server's load, and for each push of the canary."""
    probe_timeout_s: float = 120.0

    def __post_init__(self) -> None:
        if self.probe_tokens < 2 or self.read_back_columns < 1:
            raise ValueError(
                f"probe_tokens must be >= 2 and read_back_columns >= 1, got {self.probe_tokens}, {self.read_back_columns}"
            )


class WeightSource(Protocol):
    """Who has the weights: a learner group."""

    async def stage_weights(self, directory: Path, version: PolicyVersion) -> Manifest:
        """Writes the current weights under `directory`."""
        ...

    async def probe_logprobs(self, ids: Sequence[int]) -> list[float]:
        """Log-probability of each of `ids` after the first under the current weights, at temperature 1."""
        ...


class SyncedServer(Protocol):
    """One server as weight sync sees it."""

    @property
    def name(self) -> str: ...

    async def load(self, manifest: Manifest, mode: UpdateMode, max_columns: int, deadline_s: float) -> LoadReport: ...

    async def load_disturbed(self, manifest: Manifest, noise: Noise, deadline_s: float) -> None: ...

    async def probe(self, ids: Sequence[int], deadline_s: float) -> list[float]: ...

    async def quarantine(self, reason: str, deadline_s: float) -> None: ...


class SyncTarget(Protocol):
    """The servers: an inference pool."""

    @property
    def servers(self) -> Sequence[SyncedServer]: ...

    @property
    def is_exact(self) -> bool:
        """True where the servers compute in float32."""
        ...

    def heal_with(self, heal: Callable[[SyncedServer], Awaitable[None]]) -> None:
        """`heal` gives a restarted server its weights; the target calls it before that server samples."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """What servers have to serve."""

    manifest: Manifest
    probe_ids: tuple[int, ...]
    probe_logprobs: tuple[float, ...]
    """The learner's, of `probe_ids[1:]`."""


class WeightSync:
    """Publishes versions, one at a time and in order."""

    def __init__(self, *, source: WeightSource, target: SyncTarget, config: SyncConfig | None = None) -> None:
        self._source = source
        self._target = target
        self._config = config or SyncConfig()
        self._directory = _make_directory(self._config.directory)
        self._order = asyncio.Lock()
        self._published: Published | None = None
        self._follower: asyncio.Task[dict[str, float]] | None = None
        self._stop_following = False
        self._proven: set[str] = set()
        self._first_gap: float | None = None
        self.num_syncs = 0
        self.num_syncs_in_flight = 0
        """Syncs during which at least one server was sampling."""
        target.heal_with(self._heal)

    async def publish(self, version: PolicyVersion) -> dict[str, float]:
        """Stages the source's weights as `version` and has every server load and prove them.

        Returns metrics under "sync/". Raises WeightSyncTimeout naming phase and server, VersionProofError naming
        server and tensors, WeightSyncError when no server is left.
        """
        async with self._order:
            await self._settle()
            began = time.perf_counter()
            self._published = await self._stage(version)
            metrics = {"sync/stage_s": time.perf_counter() - began}
            if self._config.barrier or not self._proven:
                return metrics | await self._roll(self._published)
            self._stop_following = False
            self._follower = asyncio.create_task(self._roll(self._published))
            return metrics

    async def close(self) -> None:
        """Waits for servers that follow, and removes the stages."""
        async with self._order:
            try:
                await self._settle()
            finally:
                shutil.rmtree(self._directory, ignore_errors=True)

    async def _stage(self, version: PolicyVersion) -> Published:
        config = self._config
        async with _deadline(f"staging version {version_label(version)}", config.stage_timeout_s):
            manifest = await self._source.stage_weights(self._directory, version)
        probe_ids = _probe_ids(manifest, config.probe_tokens)
        async with _deadline(f"the learner's probe of version {version_label(version)}", config.probe_timeout_s):
            logprobs = await self._source.probe_logprobs(probe_ids)
        if len(logprobs) != len(probe_ids) - 1:
            raise WeightSyncError(f"the learner's probe gave {len(logprobs)} values for {len(probe_ids)} ids")
        return Published(manifest=manifest, probe_ids=probe_ids, probe_logprobs=tuple(logprobs))

    async def _roll(self, published: Published) -> dict[str, float]:
        """One server after the other, so that all but one always sample. A dead one gets its weights when it is back."""
        reports: dict[str, LoadReport] = {}
        gaps: list[float] = []
        for server in self._target.servers:
            if self._stop_following:
                break
            try:
                reports[server.name], gap = await self._update(server, published)
                gaps.append(gap)
            except (ActorDied, ServerNotReady) as error:
                logger.warning("server=%s is down and misses version %s: %s", server.name, published.manifest.version, error)
        if not reports and not self._stop_following:
            raise WeightSyncError(f"no server took version {version_label(published.manifest.version)}: all are down")
        self.num_syncs += 1
        self.num_syncs_in_flight += any(report.num_in_flight for report in reports.values())
        return _metrics(reports, gaps) | {"sync/probe_alarm": float(self._is_alarming(gaps))}

    async def _update(self, server: SyncedServer, published: Published) -> tuple[LoadReport, float]:
        """Load, probe and, before the server's first use, canary; returns the report and the probe's mean gap."""
        report = await self._load(server, published)
        gap = await self._check_probe(server, published)
        if self._config.canary and server.name not in self._proven:
            await self._check_canary(server, published)
        self._proven.add(server.name)
        return report, gap

    async def _load(self, server: SyncedServer, published: Published) -> LoadReport:
        config = self._config
        what = f"loading version {version_label(published.manifest.version)} on {server.name}"
        async with _deadline(what, config.load_timeout_s):
            return await server.load(
                published.manifest, config.mode, config.read_back_columns, config.load_timeout_s
            )

    async def _check_probe(self, server: SyncedServer, published: Published) -> float:
        """Mean gap between the server's log-probabilities of the probe and the learner's; exact servers must match."""
        served = await self._probe(server, published)
        gaps = [abs(ours - theirs) for ours, theirs in zip(published.probe_logprobs, served, strict=True)]
        if self._target.is_exact and self._config.probe_is_exact and max(gaps) > self._config.probe_tolerance:
            reason = (
                f"{server.name} does not serve version {version_label(published.manifest.version)}: the probe's "
                f"log-probabilities differ from the learner's by {max(gaps):.2g} (tolerance "
                f"{self._config.probe_tolerance:g})"
            )
            await server.quarantine(reason, self._config.probe_timeout_s)
            raise VersionProofError(reason)
        return sum(gaps) / len(gaps)

    async def _check_canary(self, server: SyncedServer, published: Published) -> None:
        """Disturbs each group of tensors and sees the probe move; leaves the published weights loaded and probed."""
        began = time.perf_counter()
        base = await self._probe(server, published)
        noise_floor = max(_gaps(base, await self._probe(server, published)))
        names = [tensor.name for tensor in published.manifest.tensors]
        silent: list[str] = []
        for group, noise in canary_groups(names, published.probe_ids).items():
            if not await self._is_visible(server, published, noise, base, noise_floor):
                silent.append(group)
        await self._load(server, published)
        restored = max(_gaps(base, await self._probe(server, published)))
        if silent or restored > 2 * noise_floor + 1e-6:
            reason = f"canary of {server.name}: " + (
                f"new values of {', '.join(silent)} do not reach its log-probabilities"
                if silent
                else f"its log-probabilities moved by {restored:.2g} after the weights were restored"
            )
            await server.quarantine(reason, self._config.probe_timeout_s)
            raise VersionProofError(reason)
        logger.info("server=%s canary passed in %.1f s", server.name, time.perf_counter() - began)

    async def _is_visible(
        self, server: SyncedServer, published: Published, noise: Noise, base: list[float], noise_floor: float
    ) -> bool:
        """Whether the probe moves under this noise, first small and then large."""
        for scale in CANARY_SCALES:
            async with _deadline(f"canary push on {server.name}", self._config.load_timeout_s):
                await server.load_disturbed(
                    published.manifest, replace(noise, scale=scale), self._config.load_timeout_s
                )
            if max(_gaps(base, await self._probe(server, published))) > max(20 * noise_floor, CANARY_FLOOR):
                return True
        return False

    async def _probe(self, server: SyncedServer, published: Published) -> list[float]:
        async with _deadline(f"probing {server.name}", self._config.probe_timeout_s):
            return await server.probe(published.probe_ids, self._config.probe_timeout_s)

    async def _heal(self, server: SyncedServer) -> None:
        """Gives a restarted server the published weights and proves them anew, canary included."""
        async with self._order:
            if self._published is not None:
                self._proven.discard(server.name)
                await self._update(server, self._published)

    async def _settle(self) -> None:
        """Lets the follower end with the server it is at, and raises what failed there."""
        follower, self._follower = self._follower, None
        if follower is not None:
            self._stop_following = True
            await follower
        self._stop_following = False

    def _is_alarming(self, gaps: list[float]) -> bool:
        """Whether the mean gap grew well beyond that of the first publish."""
        if not gaps:
            return False
        gap = sum(gaps) / len(gaps)
        if self._first_gap is None:
            self._first_gap = gap
        is_alarming = gap > max(self._config.alarm_factor * self._first_gap, self._config.probe_tolerance)
        if is_alarming:
            logger.warning("probe gap %.3g, %.3g at the first publish", gap, self._first_gap)
        return is_alarming


def _metrics(reports: dict[str, LoadReport], gaps: list[float]) -> dict[str, float]:
    each = list(reports.values())
    metrics = {
        "sync/servers": float(len(each)),
        "sync/load_s": max((report.load_s for report in each), default=0.0),
        "sync/read_back_s": max((report.read_back_s for report in each), default=0.0),
        "sync/pause_s": max((report.pause_s for report in each), default=0.0),
        "sync/in_flight": float(sum(report.num_in_flight for report in each)),
        "sync/values_read_back": float(sum(report.num_values for report in each)),
        "sync/tensors_unread": float(max((len(report.unread) for report in each), default=0)),
        "sync/digest_mismatches": 0.0,
        "sync/probe_gap": max(gaps, default=0.0),
    }
    return metrics | {f"sync/in_flight/{name}": float(report.num_in_flight) for name, report in reports.items()}


def _gaps(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    return [abs(a - b) for a, b in zip(ours, theirs, strict=True)]


def _probe_ids(manifest: Manifest, num_tokens: int) -> tuple[int, ...]:
    """A fixed sequence that spreads over the vocabulary."""
    embedding = next((tensor for tensor in manifest.tensors if tensor.name.endswith("embed_tokens.weight")), None)
    if embedding is None:
        raise WeightSyncError("the stage has no embed_tokens.weight: cannot tell the vocabulary for the probe")
    return tuple(7919 * (position + 1) % embedding.shape[0] for position in range(num_tokens))


@asynccontextmanager
async def _deadline(what: str, deadline_s: float) -> AsyncIterator[None]:
    """Names the phase when it outlives its deadline; other failures of the cluster pass, dead actors among them."""
    try:
        async with asyncio.timeout(deadline_s):
            yield
    except (TimeoutError, DeadlineMissed) as error:
        raise WeightSyncTimeout(f"{what} took over {deadline_s:g} s") from error


def _make_directory(parent: Path | None) -> Path:
    """A directory for this run's stages, removed when the process ends."""
    parent = parent or Path("/dev/shm" if os.access("/dev/shm", os.W_OK) else tempfile.gettempdir())
    parent.mkdir(parents=True, exist_ok=True)
    directory = Path(tempfile.mkdtemp(prefix="thresher-weights-", dir=parent))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return directory
