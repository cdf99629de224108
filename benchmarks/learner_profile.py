"""Where the learner's seconds go in one RLOO step of benchmarks/learner.py, beside what this machine's cores can do.

    python -m benchmarks.learner_profile --out F

One rank, in this process, float32: 4 prompts of 37 tokens x 8 replies of 96 to 128. Figures:

    pass_s            forward and backward of all micro-batches, without the profiler (fastest of 3)
    profiled_pass_s   the same under PyTorch's profiler, to which the next three add up
    products_s        matrix products
    attention_s       attention kernels
    other_s           everything else
    products_gflops   6 x weights x tokens (8 for the head, whose logits are computed twice) over products_s
    machine_gflops    rate of one large float32 product here
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.hardware import describe_hardware
from benchmarks.policies import policy_directory
from benchmarks.sft_contenders import store_samples
from trajectories.samples import Sample

NUM_PROMPTS, GROUP_SIZE = 4, 8
PROMPT_TOKENS = 37
REPLY_TOKENS = (96, 128)
"""Shortest and longest."""
MAX_TOKENS = 4096
NUM_PASSES = 3
PRODUCTS = {"aten::mm", "aten::addmm", "aten::addmm_"}
ATTENTION = "scaled_dot_product"


def main() -> None:
    """Measures and writes the JSON."""
    arguments = _parse()
    figures = measure(policy_directory("smollm2"), arguments.threads)
    result = {
        "command": "python -m benchmarks.learner_profile " + " ".join(sys.argv[1:]),
        "hardware": describe_hardware(),
        "threads": arguments.threads,
        "figures": {name: round(value, 3) for name, value in figures.items()},
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result["figures"], indent=1))


def make_samples(vocabulary: int) -> list[Sample]:
    """The step's Samples: random ids, the same each time; members of a Group begin with its prompt."""
    rng = np.random.default_rng(0)
    samples: list[Sample] = []
    for _ in range(NUM_PROMPTS):
        prompt = rng.integers(0, vocabulary, PROMPT_TOKENS)
        for _ in range(GROUP_SIZE):
            reply = rng.integers(0, vocabulary, rng.integers(REPLY_TOKENS[0], REPLY_TOKENS[1] + 1))
            mask = np.arange(PROMPT_TOKENS + len(reply)) >= PROMPT_TOKENS
            logprobs = np.where(mask, np.float32(-9), np.float32(0)).astype(np.float32)
            samples.append(Sample(ids=np.concatenate([prompt, reply]).astype(np.int32), mask=mask, logprobs=logprobs))
    return samples


def measure(model: Path, threads: int) -> dict[str, float]:
    """All figures."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    from learners.config import LearnerConfig, LossConfig, LossKind
    from learners.learner import Learner
    from learners.plan import plan_samples

    torch.set_num_threads(threads)
    learner = Learner(LearnerConfig(max_tokens=MAX_TOKENS), model=model)
    weights = dict(learner.export_weights())
    embedding = weights.pop("model.embed_tokens.weight")
    num_other = sum(tensor.numel() for tensor in weights.values())
    samples = make_samples(len(embedding))
    with tempfile.TemporaryDirectory() as directory:
        store = Path(directory)
        sized = store_samples(store, samples)
        plan = plan_samples(sized, num_ranks=1, max_tokens=MAX_TOKENS).ranks[0]

        def one_pass() -> float:
            began = time.perf_counter()
            learner.forward_backward(plan, LossConfig(kind=LossKind.CLIPPED), store)
            return time.perf_counter() - began

        pass_s = min(one_pass() for _ in range(NUM_PASSES))
        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            profiled_pass_s = one_pass()
    seconds = _seconds_by_kind(profiled.key_averages())
    num_trained = sum(int(sample.mask.sum()) for sample in samples)
    flops = 6 * num_other * num_computed(samples) + 8 * embedding.numel() * num_trained
    return {
        "pass_s": pass_s,
        "profiled_pass_s": profiled_pass_s,
        **seconds,
        "other_s": profiled_pass_s - sum(seconds.values()),
        "products_gflops": flops / seconds["products_s"] / 1e9,
        "machine_gflops": machine_gflops(),
    }


def num_computed(samples: Sequence[Sample]) -> int:
    """Tokens that go through the layers: a prompt counts once for its Group."""
    return sum(len(sample.ids) - PROMPT_TOKENS for sample in samples) + NUM_PROMPTS * PROMPT_TOKENS


def _seconds_by_kind(events: Sequence[Any]) -> dict[str, float]:
    """Seconds that the operators spent themselves, of products and of attention."""
    own = {event.key: event.self_cpu_time_total / 1e6 for event in events}
    return {
        "products_s": sum(s for key, s in own.items() if key in PRODUCTS),
        "attention_s": sum(s for key, s in own.items() if ATTENTION in key),
    }


def machine_gflops(size: int = 2048, seconds: float = 2.0) -> float:
    """10^9 floating-point operations a second of a [size, size] float32 product."""
    import torch

    left, right = torch.randn(size, size), torch.randn(size, size)
    torch.mm(left, right)
    began, count = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        torch.mm(left, right)
        count += 1
    return 2 * size**3 * count / (time.perf_counter() - began) / 1e9


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    if arguments.threads < 1:
        parser.error("--threads must be >= 1")
    return arguments


if __name__ == "__main__":
    main()
