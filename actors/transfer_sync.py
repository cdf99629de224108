"""Weight sync between GPUs: learner ranks send, all servers receive at once, nothing is staged.

Invariant: `publish` returns when every living server serves the version and has proven it; a server that is new or came
back samples nothing before the next publish, which has everybody meet anew. Called by recipes in the place of
actors/weight_sync.py where the transport is one of vLLM's own. Why: docs/decisions/065.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

from actors.errors import ActorDied, DeadlineMissed
from actors.inference_config import DType, Transport, UpdateMode
from actors.inference_errors import NoServerLeft, ServerNotReady
from actors.inference_pool import InferencePool
from actors.learner_group import LearnerGroup
from actors.sync_config import SyncConfig
from actors.version_proof import (
    CANARY_SCALES,
    Probe,
    ProbedServer,
    ProbeGaps,
    Prober,
    admit,
    ask_learner,
    check_probe,
    check_restored,
    deadline,
    gaps_of,
    is_seen,
    probe_server,
)
from actors.vllm_transfer import Sending
from actors.weight_noise import Noise, canary_groups
from actors.weight_stage import version_label
from actors.weight_sync import WeightSync
from trajectories.schema import PolicyVersion

logger = logging.getLogger(__name__)


class Sender(Prober, Protocol):
    """Who has the weights: a learner group."""

    @property
    def num_restarts(self) -> int:
        """How often its ranks are new ones."""
        ...

    async def open_transfer(
        self, backend: Transport, servers: Sequence[Any], server_ranks: Sequence[int], deadline_s: float
    ) -> tuple[str, ...]:
        """Meets the servers' actors; the names of all tensors."""
        ...

    async def send_weights(self, sending: Sending) -> None:
        """Sends the current weights; returns when all servers hold them."""
        ...


class ReceivingServer(ProbedServer, Protocol):
    """One server that weights are sent to."""

    @property
    def actor(self) -> Any:
        """What learner rank 0 calls."""
        ...

    @property
    def pid(self) -> int:
        """Its process, as last heard of; 0 while it starts or restarts."""
        ...

    @property
    def num_running(self) -> int:
        """Requests that it was sampling, as last heard of."""
        ...

    async def refresh(self, deadline_s: float) -> None:
        """Asks how it is; ActorDied or ServerNotReady when it is not up."""
        ...

    async def close_transfer(self, deadline_s: float) -> None:
        """Has it leave the group that it is in."""
        ...


class ReceivingFleet(Protocol):
    """The servers: an inference pool."""

    @property
    def servers(self) -> Sequence[ReceivingServer]:
        """All of them, those that are down included."""
        ...

    @property
    def ranks_per_server(self) -> int:
        """GPUs of each."""
        ...

    @property
    def dtype(self) -> DType:
        """In which the servers hold the weights and compute."""
        ...

    @property
    def vocab_size(self) -> int:
        """Token ids of the policy."""
        ...

    def heal_with(self, heal: Callable[[ReceivingServer], Awaitable[None]]) -> None:
        """`heal` is called for a restarted server; see InferencePool."""
        ...


def make_sync(
    config: SyncConfig, *, source: LearnerGroup, target: InferencePool, on_served: Callable[[], None] | None = None
) -> "WeightSync | TransferSync":
    """What publishes versions by the config's transport."""
    kind = TransferSync if config.transport.is_direct else WeightSync
    return kind(source=source, target=target, config=config, on_served=on_served)


class TransferSync:
    """Publishes versions by one of vLLM's transfers, one at a time and in order."""

    def __init__(
        self,
        *,
        source: Sender,
        target: ReceivingFleet,
        config: SyncConfig,
        on_served: Callable[[], None] | None = None,
    ) -> None:
        """`on_served` is called when all servers took a version."""
        self._source = source
        self._target = target
        self._config = config
        self._on_served = on_served
        self._order = asyncio.Lock()
        self._met: tuple[Any, ...] = ()
        """Who is in the group: the learner's ranks by their number of restarts, servers by name and process."""
        self._names: tuple[str, ...] = ()
        self._proven: set[tuple[str, int]] = set()
        """Servers, by name and process, that passed the canary."""
        self._gaps = ProbeGaps(config)
        self.num_syncs = 0
        self.num_syncs_in_flight = 0
        """Syncs before which at least one server was sampling."""
        target.heal_with(self._wait_for_publish)

    @property
    def probe_gap_mean(self) -> float:
        """Mean |server - learner| of the probe's log-probabilities, both on the same weights, over all syncs."""
        return self._gaps.mean

    async def publish(self, version: PolicyVersion, *, barrier: bool = True) -> dict[str, float]:
        """Sends the source's weights as `version`, and has every living server prove them; metrics under "sync/".

        There is always a barrier. Raises WeightSyncTimeout naming the phase, VersionProofError naming server and
        tensors, NoServerLeft when all are down.
        """
        async with self._order:
            began = time.perf_counter()
            probe = await ask_learner(self._source, version, self._config, vocab_size=self._target.vocab_size)
            servers = await self._meet()
            num_in_flight = sum(server.num_running for server in servers)
            fresh = [server for server in servers if self._config.canary and _identity(server) not in self._proven]
            await self._send(version, admits=not fresh)
            sent_s = time.perf_counter() - began
            gaps = await self._probe(servers, probe)
            if fresh:
                await self._check_canaries(list(gaps), probe)
            for server, gap in gaps.items():
                await server.refresh(self._config.probe_timeout_s)  # the pool routes by what it last heard
                self._gaps.add(gap)
            self.num_syncs += 1
            self.num_syncs_in_flight += num_in_flight > 0
            if self._on_served is not None:
                self._on_served()
            return {
                "sync/servers": float(len(gaps)),
                "sync/load_s": sent_s,
                "sync/in_flight": float(num_in_flight),
                "sync/probe_gap": max(gaps.values()),
                "sync/probe_alarm": float(self._gaps.is_alarming(list(gaps.values()))),
            }

    async def close(self) -> None:
        """Nothing is left to wait for or to remove."""

    async def _meet(self) -> list[ReceivingServer]:
        """The servers that are up; everybody meets anew when they, or the learner's ranks, are not those before."""
        servers = await self._living()
        met = (self._source.num_restarts, *map(_identity, servers))
        if met == self._met:
            return servers
        limit = self._config.load_timeout_s
        async with deadline(f"the meeting of the learner with {len(servers)} servers", limit):
            for server in servers:
                if _identity(server) in self._met:
                    await server.close_transfer(limit)
            ranks = [self._target.ranks_per_server] * len(servers)
            actors = [server.actor for server in servers]
            self._names = await self._source.open_transfer(self._config.transport, actors, ranks, limit)
        self._met = met
        logger.info("the learner met servers=%s", ",".join(server.name for server in servers))
        return servers

    async def _probe(self, servers: Sequence[ReceivingServer], probe: Probe) -> dict[ReceivingServer, float]:
        """The gap of each server that still lives; NoServerLeft when none does."""
        is_exact = self._target.dtype is DType.FLOAT32 and self._config.probe_is_exact
        gaps: dict[ReceivingServer, float] = {}
        for server in servers:
            try:
                gaps[server] = await check_probe(server, probe, self._config, is_exact=is_exact)
            except (ActorDied, ServerNotReady) as error:
                logger.warning(
                    "server=%s died with its new weights, and gets the version after: %s", server.name, error
                )
        if not gaps:
            raise NoServerLeft("no server took weights: all are down")
        return gaps

    async def _living(self) -> list[ReceivingServer]:
        """Servers that answer; NoServerLeft when none does."""
        servers: list[ReceivingServer] = []
        for server in self._target.servers:
            try:
                await server.refresh(self._config.probe_timeout_s)
                servers.append(server)
            except (ActorDied, DeadlineMissed, ServerNotReady) as error:
                logger.warning("server=%s is down and gets the version after this: %s", server.name, error)
        if not servers:
            raise NoServerLeft("no server takes weights: all are down")
        return servers

    async def _send(self, version: PolicyVersion, *, admits: bool, noise: Noise | None = None) -> None:
        # What is kept must not go on with weights that are disturbed, or not proven yet.
        mode = self._config.mode if admits else UpdateMode.ABORT
        sending = Sending(version=version, mode=mode, admits=admits, noise=noise)
        async with deadline(f"sending version {version_label(version)} to all servers", self._config.load_timeout_s):
            await self._source.send_weights(sending)

    async def _check_canaries(self, servers: Sequence[ReceivingServer], probe: Probe) -> None:
        """As check_canary, of all servers at once, for none receives alone; lets requests in afterwards."""
        config = self._config
        bases = {server: await probe_server(server, probe, config) for server in servers}
        jitters = {s: max(gaps_of(base, await probe_server(s, probe, config))) for s, base in bases.items()}
        silent: dict[ReceivingServer, list[str]] = {server: [] for server in servers}
        for group, noise in canary_groups(self._names, probe.ids).items():
            unseen = list(servers)
            for scale in CANARY_SCALES:
                if unseen:
                    await self._send(probe.version, admits=False, noise=replace(noise, scale=scale))
                probes = [(server, await probe_server(server, probe, config)) for server in unseen]
                unseen = [s for s, now in probes if not is_seen(bases[s], now, jitter=jitters[s])]
            for server in unseen:
                silent[server].append(group)
        await self._send(probe.version, admits=False)
        for server, base in bases.items():
            restored = max(gaps_of(base, await probe_server(server, probe, config)))
            await check_restored(server, config, silent=silent[server], restored=restored, jitter=jitters[server])
        for server in servers:
            await admit(server, config)
            self._proven.add(_identity(server))

    async def _wait_for_publish(self, server: ReceivingServer) -> None:
        """A restarted server gets its weights with the next version: learner ranks, busy until then, cannot send."""
        logger.info("server=%s is back and waits for the next version", server.name)


def _identity(server: ReceivingServer) -> tuple[str, int]:
    return server.name, server.pid
