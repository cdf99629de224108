"""The asynchronous loop against its bound: seconds a step at staleness 0, 1, 2 and 4, with timed stages.

    python -m benchmarks.async_loop --out F
    python -m benchmarks.async_loop --unit-s 0.01 --steps 4 --warm-up 2 --staleness 0 2 --out F      # a trial

SIMULATED: two cores cannot overlap real stages, so generation, sandboxes and the learner only take time. Everything
else is the product's: training step, stream, admission, buffer, pool, rollout workers, sockets, store, batch plan.

Times are in units of one reply. A rollout has 8 Turns; a sandbox's answer is log-normal with sigma 1 and mean 4. Two
regimes: `latency_bound`, in which a synchronous loop waits for its slowest rollout and an asynchronous one ends up
bound by generation, and `learner_bound`, in which the learner is the slowest stage.

The bound of a step is the largest over stages of busy time over slots, each stage timed alone before: replies over the
servers' slots, whole rollouts (replies and answers) over the slots of rollouts, update and publishing over one learner.
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from actors.calls import call
from actors.cluster import ClusterConfig, start_actor, start_cluster
from actors.inference_config import InferencePoolConfig
from actors.inference_sampler import PoolSampler
from actors.learner_group import LearnerGroup, LearnerGroupConfig
from actors.rollout_pool import RolloutPoolConfig, start_rollout_pool
from actors.rollout_stream import GroupRequest, RolloutStream
from actors.training_step import Update, training_step
from benchmarks.hardware import describe_hardware
from benchmarks.timed_parts import MESSAGE_IDS, TimedEpisodes, TimedRank, timed_task
from benchmarks.timed_server import OneServer, ServerState, TimedServer
from envs.build import EpisodeConfig
from envs.sampler import SamplingParams
from learners.config import LearnerConfig, LossConfig
from learners.plan import plan_batch
from trajectories.buffer import GroupBuffer
from trajectories.handle import GroupHandle
from trajectories.schema import PolicyVersion

GROUPS, GROUP_SIZE, NUM_TURNS, LATENCY = 8, 8, 8, 4.0
"""Of a step: Groups, rollouts of each; of a rollout: Turns, and the mean of its sandbox's answer in replies."""
MAX_ROLLOUTS = 108
PUBLISH = 0.5
"""Staging a version, in replies."""
DEADLINE_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Regime:
    """What takes how long; times in replies."""

    name: str
    num_slots: int
    """Replies that the servers sample at once."""
    update: float
    """One optimizer step."""


REGIMES = (
    Regime(name="latency_bound", num_slots=11, update=4.0),
    Regime(name="learner_bound", num_slots=16, update=60.0),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """Seconds a step that each stage needs at least, from what it took alone."""

    generation_s: float
    rollouts_s: float
    learner_s: float

    @property
    def step_s(self) -> float:
        """The slowest stage's."""
        return max(self.generation_s, self.rollouts_s, self.learner_s)


def main() -> None:
    """Runs every regime at every staleness in one Ray and writes one JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--unit-s", type=float, default=0.04, help="seconds of one reply")
    parser.add_argument("--steps", type=int, default=24, help="steps timed in each cell")
    parser.add_argument("--warm-up", type=int, default=6, help="steps before them")
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 2, 4], help="must hold 0 and 2")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    if not {0, 2} <= set(arguments.staleness):
        parser.error(f"--staleness must hold 0 and 2, which the figures compare; got {arguments.staleness}")
    regimes = asyncio.run(_measure(arguments))
    result = {
        "command": "python -m benchmarks.async_loop " + " ".join(sys.argv[1:]),
        "simulated": "stages are timed; loop, buffer, pool, workers, sockets, store and batch plan are the product's",
        "hardware": describe_hardware(),
        "figures": loop_figures(regimes),
        "regimes": regimes,
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result["figures"], indent=1))


def loop_figures(regimes: dict[str, Any]) -> dict[str, float]:
    """The worst ratio to the bound at staleness 2, asynchronous (2) over synchronous (0), and shares of waiting."""

    def seconds(regime: str, staleness: int) -> float:
        return regimes[regime]["cells"][str(staleness)]["step_s"]

    return {
        "step_over_bound_staleness_2": max(seconds(name, 2) / regimes[name]["bound_s"] for name in regimes),
        "async_over_sync_latency_bound": seconds("latency_bound", 0) / seconds("latency_bound", 2),
        "async_over_sync_learner_bound": seconds("learner_bound", 0) / seconds("learner_bound", 2),
        "trainer_wait_share": regimes["learner_bound"]["cells"]["2"]["wait_share"],
        "trainer_wait_share_sync": regimes["learner_bound"]["cells"]["0"]["wait_share"],
    }


async def _measure(arguments: argparse.Namespace) -> dict[str, Any]:
    results: dict[str, Any] = {}
    async with start_cluster(ClusterConfig()):
        for regime in REGIMES:
            bound = await _bound(regime, arguments)
            cells = {
                str(staleness): await _run(regime, staleness, arguments) | {"staleness": float(staleness)}
                for staleness in arguments.staleness
            }
            for cell in cells.values():
                cell["step_over_bound"] = cell["step_s"] / bound.step_s
            results[regime.name] = {**asdict(regime), **asdict(bound), "bound_s": bound.step_s, "cells": cells}
            print(regime.name, json.dumps(results[regime.name]), file=sys.stderr, flush=True)
    return results


async def _bound(regime: Regime, arguments: argparse.Namespace) -> Bound:
    """Each stage alone: one step's replies on all slots, one step's sandbox answers, three updates with publishing."""
    async with AsyncExitStack() as stack:
        server, learner = await _start_stages(regime, arguments.unit_s, stack)
        num_replies = GROUPS * GROUP_SIZE * NUM_TURNS
        sampler = _sampler(server)
        await asyncio.gather(
            *(sampler.sample(MESSAGE_IDS, SamplingParams(), stop_ids=(0,), key=f"k{k}") for k in range(num_replies))
        )
        state: ServerState = await call(server.health, deadline_s=60, what="the server's counters")
        update = _update(learner)
        publisher = TimedPublisher(server, None, PUBLISH * arguments.unit_s)
        began = time.monotonic()
        for n in range(1, 4):
            await update([])
            await publisher.publish(PolicyVersion(lineage=0, n=n))
        learner_s = (time.monotonic() - began) / 3
    answers_s = await _answers_s(_episodes(arguments.unit_s))
    return Bound(
        generation_s=state.busy_s / regime.num_slots,
        rollouts_s=(state.busy_s + answers_s) / MAX_ROLLOUTS,
        learner_s=learner_s,
    )


async def _answers_s(episodes: TimedEpisodes) -> float:
    """Seconds that sandboxes are busy with the answers of one step, a mean over the Groups that every cell plays."""
    scripts = [episodes.script(f"g{group}.{member}") for group in range(4 * GROUPS) for member in range(GROUP_SIZE)]

    async def answer(latencies_s: Sequence[float]) -> float:
        began = time.monotonic()
        for latency_s in latencies_s:
            await asyncio.sleep(latency_s)
        return time.monotonic() - began

    busy_s = await asyncio.gather(*(answer(script.latencies_s) for script in scripts))
    return fmean(busy_s) * GROUPS * GROUP_SIZE


async def _run(regime: Regime, staleness: int, arguments: argparse.Namespace) -> dict[str, float]:
    """One cell: seconds a step after the warm-up, and the share of them that the learner waited for Groups."""
    async with AsyncExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        server, learner = await _start_stages(regime, arguments.unit_s, stack)
        pool = await stack.enter_async_context(
            start_rollout_pool(
                RolloutPoolConfig(num_workers=arguments.workers, max_rollouts=MAX_ROLLOUTS),
                EpisodeConfig(group_deadline_s=DEADLINE_S),
                store=scratch,
                prefix="worker",
                sampler=_sampler(server),
                build=_episodes(arguments.unit_s),
            )
        )
        version = PolicyVersion(lineage=0, n=0)
        buffer = GroupBuffer(groups_per_step=GROUPS, max_staleness=staleness, version=version)
        requests = (GroupRequest(task=timed_task(f"t{k}"), group_id=f"g{k}") for k in range(10**9))
        stream = await stack.enter_async_context(pool.stream(requests, GROUP_SIZE, buffer, lambda: buffer.version))
        publisher = TimedPublisher(server, buffer, PUBLISH * arguments.unit_s)
        return await _steps(stream, _update(learner), publisher, arguments) | {
            "max_staleness_seen": float(buffer.max_staleness_seen)
        }


async def _steps(
    stream: RolloutStream, update: Update, publisher: "TimedPublisher", arguments: argparse.Namespace
) -> dict[str, float]:
    waits_s: list[float] = []
    began = time.monotonic()
    for n in range(arguments.warm_up + arguments.steps):
        if n == arguments.warm_up:
            waits_s, began = [], time.monotonic()
        metrics = await training_step(
            PolicyVersion(lineage=0, n=n),
            stream=stream,
            update=update,
            publisher=publisher,
            take_deadline_s=DEADLINE_S,
        )
        waits_s.append(metrics["time/take_s"])
    seconds = time.monotonic() - began
    return {"step_s": seconds / arguments.steps, "wait_share": sum(waits_s) / seconds}


class TimedPublisher:
    """A Publisher that stages for a time; the server then has the version, and the buffer knows."""

    def __init__(self, server: Any, buffer: GroupBuffer | None, stage_s: float) -> None:
        self._server = server
        self._buffer = buffer
        self._stage_s = stage_s

    async def publish(self, version: PolicyVersion) -> dict[str, float]:
        """See Publisher."""
        await asyncio.sleep(self._stage_s)
        await call(self._server.serve_version, version, deadline_s=60, what="the server's new version")
        if self._buffer is not None:
            self._buffer.advance(version)
        return {}


async def _start_stages(regime: Regime, unit_s: float, stack: AsyncExitStack) -> tuple[Any, LearnerGroup]:
    server = await stack.enter_async_context(start_actor(TimedServer, regime.num_slots, unit_s))
    rank = await stack.enter_async_context(start_actor(TimedRank, regime.update * unit_s, max_concurrency=1))
    await call(server.health, deadline_s=120, what="start of the timed server")
    await call(rank.optim_step, deadline_s=120, what="start of the timed learner")
    return server, LearnerGroup(
        LearnerGroupConfig(), LearnerConfig(), model=Path("none"), store=Path("none"), ranks=[rank]
    )


def _update(learner: LearnerGroup) -> Update:
    async def update(groups: Sequence[GroupHandle]) -> dict[str, float]:
        plan = plan_batch(groups, num_ranks=1, max_tokens=4096)
        return {**plan.metrics, **await learner.forward_backward(plan, LossConfig()), **await learner.optim_step()}

    return update


def _sampler(server: Any) -> PoolSampler:
    return PoolSampler(InferencePoolConfig(), OneServer(server))


def _episodes(unit_s: float) -> TimedEpisodes:
    return TimedEpisodes(min_turns=NUM_TURNS, max_turns=NUM_TURNS, latency_s=LATENCY * unit_s)


if __name__ == "__main__":
    main()
