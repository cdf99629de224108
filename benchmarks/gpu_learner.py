"""The learner path on one GPU: Qwen3 shapes with random weights, 32,768 tokens, nothing to download.

    python -m benchmarks.gpu_learner --out benchmarks/results/gpu-learner-h200.json
    python -m benchmarks.gpu_learner --out F --cases 0.6b --budget-s 200

Needs torch (2.11 or newer) and numpy alone. Cases, in order, each skipped with its reason when the time is nearly over:

    correctness  a small shape in bf16 on the GPU against float32 on the CPU: loss and gradients
    0.6b, 1.7b   whole steps: forward, backward, clipping, AdamW on float32 weights
    8b           whole steps, with AdamW over an eighth of the weights, as one of 8 ranks steps; all else is whole

Model FLOP utilisation = operations of forward and backward (learners/shape.py: 6 per weight and token, and for a Sample
of L tokens 6 heads head_dim L^2 a layer; none for recomputation) / seconds / 989e12, the bf16 peak of an H200.
Tokens lie in Samples of 32,768 and, for packing, of 2,048 to 16,384; 60% of them are trained.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.hardware import describe_hardware
from benchmarks.qwen3 import Qwen3, compiled
from learners.config import LearnerConfig, Precision
from learners.model import PolicyNetwork, compute_device, shard
from learners.optimizer import build_optimizer
from learners.packing import PackedBatch, WeightedSample, pack
from learners.process_group import init_process_group
from learners.shape import ModelShape, load_shape
from trajectories.samples import Sample

PEAK_FLOPS = 989e12
"""Dense bf16 operations per second of an H100 or H200 (NVIDIA's data sheet)."""
TRAINED_SHARE = 0.6
SMALL = ModelShape(
    vocabulary=2048,
    hidden=256,
    intermediate=512,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    is_tied=True,
)
LEAST_SECONDS = {"correctness": 10, "0.6b": 60, "1.7b": 90, "8b": 150}
"""A case starts only with so many seconds left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """How the timed cases run."""

    context: int
    """Tokens of a micro-batch."""
    num_steps: int
    is_compiled: bool


def main() -> None:
    """Runs the cases and writes one JSON, after each of them, so that what ran is kept whatever comes."""
    arguments = _parse()
    began = time.monotonic()
    init_process_group()
    setting = Setting(context=arguments.context, num_steps=arguments.steps, is_compiled=arguments.compile)
    cases: dict[str, Callable[[], dict[str, Any]]] = {
        "correctness": correctness,
        "0.6b": lambda: whole_steps(load_shape("qwen3-0.6b"), setting),
        "1.7b": lambda: whole_steps(load_shape("qwen3-1.7b"), setting),
        "8b": lambda: whole_steps(load_shape("qwen3-8b"), setting, optimizer_ranks=8),
        "small": lambda: whole_steps(SMALL, setting),
        "small-of-8-ranks": lambda: whole_steps(SMALL, setting, optimizer_ranks=8),
    }
    results: dict[str, Any] = {}
    for name in arguments.cases:
        left_s = arguments.budget_s - (time.monotonic() - began)
        if left_s < LEAST_SECONDS.get(name, 0):
            results[name] = {"skipped": f"{left_s:.0f} s left of {arguments.budget_s:g}"}
        else:
            results[name] = _guarded(cases[name])
        print(name, json.dumps(results[name]), flush=True)
        _write(arguments.out, results)


def correctness() -> dict[str, Any]:
    """Loss and gradients of a small shape: bf16 here against float32 on the CPU, on the same weights and tokens."""
    samples = make_samples((700, 400, 400, 100), SMALL.vocabulary)
    reference = _build(SMALL, Precision.FP32, torch.device("cpu"), is_checkpointed=False)
    expected_loss = _forward_backward(reference, pack(samples))
    found = _build(SMALL, Precision.BF16, compute_device(), is_checkpointed=True)
    loss = _forward_backward(shard(found, LearnerConfig(precision=Precision.BF16), 1), pack(samples, compute_device()))
    expected = {name: p.grad for name, p in reference.named_weights() if p.grad is not None}
    errors = {
        name: float((_local(p.grad).cpu() - expected[name]).norm() / expected[name].norm())
        for name, p in found.named_weights()
        if p.grad is not None
    }
    return {
        "loss": loss,
        "loss_fp32": expected_loss,
        "loss_relative_error": abs(loss - expected_loss) / abs(expected_loss),
        "gradient_relative_error_median": float(np.median(list(errors.values()))),
        "gradient_relative_error_worst": max(errors.values()),
        "num_gradients": len(errors),
    }


def whole_steps(shape: ModelShape, setting: Setting, *, optimizer_ranks: int = 1) -> dict[str, Any]:
    """Forward, backward, clipping and AdamW: one Sample as long as the micro-batch, then packed ones.

    AdamW steps as many weights as one of `optimizer_ranks` would.
    """
    config = LearnerConfig(precision=Precision.BF16, lr=1e-5)
    network = _sharded(shape, config, setting)
    optimizer = build_optimizer(config, _part(dict(network.named_weights()), optimizer_ranks))

    def step(batch: PackedBatch) -> float:
        loss = _forward_backward(network, batch)
        torch.nn.utils.clip_grad_norm_(network.parameters(), config.max_grad_norm)
        optimizer.step()
        network.zero_grad()
        return loss

    result = {"one_sample": _timed(step, shape, (setting.context,), setting)}
    packed = tuple(setting.context // share for share in (2, 4, 8, 16, 16))
    return result | {"packed": _timed(step, shape, packed, setting)}


def _part(weights: dict[str, torch.nn.Parameter], num_ranks: int) -> list[tuple[str, torch.nn.Parameter]]:
    """Weights from the end of the list, until they are the share of one of `num_ranks`."""
    wanted = sum(weight.numel() for weight in weights.values()) / num_ranks
    part: list[tuple[str, torch.nn.Parameter]] = []
    num_elements = 0
    for name, weight in reversed(weights.items()):
        if num_elements + weight.numel() <= wanted:
            part.append((name, weight))
            num_elements += weight.numel()
    return part


def make_samples(lengths: Sequence[int], vocabulary: int) -> list[WeightedSample]:
    """Random ids, the last 60% of each Sample trained, weighed for the token mean."""
    rng = np.random.default_rng(0)
    masks = [np.arange(length) >= length * (1 - TRAINED_SHARE) for length in lengths]
    weight = 1 / sum(int(mask.sum()) for mask in masks)
    return [
        WeightedSample(
            sample=Sample(
                ids=rng.integers(0, vocabulary, len(mask)).astype(np.int32),
                mask=mask,
                logprobs=np.zeros(len(mask), np.float32),
            ),
            advantage=1.0,
            weight=weight,
        )
        for mask in masks
    ]


def _timed(
    step: Callable[[PackedBatch], float], shape: ModelShape, lengths: tuple[int, ...], setting: Setting
) -> dict[str, Any]:
    """Seconds, tokens per second, utilisation and peak memory of steps after one that warms up."""
    device = compute_device()
    batch = pack(make_samples(lengths, shape.vocabulary), device)
    step(batch)
    _synchronize()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    losses = [step(batch) for _ in range(setting.num_steps)]
    _synchronize()
    seconds = (time.perf_counter() - began) / setting.num_steps
    flops = shape.flops(lengths, batch.targets_N.numel())
    peak_gb = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else None
    return {
        "lengths": lengths,
        "step_s": seconds,
        "tokens_per_s": sum(lengths) / seconds,
        "mfu": flops / seconds / PEAK_FLOPS,
        "peak_gb": peak_gb,
        "losses": losses,
    }


def _forward_backward(network: PolicyNetwork, batch: PackedBatch) -> float:
    """Adds the gradients of the token mean of -log p; returns it."""
    logprobs_N, _ = network(batch, 1.0)
    loss = -torch.dot(logprobs_N, batch.weights_N)
    loss.backward()
    return loss.item()


def _sharded(shape: ModelShape, config: LearnerConfig, setting: Setting) -> PolicyNetwork:
    network = _build(shape, Precision.BF16, compute_device(), is_checkpointed=True, is_compiled=setting.is_compiled)
    return shard(network, config, 1)


def _build(
    shape: ModelShape,
    precision: Precision,
    device: torch.device,
    *,
    is_checkpointed: bool,
    is_compiled: bool = False,
) -> PolicyNetwork:
    """Random float32 weights, made where they stay; the same on every device for the small shape."""
    torch.manual_seed(0)
    made_on = device if shape.num_parameters > 1e8 else torch.device("cpu")
    with made_on:
        model = Qwen3(shape, is_checkpointed=is_checkpointed)
        for parameter in model.parameters():
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, std=0.02)
    model = compiled(model) if is_compiled else model
    chunk_tokens = 512 if precision is Precision.FP32 else 2048
    return PolicyNetwork(model.train(), chunk_tokens).to(device)


def _local(gradient: Tensor | None) -> Tensor:
    assert gradient is not None
    whole = getattr(gradient, "full_tensor", None)
    return whole() if whole is not None else gradient


def _guarded(case: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What the case found; one that runs out of memory says so and lets the others run."""
    try:
        return case()
    except torch.OutOfMemoryError as error:
        return {"out_of_memory": str(error).splitlines()[0]}
    finally:
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _write(out: Path, results: dict[str, Any]) -> None:
    """Writes what is known so far."""
    timed = {name: case["one_sample"] for name, case in results.items() if "one_sample" in case}
    figures: dict[str, float] = {}
    for name, case in timed.items():
        figures |= {f"mfu_{name}": case["mfu"], f"tokens_per_s_{name}": case["tokens_per_s"]}
    if "loss_relative_error" in results.get("correctness", {}):
        figures["loss_relative_error"] = results["correctness"]["loss_relative_error"]
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    result = {
        "command": "python -m benchmarks.gpu_learner " + " ".join(sys.argv[1:]),
        "hardware": describe_hardware() | {"gpu": gpu, "torch": torch.__version__},
        "figures": figures,
        "cases": results,
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cases", nargs="+", default=["correctness", "0.6b", "1.7b", "8b"])
    parser.add_argument("--context", type=int, default=32_768, help="tokens of a micro-batch")
    parser.add_argument("--steps", type=int, default=3, help="timed steps of each case")
    parser.add_argument("--budget-s", type=float, default=540.0, help="no case starts that would end after this")
    parser.add_argument("--compile", action="store_true", help="fuse norms and MLPs with torch.compile")
    return parser.parse_args()


if __name__ == "__main__":
    main()
