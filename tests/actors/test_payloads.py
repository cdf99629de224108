"""Payloads never cross the driver: it handles ids, sizes and references of Groups, and none of their tokens.

An audit hook of the interpreter sees each class that is unpickled and each file that is opened in this process, so the
test needs no cooperation of the code that it watches.
"""

import pickle
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from actors.cluster import ClusterConfig, start_actor, start_cluster
from actors.inference_config import InferencePoolConfig
from actors.inference_sampler import PoolSampler
from actors.rollout_pool import RolloutPoolConfig, start_rollout_pool
from actors.rollout_stream import GroupRequest
from benchmarks.timed_parts import TimedEpisodes, timed_task
from benchmarks.timed_server import OneServer, TimedServer
from envs.build import EpisodeConfig
from tests.trajectories.records import group, tokens, trajectory, turn
from trajectories.buffer import GroupBuffer
from trajectories.schema import PolicyVersion
from trajectories.store import StoreWriter, read_group, scan

PAYLOADS = {"Turn", "TurnTokens", "Trajectory", "Group", "Completion", "Sample"}

_seen: list[str] | None = None


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if _seen is None:
        return
    if event == "pickle.find_class" and arguments[1] in PAYLOADS:
        _seen.append(f"unpickled {arguments[1]}")
    elif event == "open" and str(arguments[0]).endswith(".seg"):
        _seen.append(f"opened {arguments[0]}")


sys.addaudithook(_hook)  # for the life of the process: it does nothing outside `payloads_seen`


@contextmanager
def payloads_seen() -> Iterator[list[str]]:
    """What of a rollout's content this process touches within the block."""
    global _seen
    _seen = []
    try:
        yield _seen
    finally:
        _seen = None


def test_the_watch_sees_a_turn_that_is_unpickled_and_a_segment_that_is_read(tmp_path: Path) -> None:
    whole = group(trajectory(turn(tokens((1,), (2,)))))
    with StoreWriter(tmp_path, "w") as writer:
        location = writer.append(whole)
    message = pickle.dumps(whole)
    with payloads_seen() as seen:
        pickle.loads(message)
    assert {"unpickled Turn", "unpickled TurnTokens", "unpickled Group"} <= set(seen)
    with payloads_seen() as seen:
        read_group(tmp_path, location)
    assert seen == [f"opened {tmp_path / 'w.seg'}"]


@pytest.mark.ray
async def test_a_stream_of_groups_brings_the_driver_no_turn(tmp_path: Path) -> None:
    async with (
        start_cluster(ClusterConfig()),
        start_actor(TimedServer) as server,
        start_rollout_pool(
            RolloutPoolConfig(max_rollouts=64),
            EpisodeConfig(),
            store=tmp_path,
            prefix="worker",
            sampler=PoolSampler(InferencePoolConfig(), OneServer(server)),
            build=TimedEpisodes(),
        ) as pool,
    ):
        version = PolicyVersion(lineage=0, n=0)
        buffer = GroupBuffer(groups_per_step=8, max_staleness=1, version=version)
        requests = (GroupRequest(task=timed_task(f"t{k}"), group_id=f"g{k}") for k in range(16))
        with payloads_seen() as seen:
            async with pool.stream(requests, 4, buffer, lambda: buffer.version) as stream:
                handles = await stream.take(version, 60)
        assert seen == []
    sizes = {handle.group_id: [member.num_turns for member in handle.members] for handle in handles}
    assert len(sizes) == 8
    stored = {each.id: [len(t.turns) for t in each.trajectories] for _, each in scan(tmp_path) if each.id in sizes}
    assert stored == sizes, "the Turns exist: they lie in the store"
    assert all(turns == [4, 4, 4, 4] for turns in sizes.values())
