"""Prepared environments: what a Task's boxes are filled with, made once however many boxes read it.

Small files are held as the PUT messages they become. Where a Dockerfile copies much or runs commands they are a layer:
one file of such messages in the cache, which each box writes out by itself.

Invariant: a layer is complete or absent, is named by the hash of all that it was made from, and never changes; those of
all Tasks together stay under a size. Called by envs/local/provider.py.
"""

import asyncio
import contextlib
import hashlib
import itertools
import os
import shlex
import tempfile
import time
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from envs.errors import SandboxDied, SandboxError, SandboxRefused
from envs.local.dockerfile import Run
from envs.local.labels import PREFIX, is_orphan, make_label
from envs.local.layer import download_files, layer_entries
from envs.local.layout import Layout, Plan, first_entries, gather, plan_layout, run_environment, step_entries
from envs.local.sandbox import LocalSandbox
from envs.task import Task

MAX_HELD_BYTES = 1 << 18
"""Copied files of a Task that are held in memory."""
_MAX_KNOWN = 256
_numbers = itertools.count(1)
"""Of half-written layers, over all providers of this process, which may share a directory."""
_BuildBox = Callable[[Task], AbstractAsyncContextManager[LocalSandbox]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedEnvironment:
    """One Task's."""

    layout: Layout
    content: bytes | Path
    """PUT entries, or the file that holds them."""

    @contextmanager
    def opened(self) -> Generator[int]:
        """A descriptor of the content. Raises FileNotFoundError when the layer was removed meanwhile."""
        if isinstance(self.content, Path):
            fd = os.open(self.content, os.O_RDONLY | os.O_CLOEXEC)
        else:
            fd = os.memfd_create("environment", os.MFD_CLOEXEC)
        try:
            if isinstance(self.content, Path):
                os.utime(fd)  # the layers that were used longest ago are removed first
            else:
                os.write(fd, self.content)
            yield fd
        finally:
            os.close(fd)


class PreparedEnvironments:
    """Those of one provider. `build` gives the box that a Dockerfile's commands run in."""

    def __init__(self, root: Path, build: _BuildBox, *, max_mb: int, mounts: tuple[str, ...]) -> None:
        self._directory = root / "layers"
        self._build = build
        self._max_bytes = max_mb << 20
        self._mounts = mounts
        self._plans: OrderedDict[tuple[str, Path], tuple[Plan, bytes | None]] = OrderedDict()
        self._layers: OrderedDict[tuple[str, Path], asyncio.Task[Path]] = OrderedDict()

    def check(self, task: Task) -> None:
        """Raises SandboxRefused when no box can be made of the Task's Dockerfile, as far as reading it tells."""
        self._plan(task)

    async def of(self, task: Task) -> PreparedEnvironment:
        """The Task's, which is prepared now if it never was; those who ask meanwhile wait for the same one.

        Raises SandboxRefused, from then on, when a command of its Dockerfile fails, and SandboxError.
        """
        plan, held = self._plan(task)
        content = held if held is not None else await self._layer(task, plan)
        return PreparedEnvironment(layout=plan.layout, content=content)

    def sweep(self) -> None:
        """Removes what dead drivers left half written."""
        for path in self._directory.glob(f"{PREFIX}*"):
            if is_orphan(path.name):
                path.unlink(missing_ok=True)

    async def close(self) -> None:
        """Ends what is being prepared, and forgets all but the layers."""
        making = list(self._layers.values())
        for each in making:
            each.cancel()
        await asyncio.gather(*making, return_exceptions=True)
        self._layers.clear()
        self._plans.clear()

    def _plan(self, task: Task) -> tuple[Plan, bytes | None]:
        """With the content, when that is small and needs no box."""
        key = (task.id, task.path)
        known = self._plans.get(key)
        if known is None:
            plan = plan_layout(task)
            is_held = not plan.has_run and plan.num_bytes <= MAX_HELD_BYTES
            known = self._plans[key] = (plan, b"".join(_entries(plan)) if is_held else None)
            if len(self._plans) > _MAX_KNOWN:
                self._plans.popitem(last=False)
        self._plans.move_to_end(key)
        return known

    async def _layer(self, task: Task, plan: Plan) -> Path:
        key = (task.id, task.path)
        making = self._layers.get(key)
        if making is None or (making.done() and not _is_lasting(making)):
            making = self._layers[key] = asyncio.create_task(self._make(task, plan))
            while len(self._layers) > _MAX_KNOWN and next(iter(self._layers.values())).done():
                self._layers.popitem(last=False)
        self._layers.move_to_end(key)
        await asyncio.wait({making})  # cancelled alone, not with this caller
        if making.cancelled():
            raise SandboxRefused("the provider was closed while the environment was prepared; start anew")
        error = making.exception()
        if isinstance(error, SandboxRefused):
            raise SandboxRefused(*error.args)  # one for each who asks, since raising fills in a traceback
        return making.result()

    async def _make(self, task: Task, plan: Plan) -> Path:
        path = self._directory / await asyncio.to_thread(_digest, plan, self._mounts)
        if not path.exists():
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            temporary = self._directory / make_label(next(_numbers))
            try:
                await (self._run(task, plan, temporary) if plan.has_run else asyncio.to_thread(_copy, plan, temporary))
                temporary.rename(path)
            except SandboxDied as error:  # no policy was in it
                raise SandboxError(f"prepare the environment of task {task.id}: {error}") from error
            except OSError as error:
                raise SandboxError(f"write {temporary}: {error.strerror}; make room, or give a cache_dir") from error
            finally:
                temporary.unlink(missing_ok=True)
            await asyncio.to_thread(_prune, self._directory, self._max_bytes, keep=path)
        return path

    async def _run(self, task: Task, plan: Plan, target: Path) -> None:
        """Does the steps in a box of their own, and writes what is then in it."""
        deadline = time.monotonic() + task.environment.build_timeout_s
        async with self._build(task) as sandbox:
            await sandbox.put(gather(first_entries()))
            for step in plan.steps:
                if isinstance(step, Run):
                    await _run_step(step, sandbox, max(1.0, deadline - time.monotonic()))
                else:
                    await sandbox.put(gather(step_entries(step)))
            with tempfile.TemporaryFile(dir=self._directory) as archive:
                await download_files(sandbox, archive)
                await asyncio.to_thread(_write, target, layer_entries(archive, self._mounts))


async def _run_step(step: Run, sandbox: LocalSandbox, limit_s: float) -> None:
    command = f"cd {shlex.quote(step.workdir)} && {step.command}"
    result = await sandbox.exec(command, timeout_s=limit_s, env=run_environment(step), cwd="/")
    if result.exit_code:
        how = f"did not end within {limit_s:.0f} s" if result.exit_code == 124 else f"ended with {result.exit_code}"
        said = (result.stderr or result.stdout).decode(errors="replace").strip()[-300:] or "nothing"
        raise SandboxRefused(
            f"{step.where}: RUN {how}: {said}; in a local box /usr is read-only and there is no network, so use a "
            "command that needs neither, or another sandbox provider"
        )


def _entries(plan: Plan) -> Iterator[bytes]:
    yield from first_entries()
    for step in plan.steps:
        assert not isinstance(step, Run)
        yield from step_entries(step)


def _copy(plan: Plan, target: Path) -> None:
    _write(target, _entries(plan))


def _write(target: Path, entries: Iterator[bytes]) -> None:
    with open(target, "xb", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
        file.writelines(entries)
        file.flush()
        os.fsync(file.fileno())  # before it has its name, by which it counts as complete


def _digest(plan: Plan, mounts: tuple[str, ...]) -> str:
    """Of the files copied, the commands, and the system whose programs they run."""
    digest = hashlib.sha256(b"1")
    for entry in first_entries():
        digest.update(entry)
    for step in plan.steps:
        if isinstance(step, Run):
            digest.update(repr((step.command, step.workdir, sorted(step.env.items()))).encode())
        else:
            for entry in step_entries(step):
                digest.update(entry)
    if plan.has_run:
        digest.update(repr(mounts).encode() + Path("/etc/os-release").read_bytes())
    return digest.hexdigest()[:32]


def _prune(directory: Path, max_bytes: int, *, keep: Path) -> None:
    """Removes the layers that were used longest ago; boxes that read one keep it open."""
    found: list[tuple[Path, os.stat_result]] = []
    for path in directory.iterdir():
        with contextlib.suppress(FileNotFoundError):  # other processes make room too
            if not path.name.startswith(PREFIX):
                found.append((path, path.stat()))
    total = sum(status.st_size for _, status in found)
    for path, status in sorted(found, key=lambda each: each[1].st_mtime):
        if total > max_bytes and path != keep:
            path.unlink(missing_ok=True)
            total -= status.st_size


def _is_lasting(making: "asyncio.Task[Path]") -> bool:
    """Whether what came of it holds for good: a layer that is still there, or a Dockerfile that no box can do."""
    if making.cancelled():
        return False
    error = making.exception()
    return isinstance(error, SandboxRefused) or (error is None and making.result().exists())
