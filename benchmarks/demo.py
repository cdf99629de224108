"""The demo over several seeds: what RLOO adds to SFT, every run reported.

    python -m benchmarks.demo --policy tiny --seeds 0 1 2 --runs runs --out benchmarks/results/demo-tiny.json

A seed whose run directory is complete is read, one that was stopped goes on.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.hardware import describe_hardware


def main() -> None:
    """Runs the demo once a seed and writes one JSON with every summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", default="tiny")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="where the run directories are")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    runs = [run_demo(arguments.policy, seed, arguments.runs) for seed in arguments.seeds]
    gains = [run["summary"]["gain"] for run in runs]
    result = {
        "command": "python -m benchmarks.demo " + " ".join(sys.argv[1:]),
        "hardware": describe_hardware(),
        "figures": {"gain_mean": fmean(gains), "gain_least": min(gains)},
        "runs": runs,
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"mean gain {fmean(gains):+.3f} over {len(runs)} seeds; written to {arguments.out}")


def run_demo(policy: str, seed: int, runs: Path) -> dict[str, Any]:
    """The summary of one seed, and the revision, packages and hardware that its run directory recorded."""
    directory = runs / (f"demo-seed{seed}" if policy == "tiny" else f"demo-{policy}-seed{seed}")
    command = ["-m", "recipes.demo", "--policy", policy, "--seed", str(seed), "--run", str(directory)]
    if not (directory / "summary.json").is_file():
        subprocess.run([sys.executable, *command], check=True)
    record = json.loads((directory / "config.json").read_text())
    return {
        "seed": seed,
        "summary": json.loads((directory / "summary.json").read_text()),
        "git": record["git"],
        "packages": record["packages"],
        "hardware": record["hardware"],
    }


if __name__ == "__main__":
    main()
