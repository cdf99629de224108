"""DaytonaProvider: Sandboxes of a Daytona service, through its own client.

Invariant: every sandbox is labelled with its Lease and stops by itself (auto-stop, then deletion; a time to live), so
that one which nobody deletes still ends. A creation whose answer was lost is looked for by label and deleted.
Called by envs/episode.py through the SandboxProvider Protocol; made by envs/providers.py.
"""

import asyncio
import logging
import math
import os
import shlex
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from importlib import metadata
from uuid import uuid4

from daytona import (
    AsyncDaytona,
    AsyncSandbox,
    CreateSandboxFromImageParams,
    CreateSandboxFromSnapshotParams,
    DaytonaError,
    Image,
    ListSandboxesQuery,
    Resources,
)
from daytona import DaytonaConfig as ClientConfig
from daytona.common.errors import DaytonaNotFoundError

from envs.creation import CreationGate, RateGate
from envs.daytona.config import DaytonaConfig
from envs.daytona.errors import retried
from envs.daytona.sandbox import DaytonaSandbox, Inside
from envs.daytona.scripts import SETUP
from envs.errors import SandboxError, SandboxRefused
from envs.lease import LeasedSandbox, LeaseTerms, lease_of, sweep
from envs.sandbox import Sandbox
from envs.task import Task

logger = logging.getLogger(__name__)

_MANAGED = {"thresher.managed": "true"}
_KEY = "thresher.key"
_NOT_CREATED = (400, 401, 403, 404, 409, 422, 429)
"""Answers after which the service surely holds nothing of ours."""
_CAPTURE_S = 30.0

_Params = CreateSandboxFromImageParams | CreateSandboxFromSnapshotParams


class DaytonaProvider:
    """Implements envs.sandbox.SandboxProvider and envs.lease.LeaseRegister. Use it from one event loop."""

    name = "daytona"

    def __init__(
        self,
        config: DaytonaConfig | None = None,
        *,
        terms: LeaseTerms | None = None,
        gate: CreationGate | None = None,
    ) -> None:
        self.config = config or DaytonaConfig()
        self._terms = terms or LeaseTerms()
        self._gate = gate or RateGate()
        self._client: AsyncDaytona | None = None
        self._preparing: asyncio.Task[None] | None = None
        self._alive: dict[str, AsyncSandbox] = {}

    def check(self, task: Task) -> None:
        """Raises SandboxRefused when this provider cannot run the Task; starts nothing."""
        if task.environment.network_mode == "allowlist":
            raise SandboxRefused(f"task {task.id}: network_mode allowlist names no hosts that could be passed on")
        if task.environment.workdir and not task.environment.workdir.startswith("/"):
            raise SandboxRefused(f"task {task.id}: workdir {task.environment.workdir!r} must be an absolute path")

    async def provenance(self) -> dict[str, str]:
        """What a run's record says of its isolation; the key is tried here."""
        await self._prepare()
        return {
            "provider": self.name,
            "client": metadata.version("daytona"),
            "base": f"snapshot {self.config.snapshot}" if self.config.snapshot else "the task's image",
            "network": "as the task asks",
            "limits": "of the snapshot" if self.config.snapshot else "cpu, memory, disk, rounded up to whole units",
        }

    @asynccontextmanager
    async def start(self, task: Task, *, owner: str) -> AsyncGenerator[Sandbox]:
        """See SandboxProvider."""
        self.check(task)
        await self._prepare()
        params = self._params(task, owner)
        remote = await self._create(task, params)
        try:
            sandbox = await self._set_up(task, remote, owner)
            try:
                yield sandbox
            finally:
                await sandbox.stop()
        finally:
            if remote.id in self._alive:  # it could not be set up, or not be deleted
                await asyncio.shield(self._delete(remote))

    async def close(self) -> None:
        """Deletes what is still there of this provider's, and ends the client."""
        for remote in list(self._alive.values()):
            try:
                await self._delete(remote)
            except SandboxError as error:
                logger.warning("sandbox=%s left to its time to live: %s", remote.id, error)
        client, self._client, self._preparing = self._client, None, None
        if client is not None:
            await client.close()

    async def list_leases(self) -> list[LeasedSandbox]:
        """See LeaseRegister."""
        return [
            LeasedSandbox(provider=self.name, id=remote.id, lease=lease_of(remote.labels), state=str(remote.state))
            for remote in await self._find(_MANAGED)
        ]

    async def remove(self, sandbox: LeasedSandbox) -> None:
        """See LeaseRegister."""
        timeout_s = self.config.request_timeout_s

        async def delete() -> None:
            try:
                await (await self._open().get(sandbox.id)).delete(timeout_s)
            except DaytonaNotFoundError:
                return

        await retried(delete, f"delete daytona sandbox {sandbox.id}", deadline_s=timeout_s)

    def _open(self) -> AsyncDaytona:
        if self._client is None:
            key = os.environ.get(self.config.key_variable)
            if not key:
                raise SandboxRefused(f"daytona: {self.config.key_variable} is not set; put the key there")
            self._client = AsyncDaytona(
                ClientConfig(api_key=key, api_url=self.config.api_url, target=self.config.target)
            )
        return self._client

    async def _prepare(self) -> None:
        """Once: try the key, and remove what dead drivers left."""
        if self._preparing is None or (self._preparing.done() and self._preparing.exception() is not None):
            self._preparing = asyncio.create_task(self._prepare_now())
        await asyncio.shield(self._preparing)

    async def _prepare_now(self) -> None:
        for sandbox in await sweep(self):
            logger.info("swept sandbox=%s run=%s owner=%s", sandbox.id, sandbox.lease.run, sandbox.lease.owner)

    def _params(self, task: Task, owner: str) -> _Params:
        environment, config = task.environment, self.config
        dockerfile = task.path / "environment" / "Dockerfile"
        if config.snapshot is None and environment.docker_image is not None:
            image: str | Image | None = environment.docker_image
        else:
            image = Image.from_dockerfile(dockerfile) if config.snapshot is None and dockerfile.is_file() else None
        shared = {
            "labels": {**self._terms.lease(owner).labels(), **_MANAGED, _KEY: uuid4().hex},
            "env_vars": dict(environment.env),
            "auto_stop_interval": config.auto_stop_min,
            "auto_delete_interval": 0,  # once stopped, at once
            "ttl_minutes": math.ceil(self._terms.duration_s / 60),
            "network_block_all": environment.network_mode == "no-network" or None,
        }
        if image is None:
            snapshot = None if config.snapshot is None else config.snapshot.replace("{task}", task.id)
            return CreateSandboxFromSnapshotParams.model_validate({**shared, "snapshot": snapshot})
        params = CreateSandboxFromImageParams.model_validate({**shared, "image": image})
        params.resources = _resources(task)
        return params

    async def _create(self, task: Task, params: _Params) -> AsyncSandbox:
        """A started sandbox. Rate, quota and capacity are waited out, the gate holding everybody back meanwhile."""

        async def create() -> AsyncSandbox:
            async with self._gate.admit():
                return await self._create_once(task, params)

        what = f"create daytona sandbox for task {task.id}"
        remote = await retried(create, what, deadline_s=self.config.retry_s, gate=self._gate)
        self._alive[remote.id] = remote
        return remote

    async def _create_once(self, task: Task, params: _Params) -> AsyncSandbox:
        timeout_s = min(self.config.create_timeout_s, task.environment.build_timeout_s)
        creating = asyncio.ensure_future(self._open().create(params, timeout=timeout_s))
        try:
            return await asyncio.shield(creating)
        except asyncio.CancelledError:
            await asyncio.shield(self._abandon(creating, params))
            raise
        except DaytonaError as error:
            if error.status_code not in _NOT_CREATED:
                await self._discard(params)
            raise

    async def _abandon(self, creating: "asyncio.Future[AsyncSandbox]", params: _Params) -> None:
        """Deletes what a cancelled creation makes; the request is let finish, since its sandbox may exist already."""
        await asyncio.wait({creating}, timeout=_CAPTURE_S)
        if creating.done() and not creating.cancelled() and creating.exception() is None:
            await self._delete(creating.result())
            return
        creating.cancel()
        await asyncio.gather(creating, return_exceptions=True)
        await self._discard(params)

    async def _discard(self, params: _Params) -> None:
        """Deletes what a failed creation may have left; what cannot be found now ends by its time to live."""
        try:
            for remote in await self._find({_KEY: (params.labels or {})[_KEY]}):
                await self._delete(remote)
        except SandboxError as error:
            logger.warning("a failed creation may have left a sandbox: %s", error)

    async def _find(self, labels: dict[str, str]) -> list[AsyncSandbox]:
        async def find() -> list[AsyncSandbox]:
            query = ListSandboxesQuery(labels=labels)
            return [remote async for remote in self._open().list(query, self.config.request_timeout_s)]

        return await retried(find, "list daytona sandboxes", deadline_s=self.config.request_timeout_s)

    async def _delete(self, remote: AsyncSandbox) -> None:
        """Safe to call twice."""
        timeout_s = self.config.request_timeout_s

        async def delete() -> None:
            try:
                await remote.delete(timeout_s)
            except DaytonaNotFoundError:
                return

        await retried(delete, f"delete daytona sandbox {remote.id}", deadline_s=timeout_s)
        self._alive.pop(remote.id, None)

    async def _set_up(self, task: Task, remote: AsyncSandbox, owner: str) -> DaytonaSandbox:
        """Makes the directories that harness and verifier count on, and notes which processes are the service's."""
        wanted = task.environment.workdir
        script = f"pwd\n{SETUP}" + (f"mkdir -p -- {shlex.quote(wanted)} || exit 1\n" if wanted else "") + "echo ready"
        command = f"bash -c {shlex.quote(script)}"
        what = f"set up daytona sandbox {remote.id} for task {task.id}"
        limit_s = self.config.request_timeout_s
        answer = await retried(
            lambda: remote.process.exec(command, timeout=math.ceil(limit_s)), what, deadline_s=limit_s
        )
        lines = (answer.result or "").splitlines()
        if not lines or lines[-1] != "ready":
            raise SandboxError(f"{what}: {' '.join(lines)[-500:] or 'no answer'}; does its image have bash?")
        inside = Inside(workdir=wanted or lines[0], env=dict(task.environment.env), baseline=tuple(lines[1:-1]))
        return DaytonaSandbox(remote, inside, self.config, lambda: self._delete(remote), owner=owner)


def _resources(task: Task) -> Resources | None:
    """Whole cores and GiB, rounded up; None leaves all three to the service."""
    environment = task.environment
    if not (environment.cpus or environment.memory_mb or environment.storage_mb):
        return None
    return Resources(
        cpu=math.ceil(environment.cpus) if environment.cpus else None,
        memory=math.ceil(environment.memory_mb / 1024) if environment.memory_mb else None,
        disk=math.ceil(environment.storage_mb / 1024) if environment.storage_mb else None,
    )
