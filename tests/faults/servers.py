"""Inference servers killed -9 at random decode positions under rollouts, while weights change; the result as JSON.

    python -m tests.faults.servers --out server_kills.json
    python -m tests.faults.servers --out server_kills.json --kills 2

Rollouts of several Turns run on two real servers. Between kills a new version is published in mode abort, so that no
token is sampled over keys and values of older weights: each token's log-probability must then be what a second
implementation (transformers) computes with the weights of the version that the token names, over the whole context.
That fails when a token is missing, came twice or names another version. Called by `make faults` and by
tests/faults/test_server_kills.py.
"""

import asyncio
import copy
import itertools
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import tyro

from actors.cluster import ClusterConfig, start_cluster
from actors.inference_config import InferencePoolConfig, ServerConfig, UpdateMode
from actors.inference_pool import InferencePool, start_inference_pool
from actors.inference_request import Part, Request
from actors.inference_wire import Channel
from actors.sync_config import SyncConfig
from actors.weight_sync import WeightSync
from benchmarks.conversations import EndlessRenderer
from benchmarks.hardware import describe_hardware
from envs.conversation import SampledConversation
from envs.sampler import Sampler, SamplingParams
from recipes.record import code_revision
from tests.actors.tiny_qwen3 import TinySource, save_tiny_qwen3
from tests.envs.tokens import CHATML_TEMPLATE, tiny_renderer
from trajectories.samples import trajectory_samples
from trajectories.schema import Outcome, PolicyVersion, Trajectory

NUM_TURNS, REPLY_TOKENS, CONTEXT_TOKENS = 3, 130, 500
TOLERANCE = 1e-4
"""Largest gap of a log-probability in float32 between vLLM and transformers; another version's is 10 times that."""
_MIN_IN_FLIGHT = 8


@dataclass(frozen=True, kw_only=True)
class Config:
    """Kill servers under rollouts; nothing may be lost, doubled or misattributed."""

    out: Path
    """File for the result."""
    kills: int = 12
    rollouts_at_once: int = 16
    kills_per_version: int = 3
    """A new version is published before every so many kills."""
    limit_s: float = 300.0
    """Deadline for a killed server to be back with proven weights, and for the last rollouts to end."""
    seed: int = 0


@dataclass(kw_only=True)
class Played:
    """What happened."""

    trajectories: list[Trajectory] = field(default_factory=list[Trajectory])
    num_asked: int = 0
    in_flight: list[int] = field(default_factory=list[int])
    """Requests being answered, at each kill."""
    positions: list[int] = field(default_factory=list[int])
    """Tokens of its reply that had come to each of them; they come in steps of the server's `stream_tokens`."""
    back_s: list[float] = field(default_factory=list[float])
    """From each kill until the server sampled again."""
    sources: list[TinySource] = field(default_factory=list[TinySource])
    """The weights of version 0, 1, ..."""


def main(config: Config) -> None:
    """Plays, checks, writes the result; exits non-zero when anything was lost, doubled or misattributed."""
    began = time.monotonic()
    played = asyncio.run(play(config))
    figures = check(played) | {"seconds": round(time.monotonic() - began, 1)}
    result = {
        "hardware": describe_hardware(),
        "figures": figures,
        "command": "python -m tests.faults.servers " + " ".join(sys.argv[1:]),
        "revision": code_revision(),
        "seed": config.seed,
        "in_flight": played.in_flight,
        "positions": sorted(played.positions),
    }
    config.out.parent.mkdir(parents=True, exist_ok=True)
    config.out.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(figures, indent=2))
    if any(figures[name] for name in ("rollouts_lost", "rollouts_doubled", "tokens_misattributed")):
        raise SystemExit("rollouts or tokens went wrong; the figures above say how many")


async def play(config: Config) -> Played:
    """Rollouts until the last kill is made good, and to their ends."""
    played, draw = Played(), random.Random(config.seed)
    with tempfile.TemporaryDirectory(prefix="server-kills-") as scratch, _watched_channels() as replies:
        async with _served(config, Path(scratch)) as (pool, sync, source):
            await _publish(sync, source, played)
            flying: dict[asyncio.Task[Trajectory], None] = {}
            sampler = pool.sampler()
            for num_kills in range(config.kills):
                if num_kills % config.kills_per_version == 0:
                    _top_up(flying, sampler, config, played)
                    await _publish(sync, source, played)
                await _until_decoding(flying, sampler, config, played, replies, draw)
                played.in_flight.append(len(replies))
                played.positions += [sum(len(part.ids) for part in parts) for parts in replies.values()]
                played.back_s.append(await _kill_and_wait(pool, num_kills % 2, config.limit_s))
            async with asyncio.timeout(config.limit_s):
                await asyncio.gather(*flying)
            await asyncio.sleep(0)
    return played


def check(played: Played) -> dict[str, float]:
    """Figures: what was lost, doubled and misattributed (all should be 0), and under what."""
    ids = Counter(trajectory.id for trajectory in played.trajectories)
    worst, others = 0.0, list[float]()
    num_tokens = num_wrong = num_spans = 0
    for trajectory in played.trajectories:
        for gaps, other_gaps in _span_gaps(trajectory, played.sources):
            num_spans += 1
            num_tokens += len(gaps)
            num_wrong += int((gaps > TOLERANCE).sum())
            worst = max(worst, float(gaps.max()))
            others.append(float(other_gaps.max()))
    return {
        "kills": len(played.in_flight),
        "in_flight_at_kills_min": min(played.in_flight),
        "decode_position_min": min(played.positions),
        "decode_position_median": statistics.median(played.positions),
        "decode_position_max": max(played.positions),
        "rollouts": played.num_asked,
        "rollouts_lost": played.num_asked - len(ids),
        "rollouts_doubled": len(played.trajectories) - len(ids),
        "versions": len(played.sources),
        "spans": num_spans,
        "tokens": num_tokens,
        "tokens_misattributed": num_wrong + abs(played.num_asked * NUM_TURNS * REPLY_TOKENS - num_tokens),
        "logprob_gap_max": worst,
        "logprob_gap_to_other_version_median": statistics.median(others),
        "back_s_median": round(statistics.median(played.back_s), 2),
        "back_s_max": round(max(played.back_s), 2),
    }


def _span_gaps(trajectory: Trajectory, sources: Sequence[TinySource]) -> Iterator[tuple[Any, Any]]:
    """Of each version span: gaps to the weights that it names, and to those of the version beside them."""
    (sample,) = trajectory_samples(trajectory)
    ids = sample.ids.tolist()
    spans = [span for turn in trajectory.turns if turn.tokens for span in turn.tokens.spans]
    numbers = {span.version.n for span in spans}
    beside = {n: n - 1 if n else 1 for n in numbers}
    logprobs = {n: np.asarray([0.0, *sources[n].logprobs(ids)]) for n in numbers | set(beside.values())}
    trained = np.flatnonzero(sample.mask)
    begin = 0
    for span in spans:
        at = trained[begin : begin + span.num_tokens]
        begin += span.num_tokens
        n = span.version.n
        yield tuple(np.abs(logprobs[each][at] - sample.logprobs[at]) for each in (n, beside[n]))  # type: ignore[misc]
    assert begin == len(trained), "a version for every trained token"


@asynccontextmanager
async def _served(config: Config, scratch: Path) -> AsyncIterator[tuple[InferencePool, WeightSync, TinySource]]:
    """Two servers of a tiny model, and what gives them weights."""
    model = save_tiny_qwen3(scratch / "model")
    server = ServerConfig(max_model_len=512, max_num_seqs=32, kv_cache_gb=0.125, stream_tokens=8)
    pool_config = InferencePoolConfig(server=server, num_servers=2, health_interval_s=0.5, max_restarts=config.kills)
    source = TinySource(model)
    async with start_cluster(ClusterConfig()), start_inference_pool(pool_config, model=model) as pool:
        sync_config = SyncConfig(directory=scratch, mode=UpdateMode.ABORT)
        yield pool, WeightSync(source=source, target=pool, config=sync_config), source


async def _publish(sync: WeightSync, source: TinySource, played: Played) -> None:
    """The next version; its weights are kept for the check."""
    n = len(played.sources)
    if n:
        source.step(n)
    played.sources.append(copy.deepcopy(source))
    await sync.publish(PolicyVersion(lineage=0, n=n))


def _top_up(flying: dict[asyncio.Task[Trajectory], None], sampler: Sampler, config: Config, played: Played) -> None:
    """Starts rollouts until enough are in flight."""

    def land(task: asyncio.Task[Trajectory]) -> None:
        del flying[task]
        if not task.cancelled() and task.exception() is None:
            played.trajectories.append(task.result())

    while len(flying) < config.rollouts_at_once:
        task = asyncio.create_task(_rollout(sampler, f"g{played.num_asked}.0"))
        played.num_asked += 1
        flying[task] = None
        task.add_done_callback(land)


async def _rollout(sampler: Sampler, key: str) -> Trajectory:
    """Some Turns, each of which runs to its limit; the world says its number."""
    params = SamplingParams(max_tokens=REPLY_TOKENS)
    renderer = EndlessRenderer(tiny_renderer(CHATML_TEMPLATE))
    conversation = SampledConversation(
        renderer, sampler, params, max_turns=NUM_TURNS, context_tokens=CONTEXT_TOKENS, key=key
    )
    for turn in range(NUM_TURNS):
        await conversation.ask(f"{key} {turn}")
    return Trajectory(
        id=key,
        task_id="task",
        group_id=key,
        member=0,
        prompt=conversation.prompt,
        turns=tuple(conversation.turns),
        outcome=Outcome.COMPLETED,
        reward=1.0,
    )


@contextmanager
def _watched_channels() -> Iterator[dict[int, list[Part]]]:
    """The Parts that have come of every reply being sampled, by a number of its own."""
    replies: dict[int, list[Part]] = {}
    numbers, original = itertools.count(), Channel.request

    async def request(self: Channel, request: Request, parts: list[Part]) -> None:
        number = next(numbers)
        replies[number] = parts
        try:
            await original(self, request, parts)
        finally:
            del replies[number]

    Channel.request = request
    try:
        yield replies
    finally:
        Channel.request = original


async def _until_decoding(
    flying: dict[asyncio.Task[Trajectory], None],
    sampler: Sampler,
    config: Config,
    played: Played,
    replies: dict[int, list[Part]],
    draw: random.Random,
) -> None:
    """A random moment at which enough requests are being answered."""
    async with asyncio.timeout(config.limit_s):
        while True:
            _top_up(flying, sampler, config, played)
            await asyncio.sleep(draw.uniform(0.05, 1.0))
            if len(replies) >= _MIN_IN_FLIGHT:
                return


async def _kill_and_wait(pool: InferencePool, index: int, limit_s: float) -> float:
    """Seconds from the kill until the server is back."""
    health = pool.servers[index].health
    assert health is not None, "both servers are up"
    began, num_restarts = time.monotonic(), pool.num_restarts
    os.kill(health.pid, signal.SIGKILL)
    async with asyncio.timeout(limit_s):
        while True:
            await asyncio.sleep(0.1)
            if pool.num_restarts > num_restarts:
                return time.monotonic() - began


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
