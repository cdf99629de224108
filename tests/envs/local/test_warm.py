"""Boxes that were started ahead: used once, like any other, and gone when the provider is closed."""

import asyncio
import os
import signal
from collections.abc import AsyncGenerator
from dataclasses import replace

import pytest

from envs.local.provider import LocalProvider
from tests.envs.local.boxes import SMALL, make_provider, make_task, own_leases
from tests.envs.local.test_lifecycle import children, descendants, open_files, own_cgroups

pytestmark = pytest.mark.sandbox


@pytest.fixture
async def provider() -> AsyncGenerator[LocalProvider]:
    before = children(), open_files()
    provider = make_provider(max_warm=2)
    await provider.provenance()
    yield provider
    await provider.close()
    assert (children(), open_files()) == before and own_cgroups() == []
    assert await own_leases(provider) == []


async def play(provider: LocalProvider, owner: str, **environment: object) -> str:
    task = replace(make_task(**{**SMALL, **environment}), id=owner)
    async with provider.start(task, owner=owner) as sandbox:
        assert await sandbox.read_file("/tmp/left") is None
        await sandbox.write_file("/tmp/left", b"1")
        seen = await sandbox.exec("pwd; echo $WORD; df -m / | tail -1 | cut -c1-99", timeout_s=20)
        return seen.stdout.decode()


async def waiting(provider: LocalProvider) -> list[str]:
    """Owners of the leases, once nothing is being started."""
    while (filling := provider._warm._filling) and not filling.done():
        await asyncio.wait({filling})
    return await own_leases(provider)


async def test_boxes_wait_for_the_size_that_was_asked_for_twice_and_are_as_good_as_new(provider: LocalProvider) -> None:
    """0.2 s."""
    await play(provider, "t1")
    assert await waiting(provider) == [], "a size that was asked for once may never come again"
    await play(provider, "t2")
    assert await waiting(provider) == ["warm", "warm"]
    starts = 0
    start = provider._start_bare

    async def counted(size: object) -> object:
        nonlocal starts
        starts += 1
        return await start(size)  # type: ignore[arg-type]

    provider._start_bare = counted  # type: ignore[method-assign]
    seen = await play(provider, "t3", workdir="/w", env={"WORD": "hi"})
    assert seen.startswith("/w\nhi\n") and " 64 " in seen
    assert starts == 0 and await waiting(provider) == ["warm", "warm"]


async def test_boxes_of_another_size_make_room(provider: LocalProvider) -> None:
    """0.2 s."""
    for k in range(4):
        await play(provider, f"t{k}", storage_mb=32 if k > 1 else 64)
        await waiting(provider)
    assert {size.disk_bytes for size, *_ in provider._warm._waiting} == {32 << 20}
    assert await waiting(provider) == ["warm", "warm"]


async def test_a_box_that_was_killed_while_it_waited_is_given_to_nobody(provider: LocalProvider) -> None:
    """0.3 s."""
    for k in range(2):
        await play(provider, f"t{k}")
    assert await waiting(provider) == ["warm", "warm"]
    for pid in descendants():
        os.kill(pid, signal.SIGKILL)
    for k in range(3):
        assert (await play(provider, f"u{k}")).startswith("/app\n")


async def test_a_group_that_starts_at_once_takes_each_box_once(provider: LocalProvider) -> None:
    """0.4 s."""
    for _ in range(3):
        await asyncio.gather(*(play(provider, f"t{k}") for k in range(8)))
    assert await waiting(provider) == ["warm", "warm"]
