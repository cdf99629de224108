"""The gate that rollout workers share; its arithmetic is tested in tests/envs/test_creation.py."""

import asyncio
import time

import pytest

from actors.cluster import ClusterConfig, start_cluster
from actors.creation_gate import CreationGateHost, start_creation_gate
from envs.creation import CreationConfig


async def test_a_permit_released_before_it_is_given_blocks_nobody() -> None:
    host = CreationGateHost(CreationConfig(max_at_once=1))
    await host.acquire("held")
    waiting = asyncio.create_task(host.acquire("cancelled"))
    await asyncio.sleep(0.01)
    await host.release("cancelled")
    async with asyncio.timeout(5):
        await waiting
        await host.release("held")
        await host.acquire("next")


@pytest.mark.ray
async def test_two_workers_share_the_limit_and_the_pause() -> None:
    async with start_cluster(ClusterConfig()):
        await _share()


async def _share() -> None:
    gate = start_creation_gate(CreationConfig(max_at_once=1))
    order: list[str] = []

    async def create(name: str) -> None:
        async with gate.admit():
            order.append(f"{name} in")
            await asyncio.sleep(0.05)
            order.append(f"{name} out")

    await asyncio.gather(create("a"), create("b"))
    assert sorted(order[::2]) == ["a in", "b in"] and order[0][0] == order[1][0]
    await gate.pause(0.5)
    began = time.monotonic()
    await create("c")
    assert time.monotonic() - began >= 0.5
    gate.close()
