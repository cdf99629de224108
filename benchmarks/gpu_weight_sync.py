"""Seconds of a weight sync between GPUs: vLLM's transfers against stages in shared memory, on one node.

    python -m benchmarks.gpu_weight_sync --model DIRECTORY --num-gpus 2 --out benchmarks/results/gpu_weight_sync.json

With two GPUs a learner rank has one and a server the other: files against nccl. With one they take turns on it: files
against ipc. With none (a check of this script, not a measurement) files against the object store. Each way gets a
learner group and an inference pool of its own, as in recipes/rloo.py; each round trains a step and publishes it, proven
by the probe. Needs the GPU build of vLLM, and memory for training the model; takes a few minutes.
"""

import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro

from actors.cluster import ClusterConfig, Resources, start_cluster
from actors.inference_config import InferencePoolConfig, ServerConfig, Transport
from actors.inference_pool import start_inference_pool
from actors.learner_group import LearnerGroup, LearnerGroupConfig, start_learner_group
from actors.placement import shared_gpus
from actors.sync_config import SyncConfig
from actors.transfer_sync import make_sync
from benchmarks.hardware import describe_hardware
from learners.config import LearnerConfig, LossConfig, LossKind, Precision
from learners.plan import BatchPlan, SizedSample, plan_samples
from trajectories.samples import Sample
from trajectories.schema import PolicyVersion
from trajectories.store import StoreWriter

WAYS: Mapping[int, tuple[Transport, Transport]] = {
    0: (Transport.FILES, Transport.OBJECT_STORE),
    1: (Transport.FILES, Transport.IPC),
    2: (Transport.FILES, Transport.NCCL),
}
NUM_TOKENS = 256
DEADLINE_S = 600.0


@dataclass(frozen=True, kw_only=True)
class Config:
    """What to measure with."""

    model: Path
    """Hugging Face directory."""
    out: Path
    """File for the JSON."""
    num_gpus: int = 2
    """2: one each for learner and server; 1: they share it; 0: none, a check of this script."""
    rounds: int = 5
    canary: bool = True
    """See new weights reach every kernel first, which takes a push for each group of tensors."""

    def __post_init__(self) -> None:
        if self.num_gpus not in WAYS or self.rounds < 1:
            raise ValueError(f"num_gpus must be 0, 1 or 2 and rounds >= 1, got {self.num_gpus} and {self.rounds}")


async def main(config: Config) -> None:
    """Measures and writes the JSON."""
    figures: dict[str, float] = {}
    async with start_cluster(ClusterConfig()):
        for way in WAYS[config.num_gpus]:
            measured = await measure(config, way)
            figures |= {f"{way.value}_{name}": value for name, value in measured.items()}
    figures["gb"] = sum(path.stat().st_size for path in config.model.glob("*.safetensors")) / 1e9
    result = {"hardware": describe_hardware(), "figures": {name: round(value, 5) for name, value in figures.items()}}
    config.out.parent.mkdir(parents=True, exist_ok=True)
    config.out.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


async def measure(config: Config, way: Transport) -> dict[str, float]:
    """Medians over the rounds: seconds of a publish, of the transfer or load in it, and the probe's gap."""
    is_shared = config.num_gpus == 1
    on_gpu = int(config.num_gpus > 0)
    server = ServerConfig(num_gpus=on_gpu, transport=way, colocated=is_shared)
    learner = LearnerConfig(precision=Precision.BF16 if on_gpu else Precision.FP32, cpu_offload=is_shared)
    ranks = LearnerGroupConfig(resources=Resources(num_gpus=on_gpu))
    sync = SyncConfig(transport=way, canary=config.canary, probe_is_exact=not on_gpu, load_timeout_s=DEADLINE_S)
    async with AsyncExitStack() as stack:
        store = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        places = []
        if is_shared:
            pair = shared_gpus(1, num_cpus=0, what="a learner rank and a server", deadline_s=DEADLINE_S)
            places = await stack.enter_async_context(pair)
        group = await stack.enter_async_context(
            start_learner_group(ranks, learner, model=config.model, store=store, places=places)
        )
        pool = await stack.enter_async_context(
            start_inference_pool(InferencePoolConfig(server=server), model=config.model, version=None, places=places)
        )
        weights = make_sync(sync, source=group, target=pool)
        stack.push_async_callback(weights.close)
        await weights.publish(PolicyVersion(lineage=0, n=0), barrier=True)
        plan = random_plan(store, pool.vocab_size)
        rounds: list[dict[str, float]] = []
        for n in range(1, config.rounds + 1):
            if is_shared:
                await pool.sleep()
            await _step(group, plan)
            began = time.perf_counter()
            metrics = await weights.publish(PolicyVersion(lineage=0, n=n), barrier=True)
            rounds.append({"publish_s": time.perf_counter() - began} | _of_interest(metrics))
    return {name: statistics.median(each[name] for each in rounds) for name in rounds[0]}


def random_plan(store: Path, vocab_size: int) -> BatchPlan:
    """One Sample of random tokens, so that a step moves every tensor."""
    rng = np.random.default_rng(0)
    sample = Sample(
        ids=rng.integers(0, vocab_size, NUM_TOKENS).astype(np.int32),
        mask=np.arange(NUM_TOKENS) > 0,
        logprobs=np.zeros(NUM_TOKENS, np.float32),
    )
    with StoreWriter(store, "random") as writer:
        location = writer.append_sample(sample)
    sized: Sequence[SizedSample] = [SizedSample(location=location, num_tokens=NUM_TOKENS, num_trained=NUM_TOKENS - 1)]
    return plan_samples(sized, num_ranks=1, max_tokens=NUM_TOKENS)


async def _step(group: LearnerGroup, plan: BatchPlan) -> None:
    await group.forward_backward(plan, LossConfig(kind=LossKind.CROSS_ENTROPY))
    await group.optim_step()
    await group.release_memory()


def _of_interest(metrics: Mapping[str, float]) -> dict[str, float]:
    return {"load_s": metrics["sync/load_s"], "probe_gap": metrics["sync/probe_gap"]}


if __name__ == "__main__":
    asyncio.run(main(tyro.cli(Config, description=__doc__)))
