"""LocalProvider: Sandboxes on this machine, isolated by bubblewrap, without daemon or network.

Invariant: a box is isolated as the config says or SandboxRefused is raised; nothing ever runs unisolated.
Called by envs/episode.py through the SandboxProvider Protocol; made by envs/providers.py.

    provider = LocalProvider(LocalConfig())
    async with provider.start(task, owner="t-1") as sandbox:
        result = await sandbox.exec("echo hi", timeout_s=10)
    await provider.close()
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from envs.creation import CreationGate, RateGate
from envs.errors import SandboxDied, SandboxError, SandboxRefused
from envs.lease import LeasedSandbox, LeaseTerms, sweep
from envs.local.boxes import BoxSize, BoxStarter
from envs.local.cgroups import BoxLimits, Cgroups, find_cgroups
from envs.local.isolation import prove_isolation
from envs.local.labels import is_orphan, kill_labelled
from envs.local.leases import LeaseFiles
from envs.local.prepared import PreparedEnvironments
from envs.local.sandbox import LocalSandbox, SandboxLimits
from envs.local.slots import SlotConfig, SlotPool
from envs.local.staging import default_cache_dir, stage
from envs.local.warm import WarmPool
from envs.sandbox import Sandbox
from envs.steps import separate_tasks
from envs.task import Environment, Task
from envs.users import users_at_work

logger = logging.getLogger(__name__)

_MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalConfig:
    """The local provider. A Task's own resources go before the defaults."""

    network: str = "refuse"
    """What a Task that asks for "public" network gets: "refuse", or "none" (loopback only; recorded in provenance)."""
    allow_soft_limits: bool = False
    """Without writable cgroups, run with rlimits only: memory is bound per process, CPU not at all."""
    default_memory_mb: int = 2048
    """Memory of a box, its files apart."""
    default_storage_mb: int = 1024
    """Size of the tmpfs that holds all its files."""
    max_storage_mb: int = 4096
    """A Task that asks for more storage is given this."""
    default_cpus: float = 1.0
    max_processes: int = 256
    max_open_files: int = 1024
    soft_max_processes: int = 4096
    """Under soft limits: of the user that boxes run as, over all its boxes."""
    max_creating: int = 8
    """Sandboxes created at once; more wait."""
    max_parked: int = 256
    """Launchers kept for later boxes, about 0.2 MB each."""
    max_warm: int = 2
    """Boxes started ahead, about 3 MB each, for Tasks that ask for as much as the last two did; 0: none."""
    max_layers_mb: int = 8192
    """Of prepared environments on disk, those of all Tasks and runs; the ones used longest ago go first."""
    max_output_bytes: int = 1 << 20
    """Kept of a command's stdout, and of its stderr."""
    start_timeout_s: float = 60.0
    grace_s: float = 30.0
    """How late past its timeout a command's answer may come before the box counts as dead."""
    cache_dir: Path | None = None
    """For the compiled agent and prepared environments; None: /var/cache/thresher for root, else ~/.cache/thresher."""
    cgroup_parent: Path | None = None
    """A delegated cgroup v2 directory; None: that of this process."""
    mounts: tuple[str, ...] = ()
    """Directories of this machine that every box sees, read-only, as HOST:INSIDE (an agent's programs, say). Every user
    must be able to enter them."""

    def __post_init__(self) -> None:
        if self.network not in ("none", "refuse"):
            raise ValueError(f'network must be "none" or "refuse", got {self.network!r}')
        for mount in self.mounts:
            parts = mount.split(":")
            if len(parts) != 2 or not all(part.startswith("/") and part != "/" for part in parts):
                raise ValueError(f"mounts must be HOST:INSIDE, two absolute paths, got {mount!r}")
        for name in ("default_memory_mb", "default_storage_mb", "max_processes", "max_creating"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, got {getattr(self, name)}")
        for name in ("max_parked", "max_warm", "max_layers_mb"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be >= 0, got {getattr(self, name)}")


class LocalProvider:
    """Implements SandboxProvider and LeaseRegister. Use it from one event loop; `close` it at the end."""

    name = "bubblewrap"

    def __init__(
        self,
        config: LocalConfig | None = None,
        *,
        terms: LeaseTerms | None = None,
        gate: CreationGate | None = None,
    ) -> None:
        self.config = config or LocalConfig()
        self._terms = terms or LeaseTerms()
        self._gate = gate or RateGate()
        root = self.config.cache_dir or default_cache_dir()
        self._leases = LeaseFiles(root)
        self._creating = asyncio.Semaphore(self.config.max_creating)
        self._preparing: asyncio.Task[_Prepared] | None = None
        self._warm = WarmPool(self._start_bare, self._hold_warm, most=self.config.max_warm)
        self._environments = PreparedEnvironments(
            root, self._start_build, max_mb=self.config.max_layers_mb, mounts=self.config.mounts
        )

    def check(self, task: Task) -> None:
        """Raises SandboxRefused when this provider cannot run the Task; starts nothing."""
        for asked in (task, *separate_tasks(task)):
            _refuse_unoffered(asked, network=self.config.network)
        self._environments.check(task)

    async def provenance(self) -> dict[str, str]:
        """What a run's record says of its isolation."""
        prepared = await self._prepare()
        limits = "rlimits" if prepared.cgroups is None else "cgroup v2" if prepared.cgroups.is_v2 else "cgroup v1"
        return {"provider": self.name, "base": "host /usr, read-only", "network": "none", "limits": limits}

    @asynccontextmanager
    async def start(self, task: Task, *, owner: str) -> AsyncGenerator[Sandbox]:
        """See SandboxProvider."""
        self.check(task)
        await self._prepare()
        await self._environments.of(task)  # before a box waits for it
        size = self._size(task.environment)
        sandbox = await self._take_warm(size, task, owner) or await self._create(size, task, owner)
        self._warm.refill(size)
        try:
            with self._leases.hold(self._terms.lease(owner), sandbox.label):
                yield sandbox
        finally:
            await sandbox.stop()

    async def list_leases(self) -> list[LeasedSandbox]:
        """See LeaseRegister."""
        return await asyncio.to_thread(self._leases.list)

    async def remove(self, sandbox: LeasedSandbox) -> None:
        """See LeaseRegister."""
        await asyncio.to_thread(self._leases.remove, sandbox.id)

    async def sweep_machine(self) -> None:
        """Ends what dead drivers left on this machine, leases or not: processes, control groups, lease files."""
        cgroups = None
        with contextlib.suppress(SandboxRefused):  # no cgroups, so none were left
            cgroups = find_cgroups(self.config.cgroup_parent)
        await self._sweep(cgroups)

    async def close(self) -> None:
        """Ends every box that waits and every parked launcher, with its cgroups; a later `start` begins anew."""
        await self._environments.close()
        await self._warm.close()
        preparing, self._preparing = self._preparing, None
        if preparing is not None:
            with contextlib.suppress(SandboxError):  # whoever started has been told
                await (await preparing).boxes.pool.close()

    async def _prepare(self) -> "_Prepared":
        """Once: compile, find cgroups, sweep, and prove with one box that isolation holds."""
        if self._preparing is None or (self._preparing.done() and self._preparing.exception() is not None):
            self._preparing = asyncio.create_task(self._prepare_now())
        return await asyncio.shield(self._preparing)

    async def _prepare_now(self) -> "_Prepared":
        staged = await asyncio.to_thread(stage, self.config.cache_dir)
        cgroups = self._find_cgroups()
        await self._sweep(cgroups)
        slots = SlotConfig(
            staged=staged,
            cgroups=cgroups,
            max_open_files=self.config.max_open_files,
            soft_max_processes=self.config.soft_max_processes,
            deadline_s=self.config.start_timeout_s,
        )
        limits = SandboxLimits(
            max_output_bytes=self.config.max_output_bytes,
            grace_s=self.config.grace_s,
            request_s=self.config.start_timeout_s,
        )
        pool = SlotPool(slots, max_parked=self.config.max_parked)
        boxes = BoxStarter(staged=staged, pool=pool, mounts=self.config.mounts, limits=limits)
        try:
            await prove_isolation(boxes, self._size(Environment()))
        except BaseException:
            await asyncio.shield(pool.close())
            raise
        return _Prepared(cgroups=cgroups, boxes=boxes)

    async def _sweep(self, cgroups: Cgroups | None) -> None:
        """What dead drivers left behind when they were killed at a bad moment."""
        await asyncio.to_thread(kill_labelled, is_orphan)
        if cgroups is not None:
            await asyncio.to_thread(cgroups.sweep)
        await asyncio.to_thread(self._environments.sweep)
        await sweep(self)

    def _find_cgroups(self) -> Cgroups | None:
        try:
            return find_cgroups(self.config.cgroup_parent)
        except SandboxRefused:
            if not self.config.allow_soft_limits:
                raise
            return None

    async def _take_warm(self, size: BoxSize, task: Task, owner: str) -> LocalSandbox | None:
        """A box that waited, filled; None when none did, or it was killed meanwhile."""
        sandbox = await self._warm.take(size)
        if sandbox is not None:
            try:
                await self._fill(sandbox, task, owner)
            except SandboxError as error:
                logger.info("a warm box was of no use to owner=%s: %s", owner, error)
                return None
        return sandbox

    async def _create(self, size: BoxSize, task: Task, owner: str) -> LocalSandbox:
        sandbox = await self._start_bare(size)
        await self._fill(sandbox, task, owner)
        return sandbox

    async def _fill(self, sandbox: LocalSandbox, task: Task, owner: str) -> None:
        """Makes the box the Task's, or stops it. Raises SandboxError."""
        try:
            environment = await self._environments.of(task)  # anew where its layer went while the box started
            with environment.opened() as content:
                await sandbox.fill(environment.layout, content, owner=owner)
        except (SandboxDied, FileNotFoundError) as error:
            await sandbox.stop()
            raise SandboxError(f"fill the sandbox: {error}") from error
        except BaseException:
            await sandbox.stop()
            raise

    async def _start_bare(self, size: BoxSize) -> LocalSandbox:
        """A box that is no Task's yet, the caller's to stop."""
        prepared = await self._prepare()
        async with self._creating, self._gate.admit():
            return await prepared.boxes.start(size)

    @asynccontextmanager
    async def _start_build(self, task: Task) -> AsyncGenerator[LocalSandbox]:
        """A bare box with twice the Task's room, as its files are packed in it."""
        storage_mb = 2 * (task.environment.storage_mb or self.config.default_storage_mb)
        sandbox = await self._start_bare(self._size(replace(task.environment, storage_mb=storage_mb)))
        try:
            with self._leases.hold(self._terms.lease(f"environment of {task.id}"), sandbox.label):
                yield sandbox
        finally:
            await sandbox.stop()

    def _hold_warm(self, sandbox: LocalSandbox) -> AbstractContextManager[None]:
        return self._leases.hold(self._terms.lease("warm"), sandbox.label)

    def _size(self, environment: Environment) -> BoxSize:
        storage_mb = min(environment.storage_mb or self.config.default_storage_mb, self.config.max_storage_mb)
        memory_mb = environment.memory_mb or self.config.default_memory_mb
        limits = BoxLimits(
            memory_bytes=(memory_mb + storage_mb) * _MIB,  # the files' tmpfs counts as memory
            pids=self.config.max_processes,
            cpus=environment.cpus or self.config.default_cpus,
        )
        return BoxSize(disk_bytes=storage_mb * _MIB, limits=limits)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prepared:
    cgroups: Cgroups | None
    boxes: BoxStarter


def _refuse_unoffered(task: Task, *, network: str) -> None:
    """Raises SandboxRefused for what the Task's environment asks for and no box here has; nothing is passed over."""
    environment = task.environment
    if environment.network_mode == "allowlist":
        raise SandboxRefused(f"task {task.id}: network_mode allowlist is not enforced here; use no-network")
    if environment.network_mode == "public" and network == "refuse":
        raise SandboxRefused(
            f"task {task.id}: wants a public network, and boxes here have none; set its network_mode to no-network, or "
            'play it with loopback only: network="none"'
        )
    asked = {
        "gpus": environment.gpus,
        "tpu": environment.tpu,
        "os windows": environment.os == "windows",
        "a compose file": task.compose_file,
        "a user beside root": [user for user in users_at_work(task) if user not in ("root", "0", 0)],
    }
    for name, value in asked.items():
        if value:
            raise SandboxRefused(f"task {task.id}: wants {name}, which no box here has; use another sandbox provider")
