"""Where a server's seconds go while it takes new weights, beside a plain copy of the same bytes.

    python -m benchmarks.load_profile --out F

SmolLM2 in bfloat16 as benchmarks/weight_sync.py serves it, with nothing in flight. Figures are medians over syncs:

    load_s           the server's load, without the profiler
    copy_s           one copy of the same bytes in memory
    profiled_load_s  a load under PyTorch's profiler, to which the next three add up
    packing_s        packing of the layers for oneDNN's kernels, their making included
    copies_s         copies into fresh tensors, and from these into the kernels'
    other_s          everything else, nearly all of it vLLM's bookkeeping in Python
    page_faults      pages that the kernel gave to the process in one load
"""

import json
import os
import resource
import statistics
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tyro

from actors.weight_extension import WeightExtension
from actors.weight_stage import write_stage
from benchmarks.hardware import describe_hardware
from benchmarks.policies import SERVERS, policy_directory
from benchmarks.weight_sync import seconds_of_a_copy
from trajectories.schema import PolicyVersion

PACKING = "_C::create_onednn_mm_handler"
COPIES = "aten::copy_"


@dataclass(frozen=True, kw_only=True)
class Config:
    """What to measure with."""

    out: Path
    """File for the JSON."""
    rounds: int = 7
    """Syncs without the profiler, and as many with it."""


class Profiled(WeightExtension):
    """Loads under the profiler."""

    def profile_load(self, message: dict[str, Any]) -> dict[str, float]:
        """See `load_stage`; seconds by kind."""
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            load_s = self.load_stage(message, None)["load_s"]
        own = {event.key: event.self_cpu_time_total / 1e6 for event in profiled.key_averages()}
        packing_s, copies_s = own[PACKING], own[COPIES]
        return {
            "profiled_load_s": load_s,
            "packing_s": packing_s,
            "copies_s": copies_s,
            "other_s": load_s - packing_s - copies_s,
        }

    def count_load(self, message: dict[str, Any]) -> dict[str, float]:
        """See `load_stage`; page faults beside the seconds."""
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        loaded = self.load_stage(message, None)
        return {**loaded, "page_faults": resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before}


def main(config: Config) -> None:
    """Measures and writes the JSON."""
    hardware = describe_hardware()
    figures = measure(policy_directory("smollm2"), config.rounds)
    result = {"hardware": hardware, "figures": {name: round(value, 4) for name, value in figures.items()}}
    config.out.parent.mkdir(parents=True, exist_ok=True)
    config.out.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


def measure(model: Path, num_rounds: int) -> dict[str, float]:
    """All figures."""
    server = replace(SERVERS["smollm2"], worker_extension="benchmarks.load_profile.Profiled")
    # Before vLLM is imported; its engine then starts in a process of its own, with all of this, as in a server.
    os.environ.update(server.environment() | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"})
    from safetensors.torch import load_file
    from vllm import LLM

    llm: Any = LLM(**server.resolved_engine_args(model))
    weights = {name: tensor for path in model.glob("*.safetensors") for name, tensor in load_file(path).items()}
    rounds: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        for n in range(num_rounds + 1):
            manifest = write_stage(Path(directory), PolicyVersion(lineage=0, n=n), iter(weights.items()))
            (counted,) = llm.collective_rpc("count_load", args=(manifest.as_message(),))
            (profiled,) = llm.collective_rpc("profile_load", args=(manifest.as_message(),))
            rounds.append(counted | profiled)
    del rounds[0]  # warms up
    figures = {name: statistics.median(each[name] for each in rounds) for name in rounds[0]}
    return figures | {"copy_s": seconds_of_a_copy(manifest.num_bytes)}


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
