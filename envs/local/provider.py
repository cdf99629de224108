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
import os
import socket
from collections import OrderedDict
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from envs.creation import CreationGate, RateGate
from envs.errors import SandboxDied, SandboxError, SandboxRefused
from envs.lease import LeasedSandbox, LeaseTerms, sweep
from envs.local.cgroups import BoxLimits, Cgroups, find_cgroups
from envs.local.labels import is_orphan, kill_labelled
from envs.local.layout import Layout, bwrap_arguments, plan_layout
from envs.local.leases import LeaseFiles
from envs.local.sandbox import LocalSandbox, SandboxLimits
from envs.local.slots import Slot, SlotConfig, SlotPool
from envs.local.staging import Staged, default_cache_dir, stage
from envs.sandbox import Sandbox
from envs.steps import separate_tasks
from envs.task import Environment, Task
from envs.users import users_at_work

_MIB = 1 << 20
_MAX_LAYOUTS = 256
_PROOF = "grep -E '^(CapEff|CapBnd|NoNewPrivs|Seccomp):' /proc/self/status; cat /proc/net/dev; readlink /proc/self/ns/*"


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
    max_output_bytes: int = 1 << 20
    """Kept of a command's stdout, and of its stderr."""
    start_timeout_s: float = 60.0
    grace_s: float = 30.0
    """How late past its timeout a command's answer may come before the box counts as dead."""
    cache_dir: Path | None = None
    """For the compiled agent; None: /var/cache/thresher for root, else ~/.cache/thresher."""
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
        self._leases = LeaseFiles(self.config.cache_dir or default_cache_dir())
        self._creating = asyncio.Semaphore(self.config.max_creating)
        self._preparing: asyncio.Task[_Prepared] | None = None
        self._layouts: OrderedDict[tuple[str, Path], Layout] = OrderedDict()

    def check(self, task: Task) -> None:
        """Raises SandboxRefused when this provider cannot run the Task; starts nothing."""
        for asked in (task, *separate_tasks(task)):
            _refuse_unoffered(asked, network=self.config.network)
        self._layout(task)

    async def provenance(self) -> dict[str, str]:
        """What a run's record says of its isolation."""
        prepared = await self._prepare()
        limits = "rlimits" if prepared.cgroups is None else "cgroup v2" if prepared.cgroups.is_v2 else "cgroup v1"
        return {"provider": self.name, "base": "host /usr, read-only", "network": "none", "limits": limits}

    @asynccontextmanager
    async def start(self, task: Task, *, owner: str) -> AsyncGenerator[Sandbox]:
        """See SandboxProvider."""
        self.check(task)
        prepared = await self._prepare()
        async with self._creating, self._gate.admit():
            sandbox = await self._create(prepared, self._layout(task), task.environment, owner)
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
        with contextlib.suppress(SandboxRefused):  # no cgroups, so none were left
            await asyncio.to_thread(_sweep, find_cgroups(self.config.cgroup_parent))
        await asyncio.to_thread(_sweep, None)
        await sweep(self)

    async def close(self) -> None:
        """Ends every parked launcher and removes its cgroups; a later `start` begins anew."""
        preparing, self._preparing = self._preparing, None
        if preparing is not None:
            with contextlib.suppress(SandboxError):  # whoever started has been told
                await (await preparing).pool.close()

    def _layout(self, task: Task) -> Layout:
        key = (task.id, task.path)
        layout = self._layouts.get(key)
        if layout is None:
            layout = self._layouts[key] = plan_layout(task)
            if len(self._layouts) > _MAX_LAYOUTS:
                self._layouts.popitem(last=False)
        self._layouts.move_to_end(key)
        return layout

    async def _prepare(self) -> "_Prepared":
        """Once: compile, find cgroups, sweep, and prove with one box that isolation holds."""
        if self._preparing is None or (self._preparing.done() and self._preparing.exception() is not None):
            self._preparing = asyncio.create_task(self._prepare_now())
        return await asyncio.shield(self._preparing)

    async def _prepare_now(self) -> "_Prepared":
        staged = await asyncio.to_thread(stage, self.config.cache_dir)
        cgroups = self._find_cgroups()
        await asyncio.to_thread(_sweep, cgroups)
        await sweep(self)
        slots = SlotConfig(
            staged=staged,
            cgroups=cgroups,
            max_open_files=self.config.max_open_files,
            soft_max_processes=self.config.soft_max_processes,
            deadline_s=self.config.start_timeout_s,
        )
        pool = SlotPool(slots, max_parked=self.config.max_parked)
        prepared = _Prepared(staged=staged, cgroups=cgroups, pool=pool)
        try:
            await self._prove(prepared)
        except BaseException:
            await asyncio.shield(pool.close())
            raise
        return prepared

    def _find_cgroups(self) -> Cgroups | None:
        try:
            return find_cgroups(self.config.cgroup_parent)
        except SandboxRefused:
            if not self.config.allow_soft_limits:
                raise
            return None

    async def _prove(self, prepared: "_Prepared") -> None:
        layout = Layout(workdir="/", env={"PATH": "/usr/bin:/bin"}, files=())
        try:
            sandbox = await self._create(prepared, layout, Environment(), "proof")
        except SandboxError as error:
            raise SandboxRefused(f"{error}; {_remedy(str(error))}") from error
        try:
            result = await sandbox.exec(_PROOF, timeout_s=30)
        finally:
            await sandbox.stop()
        _check_proof(result.stdout.decode())

    async def _create(
        self, prepared: "_Prepared", layout: Layout, environment: Environment, owner: str
    ) -> LocalSandbox:
        """A filled box. A parked launcher may have been killed meanwhile: that is seen only now, and tried again."""
        slot = await prepared.pool.take()
        try:
            return await self._create_in(slot, prepared, layout, environment, owner)
        except SandboxError:
            if not slot.is_broken:
                raise
        return await self._create_in(await prepared.pool.take(), prepared, layout, environment, owner)

    async def _create_in(
        self, slot: Slot, prepared: "_Prepared", layout: Layout, environment: Environment, owner: str
    ) -> LocalSandbox:
        config = self.config
        limits = SandboxLimits(
            max_output_bytes=config.max_output_bytes, grace_s=config.grace_s, request_s=config.start_timeout_s
        )
        release = partial(prepared.pool.give_back, slot)
        sandbox = LocalSandbox(slot, release, layout, limits, owner=owner)
        try:
            await self._start_box(prepared, slot, sandbox, environment)
            await sandbox.put(layout.files)
        except SandboxDied as error:
            await sandbox.stop()
            raise SandboxError(f"fill the sandbox: {error}") from error
        except BaseException:
            await sandbox.stop()
            raise
        return sandbox

    async def _start_box(
        self, prepared: "_Prepared", slot: Slot, sandbox: LocalSandbox, environment: Environment
    ) -> None:
        storage_mb = min(environment.storage_mb or self.config.default_storage_mb, self.config.max_storage_mb)
        memory_mb = environment.memory_mb or self.config.default_memory_mb
        limits = BoxLimits(
            memory_bytes=(memory_mb + storage_mb) * _MIB,  # the files' tmpfs counts as memory
            pids=self.config.max_processes,
            cpus=environment.cpus or self.config.default_cpus,
        )
        ours, theirs = socket.socketpair()
        errors, errors_inside = os.pipe()
        try:
            with theirs:
                slot.start(
                    bwrap_arguments(prepared.staged, disk_bytes=storage_mb * _MIB, mounts=self.config.mounts),
                    limits,
                    (theirs.fileno(), errors_inside),
                )
            await self._wait_ready(slot, sandbox, ours, errors)
        finally:
            if not sandbox.connection.is_attached:
                ours.close()  # else the connection owns it
            os.close(errors_inside)
            os.close(errors)

    async def _wait_ready(self, slot: Slot, sandbox: LocalSandbox, ours: socket.socket, errors: int) -> None:
        ours.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.create_connection(lambda: sandbox.connection, sock=ours)
        ready, ended = sandbox.connection.ready, slot.ended
        assert ended is not None
        await asyncio.wait({ready, ended}, timeout=self.config.start_timeout_s, return_when=asyncio.FIRST_COMPLETED)
        answer = ready.result() if ready.done() else None
        if answer is not None and answer.status == 0:
            return
        if not ready.done() and not ended.done():
            raise SandboxError(f"create sandbox: not ready in {self.config.start_timeout_s} s")
        await asyncio.wait({ended}, timeout=5)  # then all that bwrap has to say is said
        os.set_blocking(errors, False)
        raise SandboxError(f"create sandbox: {_read_text(errors) or 'the box ended at once'}")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prepared:
    staged: Staged
    cgroups: Cgroups | None
    pool: SlotPool


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


def _sweep(cgroups: Cgroups | None) -> None:
    """Ends what dead drivers left on this machine; they leave nothing but when killed at a bad moment."""
    kill_labelled(is_orphan)
    if cgroups is not None:
        cgroups.sweep()


def _check_proof(text: str) -> None:
    """`text` is what a box says of itself. Raises SandboxRefused unless each part of its isolation is there."""
    found = dict(line.split(":\t", 1) for line in text.splitlines() if ":\t" in line)
    wanted = {"CapEff": "0" * 16, "CapBnd": "0" * 16, "NoNewPrivs": "1", "Seccomp": "2"}
    for key, value in wanted.items():
        if found.get(key) != value:
            raise SandboxRefused(f"isolate: {key} is {found.get(key)}, not {value}; use a newer kernel or bubblewrap")
    for kind in ("cgroup", "ipc", "mnt", "net", "pid", "user", "uts"):
        if os.readlink(f"/proc/self/ns/{kind}") in text:
            raise SandboxRefused(f"isolate: the box shares this process's {kind} namespace; use a newer bubblewrap")


def _remedy(problem: str) -> str:
    if "launcher: /" in problem:
        return "give a cache_dir that every user may enter"
    return "enable user namespaces for this user (sysctl user.max_user_namespaces), with /proc not masked"


def _read_text(fd: int) -> str:
    try:
        return os.read(fd, 4096).decode(errors="replace").strip()
    except BlockingIOError:
        return ""
