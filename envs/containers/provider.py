"""ContainerProvider: Sandboxes as containers of docker or podman.

Invariant: a container runs with memory, CPU and process limits, with the network that its Task asks for or less, and
never outlives its driver. Called by envs/episode.py through the SandboxProvider Protocol; made by envs/providers.py.

The agent of the local sandbox is the container's first process and is spoken to over the client's stdin and stdout, so
a command costs a message and not a start of the engine's client (docs/decisions/024).
"""

import asyncio
import contextlib
import itertools
import shlex
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from envs.containers.box import ContainerBox
from envs.containers.engine import Engine, EngineName
from envs.containers.images import Image, ImageCache
from envs.creation import CreationGate, RateGate
from envs.errors import SandboxDied, SandboxError, SandboxRefused
from envs.lease import LABEL, LeasedSandbox, LeaseTerms, lease_of, sweep
from envs.local.labels import make_label
from envs.local.layout import Layout, gather
from envs.local.sandbox import LocalSandbox, SandboxLimits
from envs.local.staging import Staged, stage
from envs.local.wire import Kind, encode_put
from envs.sandbox import Sandbox
from envs.task import Task

_AGENT_DIR = "/.thresher"
_SHELL = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": "/root",
    "LANG": "C.UTF-8",
    "TERM": "xterm-256color",
}
_LOG_DIRS = ("/logs", "/logs/agent", "/logs/verifier", "/logs/artifacts")
_numbers = itertools.count(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerConfig:
    """docker and podman. A Task's own resources go before the defaults."""

    binary: str | None = None
    """The engine's command line; None: its name."""
    engine_args: tuple[str, ...] = ()
    """Before every verb, such as --cgroup-manager=cgroupfs; paths are absolute, as the client starts elsewhere."""
    run_args: tuple[str, ...] = ()
    """For each container, such as --ulimit=nproc=4096:4096; paths as above."""
    build_args: tuple[str, ...] = ()
    """For each image build, such as --network=none."""
    runtime: str | None = None
    """OCI runtime; "runsc" runs each container in gVisor."""
    image: str | None = None
    """Used by Tasks that bring neither an image nor a Dockerfile; None refuses them."""
    network: str = "default"
    """What a Task that asks for "public" network gets: "default" (the engine's), "none" or "refuse"."""
    default_memory_mb: int = 2048
    default_cpus: float = 1.0
    max_processes: int = 512
    max_open_files: int = 4096
    max_output_bytes: int = 1 << 20
    """Kept of a command's stdout, and of its stderr."""
    max_creating: int = 8
    """Containers that this process creates at once; more wait."""
    start_timeout_s: float = 120.0
    pull_timeout_s: float = 900.0
    grace_s: float = 30.0
    """How late past its timeout a command's answer may come before the container counts as dead."""

    def __post_init__(self) -> None:
        if self.network not in ("default", "none", "refuse"):
            raise ValueError(f'network must be "default", "none" or "refuse", got {self.network!r}')
        for name in ("default_memory_mb", "default_cpus", "max_processes", "max_creating", "start_timeout_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be > 0, got {getattr(self, name)}")


class ContainerProvider:
    """Implements envs.sandbox.SandboxProvider and envs.lease.LeaseRegister. Use it from one event loop."""

    def __init__(
        self,
        name: EngineName,
        config: ContainerConfig | None = None,
        *,
        terms: LeaseTerms | None = None,
        gate: CreationGate | None = None,
        cache_dir: Path | None = None,
    ) -> None:
        self.config = config or ContainerConfig()
        self.name = str(name)
        self._terms = terms or LeaseTerms()
        self._gate = gate or RateGate()
        self._cache_dir = cache_dir
        self._engine = Engine(
            name=name,
            binary=_found(self.config.binary or str(name)),
            args=self.config.engine_args,
            runtime=self.config.runtime,
        )
        self._images = ImageCache(
            self._engine, build_args=self.config.build_args, pull_timeout_s=self.config.pull_timeout_s
        )
        self._creating = asyncio.Semaphore(self.config.max_creating)
        self._preparing: asyncio.Task[tuple[Staged, str]] | None = None

    def check(self, task: Task) -> None:
        """Raises SandboxRefused when this provider cannot run the Task; starts nothing."""
        mode = task.environment.network_mode
        if mode == "allowlist":
            raise SandboxRefused(f"task {task.id}: network_mode allowlist is not enforced by {self.name}; use daytona")
        if mode == "public" and self.config.network == "refuse":
            raise SandboxRefused(f'task {task.id}: wants a public network; allow network="default" or "none"')
        if task.environment.workdir and not task.environment.workdir.startswith("/"):
            raise SandboxRefused(f"task {task.id}: workdir {task.environment.workdir!r} must be an absolute path")

    async def provenance(self) -> dict[str, str]:
        """What a run's record says of its isolation."""
        _, version = await self._prepare()
        return {
            "provider": self.name,
            "version": version,
            "base": "image",
            "runtime": self.config.runtime or "default",
            "network": "none" if self.config.network == "none" else "as the task asks",
            "limits": "memory, cpus, pids",
            "storage": "not bounded",
        }

    @asynccontextmanager
    async def start(self, task: Task, *, owner: str) -> AsyncGenerator[Sandbox]:
        """See SandboxProvider."""
        self.check(task)
        staged, _ = await self._prepare()
        image = await self._images.get(self._with_image(task))
        async with self._creating, self._gate.admit():
            sandbox = await self._create(task, image, staged, owner)
        try:
            yield sandbox
        finally:
            await sandbox.stop()

    async def close(self) -> None:
        """Ends image builds under way, and removes abandoned containers."""
        await self._images.close()
        preparing, self._preparing = self._preparing, None
        if preparing is not None:
            with contextlib.suppress(SandboxError):  # whoever started has been told
                await preparing
                await sweep(self)

    async def list_leases(self) -> list[LeasedSandbox]:
        """See LeaseRegister."""
        ids = (await self._engine.call("ps", "--all", "--quiet", "--no-trunc", "--filter", f"label={LABEL}")).split()
        found = [(name, await self._engine.inspect("container", name)) for name in ids]
        return [
            LeasedSandbox(
                provider=self.name,
                id=name,
                lease=lease_of(known["Config"].get("Labels") or {}),
                state=str(known["State"].get("Status", "")),
            )
            for name, known in found
            if known is not None  # it went between the two calls
        ]

    async def remove(self, sandbox: LeasedSandbox) -> None:
        """See LeaseRegister."""
        await self._engine.remove(sandbox.id)

    def _with_image(self, task: Task) -> Task:
        """The Task, with the configured image where it brings none."""
        has_own = task.environment.docker_image or (task.path / "environment" / "Dockerfile").is_file()
        if has_own or self.config.image is None:
            return task
        return replace(task, environment=replace(task.environment, docker_image=self.config.image))

    async def _prepare(self) -> tuple[Staged, str]:
        """Once: find the engine, compile the agent, remove what dead drivers left."""
        if self._preparing is None or (self._preparing.done() and self._preparing.exception() is not None):
            self._preparing = asyncio.create_task(self._prepare_now())
        return await asyncio.shield(self._preparing)

    async def _prepare_now(self) -> tuple[Staged, str]:
        version = await self._engine.version()
        staged = await asyncio.to_thread(stage, self._cache_dir)
        await sweep(self)
        return staged, version

    async def _create(self, task: Task, image: Image, staged: Staged, owner: str) -> LocalSandbox:
        config = self.config
        limits = SandboxLimits(
            max_output_bytes=config.max_output_bytes, grace_s=config.grace_s, request_s=config.start_timeout_s
        )
        name = make_label(next(_numbers))
        args = tuple(self._run_args(task, image, staged, owner, name))
        box = ContainerBox(self._engine, name, args, deadline_s=config.start_timeout_s)
        sandbox = LocalSandbox(box, box.release, _layout(task, image), limits, owner=owner)
        try:
            await self._wait_ready(box, sandbox)
            await _fill(task, sandbox)
        except SandboxDied as error:
            await sandbox.stop()
            raise SandboxError(f"fill the container: {error}") from error
        except BaseException:
            if not sandbox.connection.is_attached:
                box.socket.close()
            await sandbox.stop()
            raise
        return sandbox

    def _run_args(self, task: Task, image: Image, staged: Staged, owner: str, name: str) -> Iterator[str]:
        environment, config = task.environment, self.config
        memory_mb = environment.memory_mb or config.default_memory_mb
        yield from ("--rm", "--interactive", "--name", name, "--pull=never", "--log-driver=none")
        for key, value in self._terms.lease(owner).labels().items():
            yield from ("--label", f"{key}={value}")
        yield from (f"--memory={memory_mb}m", f"--memory-swap={memory_mb}m")
        yield from (f"--cpus={environment.cpus or config.default_cpus:g}", f"--pids-limit={config.max_processes}")
        yield f"--ulimit=nofile={config.max_open_files}:{config.max_open_files}"
        if environment.network_mode == "no-network" or config.network == "none":
            yield "--network=none"
        yield from ("--user=0:0", "--workdir=/", f"--volume={staged.agent.parent}:{_AGENT_DIR}:ro")
        yield from config.run_args
        yield from (f"--entrypoint={_AGENT_DIR}/{staged.agent.name}", image.name, "--stdio")

    async def _wait_ready(self, box: ContainerBox, sandbox: LocalSandbox) -> None:
        await asyncio.get_running_loop().create_connection(lambda: sandbox.connection, sock=box.socket)
        ready, began = sandbox.connection.ready, time.monotonic()
        timeout_s = self.config.start_timeout_s
        await asyncio.wait({ready, box.ended}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        answer = ready.result() if ready.done() else None
        if answer is not None and answer.status == 0:
            return
        if not ready.done() and not box.ended.done():
            raise SandboxError(f"create container: not ready within {timeout_s:g} s")
        await asyncio.wait({box.ended}, timeout=10)  # then all that the engine has to say is said
        waited_s = time.monotonic() - began
        raise SandboxError(f"create container: {box.problem() or f'it ended after {waited_s:.1f} s'}")


def _found(binary: str) -> str:
    """A path means the same wherever a call starts; a plain name is looked up in PATH."""
    return str(Path(binary).absolute()) if "/" in binary else binary


def _layout(task: Task, image: Image) -> Layout:
    """The engine gives an image's variables to the first process only; commands are given them by the agent."""
    env = _SHELL | image.env | dict(task.environment.env)
    return Layout(workdir=task.environment.workdir or image.workdir, env=env)


async def _fill(task: Task, sandbox: LocalSandbox) -> None:
    """The directories that a harness and a verifier count on; an image's own working directory is left as it is."""
    await sandbox.put(gather(encode_put(Kind.DIR, path, mode=0o777) for path in _LOG_DIRS))
    made = await sandbox.exec(f"mkdir -p -- {shlex.quote(sandbox.workdir)}", timeout_s=60, cwd="/")
    if made.exit_code != 0:
        reason = made.stderr.decode(errors="replace").strip() or f"exit status {made.exit_code}"
        raise SandboxError(f"make {sandbox.workdir} in the container of task {task.id}: {reason}; does it have bash?")
