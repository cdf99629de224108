"""Usable data under infrastructure failures: which share of the samples still trains, and what their loss biases.

    python -m benchmarks.usable_data --out F
    python -m benchmarks.usable_data --groups 64 --out F      # a trial

Rollouts of 8 in a Group play through the shipped stream (workers, buffer, store, admission); a tenth of their sandboxes
fails by their provider's fault. Two cases: failures independent of everything, and failures in proportion to a
rollout's Turns at the same rate over all, where long rollouts are solved less often. A sample is usable when it is
valid and its Group has at least `min_valid` valid members. Masking a whole Group for one failure, as some systems do,
is counted beside it on the same Groups. Since a rollout's script follows from its id, the benchmark knows what the lost
ones would have brought: that is the bias.
"""

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from statistics import fmean
from typing import Any

from actors.calls import call
from actors.cluster import ClusterConfig, start_actor, start_cluster
from actors.inference_config import InferencePoolConfig
from actors.inference_sampler import PoolSampler
from actors.rollout_pool import RolloutPoolConfig, start_rollout_pool
from actors.rollout_stream import GroupRequest
from benchmarks.hardware import describe_hardware
from benchmarks.timed_parts import TimedEpisodes, timed_task
from benchmarks.timed_server import OneServer, TimedServer
from envs.build import EpisodeConfig
from trajectories.buffer import EndOfTasks, GroupBuffer
from trajectories.handle import GroupHandle
from trajectories.metrics import exclusion_by_turns
from trajectories.schema import PolicyVersion
from trajectories.validity import NoGradient, member_rewards, no_gradient

GROUP_SIZE = 8
GROUPS_PER_STEP = 32
DEADLINE_S = 300.0
PLAYED = TimedEpisodes(min_turns=1, max_turns=8, failure_rate=0.1, solved_first=0.8, solved_per_turn=-0.08)
"""Of one Turn 80% are solved, of eight 24%: 52% over all."""


def main() -> None:
    """Plays both cases in one Ray and writes one JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=2_048, help="Groups of each case")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    independent, by_length = asyncio.run(_measure(arguments.groups))
    result = {
        "command": "python -m benchmarks.usable_data " + " ".join(sys.argv[1:]),
        "simulated": "sampler and sandbox answer at once; stream, buffer, pool, workers, sockets and store are real",
        "hardware": describe_hardware(),
        "figures": {
            "usable_share": independent["usable_share"],
            "whole_group_masking_share": independent["whole_group_masking_share"],
            "reward_bias_independent": independent["reward_bias"],
            "reward_bias_by_length": by_length["reward_bias"],
            "turns_bias_by_length": by_length["turns_bias"],
        },
        "independent": independent,
        "by_length": by_length,
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result["figures"], indent=1))


async def _measure(num_groups: int) -> list[dict[str, float]]:
    by_length = TimedEpisodes(**{**vars(PLAYED), "failures_grow": True})
    async with start_cluster(ClusterConfig()):
        return [account(await _play(episodes, num_groups), episodes) for episodes in (PLAYED, by_length)]


async def _play(episodes: TimedEpisodes, num_groups: int) -> list[GroupHandle]:
    """The handles of so many Groups, taken step by step as a learner takes them."""
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(start_actor(TimedServer))
        pool = await stack.enter_async_context(
            start_rollout_pool(
                RolloutPoolConfig(num_workers=1, max_rollouts=512),
                EpisodeConfig(group_deadline_s=DEADLINE_S),
                store=Path(stack.enter_context(tempfile.TemporaryDirectory())),
                prefix="worker",
                sampler=PoolSampler(InferencePoolConfig(), OneServer(server)),
                build=episodes,
            )
        )
        version = PolicyVersion(lineage=0, n=0)
        buffer = GroupBuffer(groups_per_step=GROUPS_PER_STEP, max_staleness=2, version=version)
        requests = (GroupRequest(task=timed_task(f"t{k}"), group_id=f"g{k}") for k in range(num_groups))
        stream = await stack.enter_async_context(pool.stream(requests, GROUP_SIZE, buffer, lambda: buffer.version))
        return await _take_all(stream, buffer, server)


async def _take_all(stream: Any, buffer: GroupBuffer, server: Any) -> list[GroupHandle]:
    handles: list[GroupHandle] = []
    while True:
        try:
            handles += await stream.take(buffer.version, DEADLINE_S)
        except EndOfTasks:
            return handles
        version = PolicyVersion(lineage=0, n=buffer.version.n + 1)
        await call(server.serve_version, version, deadline_s=60, what="the server's new version")
        buffer.advance(version)


def account(handles: Sequence[GroupHandle], episodes: TimedEpisodes, *, min_valid: int = 2) -> dict[str, float]:
    """Shares of usable samples, and what the survivors' means differ by from those of all that were asked for."""
    rewards = [member_rewards(handle) for handle in handles]
    num_members = sum(len(each) for each in rewards)
    whole = [each for each in rewards if None not in each]
    filled = [each for each in rewards if no_gradient(each, min_valid=min_valid) is not NoGradient.UNDER_FILLED]
    members = [
        (member, reward)
        for handle, each in zip(handles, rewards, strict=True)
        for member, reward in zip(handle.members, each, strict=True)
    ]
    scripts = [episodes.script(member.trajectory_id) for member, _ in members]
    valid = [(member, reward) for member, reward in members if reward is not None]
    return {
        "num_groups": float(len(handles)),
        "num_members": float(num_members),
        "usable_share": sum(reward is not None for each in filled for reward in each) / num_members,
        "whole_group_masking_share": sum(len(each) for each in whole) / num_members,
        "under_filled_groups": float(len(handles) - len(filled)),
        "reward_mean": fmean(reward for _, reward in valid),
        "reward_bias": fmean(reward for _, reward in valid) - fmean(script.reward for script in scripts),
        "turns_bias": fmean(member.num_turns for member, _ in valid)
        - fmean(len(script.latencies_s) for script in scripts),
        **exclusion_by_turns(handles),
    }


if __name__ == "__main__":
    main()
