"""Tokens per second through pool and harness, over those of vLLM alone on the same prompts and lengths in the same run.

    python -m benchmarks.inference --out benchmarks/results/inference.json

Two processes serve the same model side by side, one through Ray, wire, conversation and episode, one by vLLM's own
interface; rounds alternate, and a figure is the median over rounds of the ratio. The environment answers at once.
Beside the ratios: processor milliseconds of each turn on our side of the engine, and two servers with trajectories kept
on one (sticky) against turns dealt out in turn (round robin).
"""

import asyncio
import json
import os
import statistics
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from actors.cluster import ClusterConfig, start_cluster
from actors.inference_config import InferencePoolConfig, ServerConfig
from actors.inference_directory import ActorDirectory, ActorLocator
from actors.inference_pool import InferencePool, start_inference_pool
from actors.inference_sampler import PoolSampler
from benchmarks.conversations import Player, Shape
from benchmarks.hardware import describe_hardware
from benchmarks.policies import SERVERS, policy_directory
from envs.sampler import Completion, Sampler, SamplingParams
from trajectories.schema import Trajectory

SHAPES = {"single_turn": Shape(num_turns=1), "five_turn": Shape(num_turns=5)}


@dataclass(frozen=True, kw_only=True)
class Config:
    """What to measure with."""

    out: Path
    """File for the JSON."""
    policies: tuple[str, ...] = ("tiny", "smollm2")
    rounds: int = 3
    """Rounds of each kind, after one that warms up."""
    conversations: int = 32
    """Conversations at once."""


async def main(config: Config) -> None:
    """Measures and writes the JSON."""
    hardware = describe_hardware()
    figures: dict[str, float] = {}
    async with start_cluster(ClusterConfig()):
        for policy in config.policies:
            figures |= await measure_ratio(policy, config)
            _write(config, hardware, figures)
        figures |= await measure_routing("tiny", config)
    print(_write(config, hardware, figures))


def _write(config: Config, hardware: dict[str, Any], figures: Mapping[str, float]) -> str:
    """What is measured so far, into the file."""
    rounded = {name: round(value, 4) for name, value in figures.items()}
    command = "python -m benchmarks.inference " + " ".join(sys.argv[1:])
    text = json.dumps({"command": command, "hardware": hardware, "figures": rounded}, indent=2)
    config.out.parent.mkdir(parents=True, exist_ok=True)
    config.out.write_text(text + "\n")
    return text


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


async def measure_ratio(policy: str, config: Config) -> dict[str, float]:
    """Ratios and processor time for one policy, single-turn and five-turn."""
    model, server = policy_directory(policy), SERVERS[policy]
    figures: dict[str, float] = {}
    async with (
        start_inference_pool(InferencePoolConfig(server=server), model=model) as pool,
        _raw_vllm(model, server) as raw,
    ):
        player = Player(model, pool.sampler())
        for kind, shape in SHAPES.items():
            num = config.conversations
            rounds: list[dict[str, float]] = []
            for seed in range(config.rounds + 1):
                rounds.append(await _round(pool, player, raw, shape, num, seed))
                _say(f"{policy} {kind} round {seed} of {config.rounds}: {rounds[-1]}")
            figures |= {f"{kind}_{name}_{policy}": value for name, value in _medians(rounds[1:]).items()}
    return figures


async def _round(
    pool: InferencePool,
    player: Player,
    raw: Callable[[dict[str, Any]], Awaitable[dict[str, float]]],
    shape: Shape,
    num: int,
    seed: int,
) -> dict[str, float]:
    """One round through the pool, and the same through vLLM alone."""
    health = pool.servers[0].health
    assert health is not None
    texts = player.texts(shape, num, seed=seed * 10 + shape.num_turns)
    began, cpu_s, server_cpu_s = time.perf_counter(), time.process_time(), _cpu_s(health.pid)
    trajectories = await player.play(shape, texts)
    seconds = time.perf_counter() - began
    worker_cpu_s, server_cpu_s = time.process_time() - cpu_s, _cpu_s(health.pid) - server_cpu_s
    num_turns = num * shape.num_turns
    rate = num_turns * shape.reply_tokens / seconds
    conversations = [_new_ids(trajectory) for trajectory in trajectories]
    alone = await raw({"conversations": conversations, "reply_tokens": shape.reply_tokens, "seed": seed})
    assert alone["num_tokens"] == num_turns * shape.reply_tokens
    raw_rate = alone["num_tokens"] / alone["seconds"]
    return {
        "ratio": rate / raw_rate,
        "tokens_per_s": rate,
        "raw_tokens_per_s": raw_rate,
        "worker_cpu_ms_per_turn": worker_cpu_s / num_turns * 1e3,
        "server_cpu_ms_per_turn": server_cpu_s / num_turns * 1e3,
        "raw_cpu_ms_per_turn": alone["cpu_s"] / num_turns * 1e3,
    }


async def measure_routing(policy: str, config: Config) -> dict[str, float]:
    """Prefix hit rate and tokens per second of five-turn conversations on two servers, sticky and round robin."""
    model = policy_directory(policy)
    figures: dict[str, float] = {}
    shape = SHAPES["five_turn"]
    pool_config = InferencePoolConfig(server=SERVERS[policy], num_servers=2, health_interval_s=0.5)
    async with start_inference_pool(pool_config, model=model) as pool:
        samplers: dict[str, Sampler] = {"sticky": pool.sampler(), "round_robin": RoundRobin(pool_config, pool)}
        for name, sampler in samplers.items():
            player = Player(model, sampler)
            rounds: list[dict[str, float]] = []
            for seed in range(config.rounds + 1):
                texts = player.texts(shape, config.conversations, seed=1000 + seed * 100 + len(name))
                await _metrics(pool)
                began = time.perf_counter()
                await player.play(shape, texts)
                seconds = time.perf_counter() - began
                rate = config.conversations * shape.num_turns * shape.reply_tokens / seconds
                hit_rate = (await _metrics(pool))["inference/prefix_hit_rate"]
                rounds.append({f"prefix_hit_rate_{name}": hit_rate, f"tokens_per_s_{name}": rate})
            figures |= _medians(rounds[1:])
    return figures


class RoundRobin:
    """A Sampler that deals the turns of a trajectory out to the servers in turn, for comparison."""

    def __init__(self, config: InferencePoolConfig, pool: InferencePool) -> None:
        directory = ActorDirectory(pool.id)
        self._samplers = [PoolSampler(config, Only(directory, server.name)) for server in pool.servers]
        self._num_turns: dict[str, int] = {}

    async def sample(
        self, prompt_ids: Sequence[int], params: SamplingParams, *, stop_ids: Sequence[int], key: str
    ) -> Completion:
        """See Sampler."""
        turn = self._num_turns[key] = self._num_turns.get(key, hash(key)) + 1
        sampler = self._samplers[turn % len(self._samplers)]
        return await sampler.sample(prompt_ids, params, stop_ids=stop_ids, key=key)


class Only:
    """A Directory of one server."""

    def __init__(self, directory: ActorDirectory, name: str) -> None:
        self._directory = directory
        self._name = name

    async def __call__(self) -> Mapping[str, ActorLocator]:
        """That server."""
        return {self._name: (await self._directory())[self._name]}


async def _metrics(pool: InferencePool) -> dict[str, float]:
    """The pool's metrics since the last call, up to this moment."""
    await asyncio.gather(*(server.refresh(60) for server in pool.servers))
    return pool.metrics()


def _new_ids(trajectory: Trajectory) -> list[list[int]]:
    tokens = [turn.tokens for turn in trajectory.turns]
    return [list(turn.new_ids) for turn in tokens if turn is not None]


def _medians(rounds: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: statistics.median(each[name] for each in rounds) for name in rounds[0]}


def _cpu_s(pid: int) -> float:
    """Processor seconds of one process, without its children."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@asynccontextmanager
async def _raw_vllm(
    model: Path, server: ServerConfig
) -> AsyncIterator[Callable[[dict[str, Any]], Awaitable[dict[str, float]]]]:
    """vLLM alone, in its own process; gives what plays a round there."""
    given = {"model": str(model), "max_num_seqs": server.max_num_seqs, "threads": server.threads}
    given |= {"kv_cache_gb": server.kv_cache_gb, "dtype": server.dtype.value, "max_model_len": server.max_model_len}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "benchmarks.raw_vllm", json.dumps(given)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env=os.environ | server.environment(),
        limit=1 << 24,
    )
    assert process.stdin is not None and process.stdout is not None
    ways_in, ways_out = process.stdin, process.stdout

    async def answer() -> dict[str, Any]:
        async with asyncio.timeout(1200):
            line = await ways_out.readline()
        if not line:
            raise RuntimeError("the process with vLLM alone ended; its errors stand above")
        return json.loads(line)

    async def play(what: dict[str, Any]) -> dict[str, float]:
        ways_in.write(json.dumps(what).encode() + b"\n")
        await ways_in.drain()
        return await answer()

    try:
        await answer()
        yield play
    finally:
        ways_in.close()
        await asyncio.wait_for(process.wait(), 60)


if __name__ == "__main__":
    asyncio.run(main(tyro.cli(Config, description=__doc__)))
