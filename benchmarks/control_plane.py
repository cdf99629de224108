"""The control plane under load: rollouts in flight, Turns a second, and how late event loops run.

    python -m benchmarks.control_plane --out F
    python -m benchmarks.control_plane --levels 100 200 --seconds 3 --paced-s 1 --out F      # a trial

Sampler and sandbox cost nothing; driver, rollout workers and sampler are processes of their own, and what lies between
them is the product's: stream, buffer, pool, workers, conversations, sockets, store. Two kinds of run:

* paced, at the largest level: a reply comes after `--paced-s` seconds, give or take half, so that so many rollouts are
  in flight at once (a rollout without a pause is over before the next one begins), and a loop that wakes late does so
  for another reason than having more work than time. In flight are the sandboxes alive, counted in the workers.
* saturated, at each level: replies come at once. What the processors give, and what a Turn costs at each level.
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from actors.calls import call
from actors.cluster import ClusterConfig, start_actor, start_cluster
from actors.inference_config import InferencePoolConfig
from actors.inference_sampler import PoolSampler
from actors.rollout_pool import RolloutPoolConfig, start_rollout_pool
from actors.rollout_stream import GroupRequest
from benchmarks.hardware import describe_hardware
from benchmarks.loop_probe import LoopProbe, Tick, percentile
from benchmarks.timed_parts import TimedEpisodes, timed_task
from benchmarks.timed_server import OneServer, ServerState, TimedServer
from envs.build import EpisodeConfig
from trajectories.buffer import GroupBuffer
from trajectories.schema import PolicyVersion

GROUP_SIZE = 8
SLOTS_PER_ROLLOUT = 1.3
"""A Group keeps the slots of all its rollouts until the last one ends, so fewer are in flight than there are slots."""
STALENESS = 48
"""Versions that the buffer lets rollouts lag: enough permits for every Group in flight."""
FILL_DEADLINE_S = 300.0
"""How long a level may take to get all its rollouts in flight."""
DEADLINE_S = 600.0


def main() -> None:
    """Measures every level in one Ray and writes one JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--levels", type=int, nargs="+", default=[100, 1_000, 10_000], help="rollouts in flight")
    parser.add_argument(
        "--seconds", type=float, default=30.0, help="watch of a level once it is full; paced, 8 replies at least"
    )
    parser.add_argument("--paced-s", type=float, default=6.0, help="mean seconds of a reply in the paced run")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    levels = asyncio.run(_measure(arguments))
    first, last, paced = levels[0], levels[-2], levels[-1]
    result = {
        "command": "python -m benchmarks.control_plane " + " ".join(sys.argv[1:]),
        "hardware": describe_hardware(),
        "figures": {
            "in_flight": paced["in_flight"],
            "turns_per_s": paced["turns_per_s"],
            "loop_lag_ms_p99": max(paced["driver_lag_ms_p99"], paced["worker_lag_ms_p99"]),
            "driver_loop_lag_ms_p99": paced["driver_lag_ms_p99"],
            "driver_rss_gb": max(level["driver_rss_gb"] for level in levels),
            "saturated_turns_per_s": last["turns_per_s"],
            "cpu_ms_per_turn_growth": last["cpu_ms_per_turn"] / first["cpu_ms_per_turn"],
        },
        "levels": levels,
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result["figures"], indent=1))


async def _measure(arguments: argparse.Namespace) -> list[dict[str, float]]:
    async with start_cluster(ClusterConfig()):
        levels = [await _hold(num, 0.0, arguments) for num in arguments.levels]
        return [*levels, await _hold(max(arguments.levels), arguments.paced_s, arguments)]


async def _hold(num_rollouts: int, reply_s: float, arguments: argparse.Namespace) -> dict[str, float]:
    """One level: fills it, watches it, and says what it cost."""
    num_slots = int(num_rollouts * SLOTS_PER_ROLLOUT)
    with tempfile.TemporaryDirectory() as scratch:
        probes = Path(scratch) / "probes"
        probes.mkdir()
        async with AsyncExitStack() as stack:
            server = await stack.enter_async_context(
                start_actor(TimedServer, num_slots, reply_s, 0.5, max_concurrency=8)
            )
            pool = await stack.enter_async_context(
                start_rollout_pool(
                    RolloutPoolConfig(num_workers=arguments.workers, max_rollouts=num_slots),
                    EpisodeConfig(group_deadline_s=DEADLINE_S),
                    store=Path(scratch) / "store",
                    prefix="worker",
                    sampler=PoolSampler(InferencePoolConfig(), OneServer(server)),
                    build=TimedEpisodes(min_turns=8, max_turns=16, probes=probes),
                )
            )
            buffer = GroupBuffer(
                groups_per_step=max(1, num_slots // (GROUP_SIZE * 40)),
                max_staleness=STALENESS,
                version=PolicyVersion(lineage=0, n=0),
            )
            requests = (GroupRequest(task=timed_task(f"t{k}"), group_id=f"g{k}") for k in range(10**9))
            stream = await stack.enter_async_context(pool.stream(requests, GROUP_SIZE, buffer, lambda: buffer.version))
            consuming = asyncio.create_task(_consume(stream, buffer, server))
            stack.callback(consuming.cancel)
            await _until_full(lambda: pool.slots.num_taken, num_slots, consuming)
            watched = await _watch(server, max(arguments.seconds, 8 * reply_s), consuming)
        workers = [json.loads(path.read_text())["ticks"] for path in probes.iterdir()]
        if len(workers) != arguments.workers:
            raise RuntimeError(f"{len(workers)} of {arguments.workers} workers closed in time: lower --levels")
    return {"level": float(num_rollouts), "reply_s": reply_s, **level_figures(watched, workers)}


async def _consume(stream: Any, buffer: GroupBuffer, server: Any) -> None:
    """A learner that takes no time."""
    while True:
        await stream.take(buffer.version, DEADLINE_S)
        version = PolicyVersion(lineage=0, n=buffer.version.n + 1)
        await call(server.serve_version, version, deadline_s=60, what="the server's new version")
        buffer.advance(version)


async def _until_full(num_taken: Callable[[], int], num_slots: int, consuming: "asyncio.Task[None]") -> None:
    async with asyncio.timeout(FILL_DEADLINE_S):
        while num_taken() < num_slots // GROUP_SIZE * GROUP_SIZE:
            await _pause(0.2, consuming)
    await _pause(2.0, consuming)


async def _pause(seconds: float, consuming: "asyncio.Task[None]") -> None:
    """Sleeps, and raises what broke the stream meanwhile."""
    done, _ = await asyncio.wait({consuming}, timeout=seconds)
    for task in done:
        task.result()


async def _watch(server: Any, seconds: float, consuming: "asyncio.Task[None]") -> dict[str, Any]:
    probe = LoopProbe(lambda: 0)
    before: ServerState = await call(server.health, deadline_s=60, what="the server's counters")
    began, cpu_s = time.time(), time.process_time()
    probe.begin()
    await _pause(seconds, consuming)
    ticks = probe.end()
    cpu_s = time.process_time() - cpu_s
    after: ServerState = await call(server.health, deadline_s=60, what="the server's counters")
    return {
        "began": began,
        "ended": time.time(),
        "num_turns": after.num_answered - before.num_answered,
        "server_cpu_s": after.cpu_s - before.cpu_s,
        "driver_cpu_s": cpu_s,
        "driver_ticks": ticks,
        "driver_rss_gb": _rss_gb(),
    }


def level_figures(watched: dict[str, Any], workers: Sequence[Sequence[Sequence[float]]]) -> dict[str, float]:
    """What a level came to; `workers` are the ticks of each worker, those outside the window among them."""
    seconds, num_turns = watched["ended"] - watched["began"], watched["num_turns"]
    seen = [
        [tick for tick in (Tick(at, late, int(count), cpu) for at, late, count, cpu in ticks) if _is_in(tick, watched)]
        for ticks in workers
    ]
    worker_cpu_s = sum(ticks[-1].cpu_s - ticks[0].cpu_s for ticks in seen)
    cpu_s = worker_cpu_s + watched["server_cpu_s"] + watched["driver_cpu_s"]
    return {
        "in_flight": sum(sum(tick.count for tick in ticks) / len(ticks) for ticks in seen),
        "turns_per_s": num_turns / seconds,
        "driver_lag_ms_p99": 1e3 * percentile([tick.late_s for tick in watched["driver_ticks"]], 0.99),
        "worker_lag_ms_p99": 1e3 * max(percentile([tick.late_s for tick in ticks], 0.99) for ticks in seen),
        "driver_rss_gb": watched["driver_rss_gb"],
        "cpu_ms_per_turn": 1e3 * cpu_s / num_turns,
        "driver_cpu_share": watched["driver_cpu_s"] / seconds,
        "server_cpu_share": watched["server_cpu_s"] / seconds,
        "worker_cpu_share": worker_cpu_s / seconds,
    }


def _is_in(tick: Tick, watched: dict[str, Any]) -> bool:
    return watched["began"] <= tick.at <= watched["ended"]


def _rss_gb() -> float:
    """Resident memory of this process, in 1e9 bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024 / 1e9
    raise OSError("/proc/self/status has no VmRSS")


if __name__ == "__main__":
    main()
