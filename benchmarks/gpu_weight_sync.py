"""Seconds of a weight sync between GPUs: vLLM's nccl against stages in shared memory, on one node with two GPUs.

    python -m benchmarks.gpu_weight_sync --model DIRECTORY --out benchmarks/results/gpu_weight_sync.json

One GPU holds the weights as a learner would, the other serves them; each round changes every tensor, sends it, and asks
the server for log-probabilities, which must change. Needs the GPU build of vLLM; takes a few minutes.
"""

import asyncio
import json
import socket
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tyro

from actors.cluster import ClusterConfig, start_cluster
from actors.inference_config import DType, InferencePoolConfig, ServerConfig, UpdateMode
from actors.inference_pool import InferencePool, ServerHandle, start_inference_pool
from actors.vllm_transfer import Sender, TransferBackend, TransferConfig
from actors.weight_stage import write_stage
from benchmarks.hardware import describe_hardware
from trajectories.schema import PolicyVersion

DEADLINE_S = 600.0
PROBE = tuple(range(100, 164))


@dataclass(frozen=True, kw_only=True)
class Config:
    """What to measure with."""

    model: Path
    """Hugging Face directory."""
    out: Path
    """File for the JSON."""
    rounds: int = 5
    stages: Path = field(default_factory=lambda: Path("/dev/shm/gpu-weight-sync"))
    """Where stages are written."""


async def main(config: Config) -> None:
    """Measures and writes the JSON."""
    transfer = TransferConfig(
        backend=TransferBackend.NCCL, server_ranks=(1,), master_address="127.0.0.1", master_port=_free_port()
    )
    server = ServerConfig(dtype=DType.BFLOAT16, num_gpus=1, engine_args=transfer.engine_args())
    pool_config = InferencePoolConfig(server=server)
    async with start_cluster(ClusterConfig()), start_inference_pool(pool_config, model=config.model) as pool:
        figures = await _measure(config, transfer, pool)
    result = {"hardware": describe_hardware(), "figures": figures}
    config.out.parent.mkdir(parents=True, exist_ok=True)
    config.out.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


async def _measure(config: Config, transfer: TransferConfig, pool: InferencePool) -> dict[str, float]:
    weights = _Weights(config.model)
    server = pool.servers[0]
    sender = Sender(transfer, weights.export, rank=0)
    await asyncio.to_thread(sender.open, _caller(asyncio.get_running_loop(), pool.servers))
    seconds: dict[str, list[float]] = {"nccl": [], "files": []}
    for n in range(1, config.rounds + 1):
        for offset, (way, taken) in enumerate(seconds.items()):
            version = PolicyVersion(lineage=0, n=2 * n + offset)
            before = await server.probe(PROBE, DEADLINE_S)
            weights.step()
            began = time.perf_counter()
            if way == "nccl":
                await asyncio.to_thread(sender.send, version, UpdateMode.KEEP)
            else:
                manifest = await asyncio.to_thread(write_stage, config.stages, version, weights.export())
                await server.load(manifest, UpdateMode.KEEP, 16, True, DEADLINE_S)
            taken.append(time.perf_counter() - began)
            assert await server.probe(PROBE, DEADLINE_S) != before, f"{way} left the old weights"
    sender.close()
    return {f"{way}_s": statistics.median(taken) for way, taken in seconds.items()} | {"gb": weights.num_bytes / 1e9}


class _Weights:
    """The learner's side: a whole model on the first GPU."""

    def __init__(self, model: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self._model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
        self._model.to("cuda:0")  # pyright: ignore[reportArgumentType]  # transformers types a wrapper, not the method
        self.num_bytes = sum(p.nbytes for p in self._model.parameters())

    def step(self) -> None:
        """Moves every parameter by about a hundredth of its size."""
        for parameter in self._model.parameters():
            parameter.data.mul_(1.01)

    def export(self) -> Iterator[tuple[str, Any]]:
        """Every parameter by its Hugging Face name."""
        return ((name, parameter.detach()) for name, parameter in self._model.named_parameters())


def _caller(
    loop: asyncio.AbstractEventLoop, servers: Sequence[ServerHandle]
) -> Callable[[str, Sequence[tuple[Any, ...]]], None]:
    """Calls every server from the sender's thread, on the loop that owns the handles."""

    def call_servers(method: str, arguments: Sequence[tuple[Any, ...]]) -> None:
        async def each() -> None:
            calls = (server.transfer(method, args, DEADLINE_S) for server, args in zip(servers, arguments, strict=True))
            await asyncio.gather(*calls)

        asyncio.run_coroutine_threadsafe(each(), loop).result(DEADLINE_S)

    return call_servers


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


if __name__ == "__main__":
    asyncio.run(main(tyro.cli(Config, description=__doc__)))
