"""How the engine is called, and which image a Task gets; no engine runs here."""

import os
import stat
from pathlib import Path
from typing import Any

import pytest

from envs.containers.engine import Engine, EngineName, is_missing
from envs.containers.images import hash_context
from envs.containers.provider import ContainerConfig, ContainerProvider
from envs.errors import SandboxError, SandboxRefused
from tests.envs.local.boxes import make_task
from tests.envs.task_dirs import make_task_dir


def engine(tmp_path: Path, script: str, **config: Any) -> Engine:
    """An engine whose binary is this shell script."""
    binary = tmp_path / "engine"
    binary.write_text(f"#!/bin/sh\n{script}\n")
    binary.chmod(binary.stat().st_mode | stat.S_IXUSR)
    return Engine(name=EngineName.DOCKER, binary=str(binary), **config)


def test_gvisor_is_asked_for_where_each_engine_expects_it() -> None:
    docker = Engine(name=EngineName.DOCKER, binary="docker", runtime="runsc")
    podman = Engine(name=EngineName.PODMAN, binary="podman", args=("--log-level=error",), runtime="runsc")
    assert docker.command("run", "image") == ["docker", "run", "--runtime", "runsc", "image"]
    assert docker.command("ps") == ["docker", "ps"]
    assert podman.command("run", "image") == ["podman", "--log-level=error", "--runtime", "runsc", "run", "image"]


async def test_a_call_that_fails_says_the_engines_last_words(tmp_path: Path) -> None:
    with pytest.raises(SandboxError, match=r"^docker pull: one; two$"):
        await engine(tmp_path, "echo one >&2; echo two >&2; exit 1").call("pull", "image")


async def test_a_call_past_its_deadline_is_ended(tmp_path: Path) -> None:
    with pytest.raises(SandboxError, match=r"docker build: not done within 0\.2 s"):
        await engine(tmp_path, "exec sleep 60").call("build", deadline_s=0.2)


async def test_an_engine_that_is_not_installed_is_refused_with_the_remedy(tmp_path: Path) -> None:
    missing = Engine(name=EngineName.PODMAN, binary=str(tmp_path / "none"))
    with pytest.raises(SandboxRefused, match="No such file or directory; install podman"):
        await missing.version()


async def test_an_engine_whose_daemon_is_down_is_refused(tmp_path: Path) -> None:
    down = engine(tmp_path, "echo Cannot connect to the daemon >&2; exit 1")
    with pytest.raises(SandboxRefused, match="Cannot connect to the daemon; start the docker engine"):
        await down.version()


async def test_removing_what_is_gone_is_no_error(tmp_path: Path) -> None:
    await engine(tmp_path, "echo Error: no such container: x >&2; exit 1").remove("x")
    with pytest.raises(SandboxError, match="permission denied"):
        await engine(tmp_path, "echo permission denied >&2; exit 1").remove("x")
    assert is_missing(SandboxError("image: Error: localhost/x: image not known"))


def test_a_build_context_is_known_by_names_modes_and_contents(tmp_path: Path) -> None:
    context = tmp_path / "context"
    (context / "sub").mkdir(parents=True)
    (context / "Dockerfile").write_text("FROM x\n")
    (context / "sub" / "a").write_text("1")
    hashes = [hash_context(context)]
    os.utime(context / "sub" / "a", (0, 0))
    assert hash_context(context) == hashes[0] and len(hashes[0]) == 24
    for change in (
        lambda: (context / "sub" / "a").write_text("2"),
        lambda: (context / "sub" / "a").chmod(0o755),
        lambda: (context / "sub" / "a").rename(context / "sub" / "b"),
        lambda: (context / "sub" / "link").symlink_to("b"),
        lambda: (context / "empty").mkdir(),
    ):
        change()
        hashes.append(hash_context(context))
    assert len(set(hashes)) == 6


def test_what_is_not_enforced_is_refused_by_name() -> None:
    provider = ContainerProvider(EngineName.PODMAN, ContainerConfig(network="refuse"))
    with pytest.raises(SandboxRefused, match="allowlist is not enforced by podman"):
        provider.check(make_task(network_mode="allowlist"))
    with pytest.raises(SandboxRefused, match="wants a public network"):
        provider.check(make_task())
    provider.check(make_task(network_mode="no-network"))


async def test_a_task_without_any_image_is_refused(tmp_path: Path) -> None:
    binary = engine(tmp_path, "[ $1 = version ] && echo 1.0 || true").binary
    provider = ContainerProvider(EngineName.DOCKER, ContainerConfig(binary=binary), cache_dir=tmp_path / "cache")
    with pytest.raises(SandboxRefused, match=r"add environment/Dockerfile or set environment\.docker_image"):
        async with provider.start(make_task(make_task_dir(tmp_path)), owner="t"):
            pass
    await provider.close()
