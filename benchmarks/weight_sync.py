"""A weight sync: seconds against a plain copy of the same bytes, pause in a step, tokens that each mode prefills again.

    python -m benchmarks.weight_sync --out benchmarks/results/weight_sync.json

A real learner publishes to a real server that is sampling. `sync_over_two_copies` is the server's load over two copies
of the model's bytes in memory; `pause_share` is the pause of one sync over the seconds of a step (sample 32 replies of
128 tokens, train on them); `learner_blocked_s` is what `publish` takes when the server follows by itself, as it does in
recipes/rloo.py. Figures without a policy in their name are SmolLM2's.
"""

import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro

from actors.cluster import ClusterConfig, Resources, start_cluster
from actors.inference_config import InferencePoolConfig, UpdateMode
from actors.inference_pool import InferencePool, start_inference_pool
from actors.learner_group import LearnerGroup, LearnerGroupConfig, start_learner_group
from actors.sync_config import SyncConfig
from actors.weight_sync import WeightSync
from benchmarks.conversations import Player, Shape
from benchmarks.hardware import describe_hardware
from benchmarks.policies import SERVERS, policy_directory
from learners.config import LearnerConfig, LossConfig
from learners.plan import plan_batch
from trajectories.handle import GroupHandle, summarize
from trajectories.schema import Group, Outcome, PolicyVersion, Trajectory
from trajectories.store import StoreWriter

NUM_REPLIES = 32
SHAPE = Shape(num_turns=1, prompt_tokens=64, reply_tokens=128)
THREADS = {"tiny": 1, "smollm2": 2}


@dataclass(frozen=True, kw_only=True)
class Config:
    """What to measure with."""

    out: Path
    """File for the JSON."""
    policies: tuple[str, ...] = ("tiny", "smollm2")
    rounds: int = 3
    """Steps, each with one sync, and syncs of each mode."""


async def main(config: Config) -> None:
    """Measures and writes the JSON."""
    hardware = describe_hardware()
    figures: dict[str, float] = {}
    async with start_cluster(ClusterConfig()):
        for policy in config.policies:
            measured = await measure(policy, config.rounds)
            suffix = "" if policy == "smollm2" else f"_{policy}"
            figures |= {f"{name}{suffix}": value for name, value in measured.items()}
    result = {"hardware": hardware, "figures": {name: round(value, 5) for name, value in figures.items()}}
    config.out.parent.mkdir(parents=True, exist_ok=True)
    config.out.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


async def measure(policy: str, num_rounds: int) -> dict[str, float]:
    """All figures of one policy."""
    model = policy_directory(policy)
    pool_config = InferencePoolConfig(server=SERVERS[policy])
    with tempfile.TemporaryDirectory() as scratch:
        store = Path(scratch) / "store"
        ranks = LearnerGroupConfig(resources=Resources(threads=THREADS[policy]))
        async with (
            start_learner_group(ranks, LearnerConfig(max_tokens=4096), model=model, store=store) as learner,
            start_inference_pool(pool_config, model=model, version=None) as pool,
        ):
            bench = Bench(model, learner, pool, store)
            figures = await bench.steps(num_rounds)
            for mode in UpdateMode:
                figures |= await bench.prefilled_again(mode, num_rounds)
    return figures


class Bench:
    """A learner and a server, and the syncs between them."""

    def __init__(self, model: Path, learner: LearnerGroup, pool: InferencePool, store: Path) -> None:
        self._learner = learner
        self._pool = pool
        self._store = store
        self._player = Player(model, pool.sampler())
        self._num_published = 0
        self._num_rounds = 0
        self._num_bytes = sum(path.stat().st_size for path in model.glob("*.safetensors"))

    def _sync_with(self, mode: UpdateMode, *, barrier: bool) -> WeightSync:
        # The learner's arithmetic differs from the server's in bfloat16, so the probe is an alarm here.
        config = SyncConfig(mode=mode, barrier=barrier, canary=False, probe_is_exact=False)
        return WeightSync(source=self._learner, target=self._pool, config=config)

    async def steps(self, num_steps: int) -> dict[str, float]:
        """Steps of sampling and training with a sync while replies are sampled; medians over steps."""
        sync = self._sync_with(UpdateMode.KEEP, barrier=False)
        await self._publish(sync)
        await self._play()
        steps = [await self._step(sync) for _ in range(num_steps)]
        # A server's metrics come with the next publish, so those of the first step's are its stage's alone.
        served = [metrics for _, metrics in steps[1:]] + [await self._publish(sync)]
        await sync.close()
        assert all(metrics["sync/in_flight"] > 0 for metrics in served), "a sync came when nothing was sampled"
        figures = {name: statistics.median(step[name] for step, _ in steps) for name in steps[0][0]}
        for name in ("load_s", "read_back_s", "pause_s"):
            figures[name] = statistics.median(metrics[f"sync/{name}"] for metrics in served)
        copy_s = seconds_of_a_copy(self._num_bytes)
        return figures | {
            "pause_share": statistics.median(
                metrics["sync/pause_s"] / step["step_s"] for (step, _), metrics in zip(steps, served, strict=True)
            ),
            "copy_s": copy_s,
            "sync_over_two_copies": figures["load_s"] / (2 * copy_s),
        }

    async def _step(self, sync: WeightSync) -> tuple[dict[str, float], Mapping[str, float]]:
        """Its seconds, and the metrics that its publish returned."""
        began = time.perf_counter()
        playing = asyncio.create_task(self._play())
        await self._until_sampling()
        blocked = time.perf_counter()
        metrics = await self._publish(sync)
        blocked_s = time.perf_counter() - blocked
        handles = self._stored(await playing)
        plan = plan_batch(handles, num_ranks=1, max_tokens=4096)
        await self._learner.forward_backward(plan, LossConfig())
        await self._learner.optim_step()
        step_s = time.perf_counter() - began
        return {"step_s": step_s, "learner_blocked_s": blocked_s}, metrics

    async def prefilled_again(self, mode: UpdateMode, num_rounds: int) -> dict[str, float]:
        """Tokens that a sync made the server compute a second time, with the replies of one round in flight."""
        sync = self._sync_with(mode, barrier=True)
        rounds: list[float] = []
        for _ in range(num_rounds):
            await self._metrics()
            playing = asyncio.create_task(self._play())
            await self._until_sampling()
            await self._publish(sync)
            trajectories = await playing
            prompts = sum(len(tokens.new_ids) for t in trajectories for turn in t.turns if (tokens := turn.tokens))
            rounds.append((await self._metrics())["inference/prefilled_tokens"] - prompts)
        await sync.close()
        return {f"reprefilled_tokens_{mode}": statistics.median(rounds)}

    async def _publish(self, sync: WeightSync) -> Mapping[str, float]:
        version = PolicyVersion(lineage=0, n=self._num_published)
        self._num_published += 1
        return await sync.publish(version)

    async def _play(self) -> list[Trajectory]:
        self._num_rounds += 1
        texts = self._player.texts(SHAPE, NUM_REPLIES, seed=self._num_rounds)
        return await self._player.play(SHAPE, texts)

    async def _until_sampling(self) -> None:
        """Waits until every reply has begun and most of it is still to come."""
        server = self._pool.servers[0]
        before = server.health.num_requests if server.health else 0
        async with asyncio.timeout(300):
            while server.health is None or server.health.num_requests < before + NUM_REPLIES:
                await server.refresh(60)

    async def _metrics(self) -> dict[str, float]:
        await self._pool.servers[0].refresh(60)
        return self._pool.metrics()

    def _stored(self, trajectories: Sequence[Trajectory]) -> list[GroupHandle]:
        """The replies as Groups of 8 with both rewards, so that every one is trained."""
        handles: list[GroupHandle] = []
        with StoreWriter(self._store, f"round-{self._num_rounds}") as writer:
            for begin in range(0, len(trajectories), 8):
                members = tuple(_rewarded(t, k) for k, t in enumerate(trajectories[begin : begin + 8]))
                group = Group(id=f"{self._num_rounds}-{begin}", task_id="instant", trajectories=members)
                handles.append(summarize(group, writer.append(group)))
        return handles


def _rewarded(trajectory: Trajectory, member: int) -> Trajectory:
    return Trajectory(
        id=trajectory.id,
        task_id=trajectory.task_id,
        group_id=trajectory.group_id,
        member=member,
        prompt=trajectory.prompt,
        turns=trajectory.turns,
        outcome=Outcome.COMPLETED,
        reward=float(member % 2),
    )


def seconds_of_a_copy(num_bytes: int) -> float:
    """The fastest of five copies of so many bytes from memory to memory."""
    source = np.ones(num_bytes, np.uint8)
    target = np.zeros_like(source)
    seconds: list[float] = []
    for _ in range(5):
        began = time.perf_counter()
        np.copyto(target, source)
        seconds.append(time.perf_counter() - began)
    return min(seconds)


if __name__ == "__main__":
    asyncio.run(main(tyro.cli(Config, description=__doc__)))
