"""Weight sync: new weights from the learner into every server, with proof that they arrived.

Invariant: versions are published one at a time and in order, and a server that does not provably serve the version it
names samples nothing more while `publish` raises. Called by recipes after each optimizer step; the source is a learner
group, the target an inference pool.
"""

import asyncio
import atexit
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Protocol

from actors.engine_weights import LoadReport
from actors.errors import ActorDied
from actors.inference_config import DType, Transport
from actors.inference_errors import NoServerLeft, ServerNotReady
from actors.sync_config import SyncConfig
from actors.version_proof import (
    ProbeGaps,
    Prober,
    Published,
    SyncedServer,
    admit,
    ask_learner,
    check_canary,
    check_probe,
    deadline,
    load_published,
)
from actors.weight_stage import Manifest, version_label
from trajectories.schema import PolicyVersion

logger = logging.getLogger(__name__)

PREFIX = "thresher-weights-"
NEVER = PolicyVersion(lineage=0, n=0)
"""Sorts with the first version, before every later one."""


class WeightSource(Prober, Protocol):
    """Who has the weights: a learner group."""

    async def stage_weights(self, directory: Path, version: PolicyVersion, dtype: DType) -> Manifest:
        """Writes the current weights under `directory`, no wider than `dtype`; of trained adapters, these alone."""
        ...

    async def put_stage(self, manifest: Manifest) -> Manifest:
        """Puts a stage into Ray's object store."""
        ...


class SyncTarget(Protocol):
    """The servers: an inference pool."""

    @property
    def servers(self) -> Sequence[SyncedServer]:
        """All of them, those that are down included."""
        ...

    @property
    def dtype(self) -> DType:
        """In which the servers hold the weights and compute."""
        ...

    @property
    def vocab_size(self) -> int:
        """Token ids of the policy."""
        ...

    def heal_with(self, heal: Callable[[SyncedServer], Awaitable[None]]) -> None:
        """`heal` gives a restarted server its weights; the target calls it before that server samples."""
        ...


class WeightSync:
    """Publishes versions, one at a time and in order."""

    def __init__(
        self,
        *,
        source: WeightSource,
        target: SyncTarget,
        config: SyncConfig | None = None,
        on_served: Callable[[], None] | None = None,
    ) -> None:
        """`on_served` is called whenever a server took a version."""
        self._on_served = on_served
        self._source = source
        self._target = target
        self._config = config or SyncConfig()
        self._directory = _make_directory(self._config.directory)
        self._order = asyncio.Lock()
        self._published: Published | None = None
        self._follower: asyncio.Task[dict[str, float]] | None = None
        self._stop_following = False
        self._served: dict[str, PolicyVersion] = {}
        """The version that each proven server took last."""
        self._proven: dict[str, int] = {}
        """The process of each server that took weights first, and passed the canary if it is on."""
        self._locks: dict[str, asyncio.Lock] = {}
        """One per server: a roll and a restarted server's canary never meet."""
        self._gaps = ProbeGaps(self._config)
        self.num_syncs = 0
        self.num_syncs_in_flight = 0
        """Syncs during which at least one server was sampling."""
        target.heal_with(self._heal)

    @property
    def probe_gap_mean(self) -> float:
        """Mean |server - learner| of the probe's log-probabilities, both on the same weights, over all syncs."""
        return self._gaps.mean

    async def publish(self, version: PolicyVersion, *, barrier: bool = False) -> dict[str, float]:
        """Stages the source's weights as `version` and has every server load and prove them.

        With `barrier` every living server has it when this returns, whatever the config says. Returns metrics under
        "sync/"; without barrier those of the servers come with the next publish. Raises WeightSyncTimeout naming phase
        and server, VersionProofError naming server and tensors, NoServerLeft when all are down.
        """
        async with self._order:
            metrics = await self._settle()
            began = time.perf_counter()
            self._published = await self._stage(version)
            metrics["sync/stage_s"] = time.perf_counter() - began
            if barrier or self._config.barrier or not self._served:
                return metrics | await self._roll(self._published)
            self._follower = asyncio.create_task(self._roll(self._published))
            return metrics

    async def close(self) -> None:
        """Waits for servers that follow, and removes the stages."""
        async with self._order:
            try:
                await self._settle()
            except NoServerLeft as error:  # nor is anything sampled any more
                logger.warning("%s", error)
            finally:
                shutil.rmtree(self._directory, ignore_errors=True)

    async def _stage(self, version: PolicyVersion) -> Published:
        config = self._config
        async with deadline(f"staging version {version_label(version)}", config.stage_timeout_s):
            manifest = await self._source.stage_weights(self._directory, version, self._target.dtype)
            if config.transport is Transport.OBJECT_STORE:
                manifest = await self._source.put_stage(manifest)
        probe = await ask_learner(self._source, version, config, vocab_size=self._target.vocab_size)
        return Published(manifest=manifest, probe=probe)

    async def _roll(self, published: Published) -> dict[str, float]:
        """One server after the other, the most stale first, so that all but one sample on.

        A dead one gets its weights when it is back. A roll that is to stop for a newer version ends after a server.
        """
        reports: dict[str, LoadReport] = {}
        gaps: list[float] = []
        for server in sorted(self._target.servers, key=lambda server: self._served.get(server.name, NEVER)):
            if self._stop_following and reports:
                break
            try:
                reports[server.name], gap = await self._update(server, published)
                gaps.append(gap)
            except (ActorDied, ServerNotReady) as error:
                version = version_label(published.manifest.version)
                logger.warning("server=%s is down, version=%s waits for it: %s", server.name, version, error)
        if not reports:
            raise NoServerLeft(f"no server took version {version_label(published.manifest.version)}: all are down")
        self.num_syncs += 1
        self.num_syncs_in_flight += any(report.num_in_flight for report in reports.values())
        return _metrics(reports, gaps) | {"sync/probe_alarm": float(self._gaps.is_alarming(gaps))}

    async def _update(self, server: SyncedServer, published: Published) -> tuple[LoadReport, float]:
        """Load and probe; before a process's first use the canary too, and requests are kept out until it passed."""
        async with self._lock_of(server):
            return await self._update_alone(server, published)

    async def _update_alone(self, server: SyncedServer, published: Published) -> tuple[LoadReport, float]:
        config = self._config
        is_known = not config.canary or self._is_proven(server)
        report = await load_published(server, published, config, admits=is_known)
        is_exact = self._target.dtype is DType.FLOAT32 and config.probe_is_exact
        gap = await check_probe(server, published.probe, config, is_exact=is_exact)
        if not is_known:
            await check_canary(server, published, config)
            await admit(server, config)
        if not is_known or not config.canary:
            self._proven[server.name] = server.pid
        self._served[server.name] = published.manifest.version
        self._gaps.add(gap)
        if self._on_served is not None:
            self._on_served()
        return report, gap

    async def _heal(self, server: SyncedServer) -> None:
        """Gives a restarted server the published weights and proves them anew, canary included."""
        async with self._order, self._lock_of(server):
            if self._published is None:
                return
            is_served = self._served.get(server.name) == self._published.manifest.version
            if not (is_served and self._is_proven(server)):  # a roll may have come to it before
                await self._update_alone(server, self._published)

    def _is_proven(self, server: SyncedServer) -> bool:
        """Whether this very process took weights that were proven, by the canary too if it is on."""
        return server.pid != 0 and self._proven.get(server.name) == server.pid

    def _lock_of(self, server: SyncedServer) -> asyncio.Lock:
        return self._locks.setdefault(server.name, asyncio.Lock())

    async def _settle(self) -> dict[str, float]:
        """Lets the follower end with the server it is at; returns its metrics, or raises what failed there."""
        follower, self._follower = self._follower, None
        if follower is None:
            return {}
        self._stop_following = True
        try:
            return await follower
        finally:
            self._stop_following = False


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
        "sync/probe_gap": max(gaps, default=0.0),
    }
    return metrics | {f"sync/in_flight/{name}": float(report.num_in_flight) for name, report in reports.items()}


def _make_directory(parent: Path | None) -> Path:
    """A directory for this run's stages, removed when the process ends."""
    if parent is None:
        parent = Path("/dev/shm" if os.access("/dev/shm", os.W_OK) else tempfile.gettempdir())
        _sweep(parent)
    parent.mkdir(parents=True, exist_ok=True)
    directory = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir=parent))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return directory


def _sweep(parent: Path) -> None:
    """Removes what killed runs of this machine left in its memory."""
    for path in parent.glob(f"{PREFIX}*-*"):
        pid = path.name.removeprefix(PREFIX).split("-")[0]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            logger.info("removing stages of a run that died: %s", path)
            shutil.rmtree(path, ignore_errors=True)
