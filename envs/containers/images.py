"""The image of a Task: pulled, or built once from its Dockerfile and found again by the hash of its build context.

Invariant: an image name that holds a hash stands for exactly that context, so it is never built twice on one machine.
Called by envs/containers/provider.py.
"""

import asyncio
import hashlib
import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from envs.containers.engine import Engine
from envs.errors import SandboxError, SandboxRefused
from envs.task import Task

_ROOT_USERS = ("", "0", "root", "0:0", "root:root")


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """A local image and what it says of commands run in it."""

    name: str
    workdir: str
    """"/" when the image names none."""
    env: dict[str, str]


class ImageCache:
    """Images by what they are made from; each is made once, however many rollouts ask."""

    def __init__(self, engine: Engine, *, build_args: Sequence[str], pull_timeout_s: float) -> None:
        self._engine = engine
        self._build_args = build_args
        self._pull_timeout_s = pull_timeout_s
        self._making: dict[str, asyncio.Task[Image]] = {}

    async def get(self, task: Task) -> Image:
        """The Task's image. Raises SandboxError when it cannot be made and SandboxRefused when it cannot be used."""
        key = task.environment.docker_image or str(task.path)
        making = self._making.get(key)
        if making is None or (making.done() and (making.cancelled() or making.exception() is not None)):
            making = self._making[key] = asyncio.create_task(self._make(task))
        return await asyncio.shield(making)

    async def close(self) -> None:
        """Ends what is still being made."""
        for making in self._making.values():
            making.cancel()
        await asyncio.gather(*self._making.values(), return_exceptions=True)
        self._making.clear()

    async def _make(self, task: Task) -> Image:
        name = task.environment.docker_image
        if name is None:
            return await self._build(task)
        found = await self._engine.inspect("image", name)
        if found is None:
            await self._engine.call("pull", "--quiet", name, deadline_s=self._pull_timeout_s)
            found = await self._engine.inspect("image", name)
        return _image(name, found)

    async def _build(self, task: Task) -> Image:
        context = task.path / "environment"
        if not (context / "Dockerfile").is_file():
            raise SandboxRefused(
                f"task {task.id}: needs an image; add environment/Dockerfile or set environment.docker_image"
            )
        name = f"localhost/thresher-task:{await asyncio.to_thread(hash_context, context)}"
        found = await self._engine.inspect("image", name)
        if found is None:
            args = ("--tag", name, *self._build_args, str(context))
            await self._engine.call("build", "--quiet", *args, deadline_s=task.environment.build_timeout_s)
            found = await self._engine.inspect("image", name)
        return _image(name, found)


def hash_context(context: Path) -> str:
    """24 hex digits of names, modes and contents of everything in a build context; the same on every machine."""
    digest = hashlib.sha256()
    for name, kind, mode, content in _entries(context, ""):
        for part in (name.encode("utf-8", "surrogateescape"), kind, b"%o" % mode, content):
            digest.update(b"%d:" % len(part))
            digest.update(part)
    return digest.hexdigest()[:24]


def _entries(directory: Path, prefix: str) -> Iterator[tuple[str, bytes, int, bytes]]:
    for entry in sorted(os.scandir(directory), key=lambda e: e.name):
        name, mode = prefix + entry.name, stat.S_IMODE(entry.stat(follow_symlinks=False).st_mode)
        if entry.is_symlink():
            yield name, b"link", 0, os.readlink(entry.path).encode("utf-8", "surrogateescape")
        elif entry.is_dir():
            yield name, b"dir", mode, b""
            yield from _entries(Path(entry.path), f"{name}/")
        elif entry.is_file():
            yield name, b"file", mode, Path(entry.path).read_bytes()
        else:
            raise SandboxRefused(f"{entry.path} is no plain file; a build context holds files, directories and links")


def _image(name: str, found: dict[str, Any] | None) -> Image:
    if found is None:
        raise SandboxError(f"image {name} was made and is not there; is something removing images?")
    config = cast(dict[str, Any], found.get("Config") or {})
    user = str(config.get("User") or "")
    if user not in _ROOT_USERS:
        raise SandboxRefused(f"image {name}: its commands run as user {user!r}; only images that run as root are done")
    variables = cast(list[str], config.get("Env") or [])
    return Image(
        name=name,
        workdir=str(config.get("WorkingDir") or "/"),
        env={key: value for key, _, value in (word.partition("=") for word in variables)},
    )
