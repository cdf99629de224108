"""The learner against TRL and a plain loop: SFT tokens per second and peak memory, and one whole RLOO step.

    python -m benchmarks.learner --out benchmarks/results/learner.json
    python -m benchmarks.learner --out F --only sft --steps 2

SmolLM2-135M. SFT in float32, micro-batches of 2,048 packed tokens, loss on 60% of them; TRL in four configurations
(packing bfd or wrapped, activation checkpointing off or on). RLOO: 4 prompts x 8 replies of at most 128 tokens; ours
in float32 with a compiled engine (its start is not timed), TRL in four configurations (float32 or bfloat16, 32 or 8
completions at once). Each contender runs alone in a process of its own, one after the other, with equal threads.
Figures:

    sft_speed_over_trl            tokens per second, over TRL's fastest configuration
    sft_activation_peak_over_trl  peak memory above weights and optimizer, over that of the same configuration
    sft_checkpointed_peak_over_trl  the same, both with activation checkpointing, TRL's smallest
    sft_speed_over_plain          tokens per second, over the plain loop
    rloo_completions_over_trl     completions per second of whole steps, over TRL's fastest configuration
"""

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import rloo_contenders, sft_contenders
from benchmarks.hardware import describe_hardware

CONTENDER_TIMEOUT_S = 3600
TRL_SFT = {
    f"trl-{packing}{'-checkpointed' if checkpointed else ''}": {
        "packing": packing,
        "activation_checkpointing": checkpointed,
    }
    for packing in ("bfd", "wrapped")
    for checkpointed in (False, True)
}
TRL_RLOO = {
    f"trl-{precision}-{micro_batch}": {"precision": precision, "micro_batch": micro_batch}
    for precision in ("fp32", "bf16")
    for micro_batch in (32, 8)
}


def main() -> None:
    """Runs the contenders, each in a process of its own, and writes one JSON; or, with --contender, runs that one."""
    arguments = _parse()
    if arguments.contender:
        measured = _contenders(arguments)[arguments.contender]()
        arguments.out.write_text(json.dumps(dataclasses.asdict(measured)))
        return
    result: dict[str, Any] = {
        "command": "python -m benchmarks.learner " + " ".join(sys.argv[1:]),
        "hardware": describe_hardware(),
        "steps_timed": arguments.steps,
        "threads": arguments.threads,
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    results: dict[str, dict[str, Any]] = {}
    for name in _contenders(arguments):
        results[name] = _in_process(name, arguments)
        arguments.out.write_text(json.dumps(result | {"contenders": results}, indent=1) + "\n")
    result |= {"figures": figures(results), "contenders": results}
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result["figures"], indent=1), f"written to {arguments.out}")


def figures(results: dict[str, dict[str, Any]]) -> dict[str, float]:
    """The ratios, from contender name to what it measured; those of a comparison that did not run are left out."""
    found: dict[str, float] = {}
    if trl := {name: results[f"sft/{name}"] for name in TRL_SFT if f"sft/{name}" in results}:
        ours, checkpointed = results["sft/thresher"], results["sft/thresher-checkpointed"]
        fastest = max(trl.values(), key=lambda measured: measured["tokens_per_s"])
        smallest = min(measured["peak_mb"] for measured in trl.values())
        found |= {
            "sft_speed_over_trl": ours["tokens_per_s"] / fastest["tokens_per_s"],
            "sft_activation_peak_over_trl": ours["peak_mb"] / fastest["peak_mb"],
            "sft_checkpointed_peak_over_trl": checkpointed["peak_mb"] / smallest,
            "sft_speed_over_plain": ours["tokens_per_s"] / results["sft/plain"]["tokens_per_s"],
        }
    if trl := [results[f"rloo/{name}"]["completions_per_s"] for name in TRL_RLOO if f"rloo/{name}" in results]:
        found["rloo_completions_over_trl"] = results["rloo/thresher"]["completions_per_s"] / max(trl)
    return found


def _contenders(arguments: argparse.Namespace) -> dict[str, Callable[[], Any]]:
    """What runs, in order."""
    model, steps = arguments.model, arguments.steps
    found: dict[str, Callable[[], Any]] = {}
    if arguments.only in ("sft", None):
        samples = sft_contenders.make_samples(steps + 1, vocabulary=arguments.vocabulary)
        found["sft/thresher"] = partial(sft_contenders.run_thresher, model, samples, activation_checkpointing=False)
        found["sft/thresher-checkpointed"] = partial(
            sft_contenders.run_thresher, model, samples, activation_checkpointing=True
        )
        found["sft/plain"] = partial(sft_contenders.run_plain, model, samples)
        for name, options in TRL_SFT.items():
            found[f"sft/{name}"] = partial(sft_contenders.run_trl, model, samples, **options)
    if arguments.only in ("rloo", None):
        found["rloo/thresher"] = partial(
            rloo_contenders.run_thresher, model, num_steps=steps, threads=arguments.threads
        )
        for name, options in TRL_RLOO.items():
            found[f"rloo/{name}"] = partial(rloo_contenders.run_trl, model, num_steps=steps, **options)
    return found


def _in_process(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """What the contender measured, run alone in a fresh process; CalledProcessError or TimeoutExpired if it failed."""
    print(f"{name} ...", flush=True)
    environment = os.environ | {"OMP_NUM_THREADS": str(arguments.threads), "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "measured.json"
        command = [sys.executable, "-m", "benchmarks.learner", "--contender", name, "--out", str(out)]
        command += ["--model", str(arguments.model), "--steps", str(arguments.steps)]
        command += ["--threads", str(arguments.threads), "--vocabulary", str(arguments.vocabulary)]
        subprocess.run(command, check=True, timeout=CONTENDER_TIMEOUT_S, env=environment)
        measured = json.loads(out.read_text())
    print(f"{name}: {measured}", flush=True)
    return measured


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", choices=("sft", "rloo"), help="one of the two comparisons")
    parser.add_argument("--steps", type=int, default=3, help="timed steps of each contender, after one that warms up")
    parser.add_argument("--threads", type=int, default=2, help="compute threads of each process")
    parser.add_argument("--model", type=Path, help="model directory; SmolLM2 from its package when left out")
    parser.add_argument("--vocabulary", type=int, default=49_000, help="ids below this fill the Samples")
    parser.add_argument("--contender", help="run this one alone, in this process; for the benchmark itself")
    arguments = parser.parse_args()
    if arguments.steps < 1 or arguments.threads < 1:
        parser.error("--steps and --threads must be >= 1")
    arguments.model = arguments.model or _smollm2()
    return arguments


def _smollm2() -> Path:
    from learners.models import load_smollm2

    return load_smollm2(Path(os.environ.get("THRESHER_CACHE", ".cache")).absolute() / "policies" / "smollm2")


if __name__ == "__main__":
    main()
