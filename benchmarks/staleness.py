"""RLOO at several staleness bounds, each at its own learning rate, from one SFT policy: the gain on held-out tasks.

    python -m benchmarks.staleness --sft runs/demo/sft/model --runs runs --out benchmarks/results/staleness.json

A run whose directory is complete is read, one that was stopped goes on. Rates were chosen on training tasks.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.hardware import describe_hardware

RATES = {0: 8e-4, 1: 6e-4, 2: 4e-4}
"""Learning rate by staleness bound: older data bears a lower one."""
EPISODE = (
    *("--episode.malformed", "end", "--episode.max-turns", "6", "--episode.context-tokens", "512"),
    *("--episode.sampling.max-tokens", "80"),
)


def main() -> None:
    """Trains once a bound, evaluates, and writes one JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sft", type=Path, required=True, help="model directory that every run starts from")
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 2], choices=sorted(RATES))
    parser.add_argument("--steps", type=int, default=28)
    parser.add_argument("--heldout", type=int, default=480, help="held-out tasks of each evaluation")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="where the run directories go")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    start = evaluate(arguments.sft, arguments.runs / "staleness-start", arguments.heldout)
    runs = [run_bound(arguments, bound, start) for bound in arguments.staleness]
    result = {
        "command": "python -m benchmarks.staleness " + " ".join(sys.argv[1:]),
        "hardware": describe_hardware(),
        "figures": {f"gain_staleness_{run['max_staleness']}": run["gain"] for run in runs},
        "start": {"solved": start["solved"], "ci95": start["ci95"]},
        "runs": runs,
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    for run in runs:
        print(f"staleness {run['max_staleness']}: gain {run['gain']:+.3f}, 95% {run['gain_ci95']}")


def run_bound(arguments: argparse.Namespace, bound: int, start: dict[str, Any]) -> dict[str, Any]:
    """Trains at one bound; its settings, rewards by step, what was seen, and the gain over the start."""
    directory = arguments.runs / f"staleness-{bound}"
    flags = ["--policy", str(arguments.sft), "--tasks", "shell:train[1200:]", "--steps", str(arguments.steps)]
    flags += ["--max-staleness", str(bound), "--learner.lr", str(RATES[bound]), *EPISODE]
    trained = run_recipe("rloo", directory, flags)
    score = evaluate(directory / "model", arguments.runs / f"staleness-{bound}-evaluate", arguments.heldout)
    gain, interval = paired_gain(start["rewards"], score["rewards"])
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return {
        "max_staleness": bound,
        "lr": RATES[bound],
        "steps": arguments.steps,
        "max_staleness_seen": trained["max_staleness_seen"],
        "seconds": trained["seconds"],
        "rewards_by_step": [row["reward_mean"] for row in rows],
        "solved": score["solved"],
        "ci95": score["ci95"],
        "gain": gain,
        "gain_ci95": interval,
    }


def evaluate(model: Path, directory: Path, num_heldout: int) -> dict[str, Any]:
    """Summary of an evaluation on held-out tasks at temperature 1."""
    return run_recipe(
        "evaluate", directory, ["--policy", str(model), "--tasks", f"shell:heldout[:{num_heldout}]", *EPISODE]
    )


def run_recipe(name: str, directory: Path, flags: Sequence[str]) -> dict[str, Any]:
    """The recipe's summary; one that is complete is not run again."""
    summary = directory / "summary.json"
    if not summary.is_file():
        subprocess.run([sys.executable, "-m", f"recipes.{name}", "--run", str(directory), *flags], check=True)
    return json.loads(summary.read_text())


def paired_gain(
    before: dict[str, list[float | None]], after: dict[str, list[float | None]]
) -> tuple[float, tuple[float, float]]:
    """(mean of after - before, its 95% interval) over Tasks with one valid attempt in both, paired by Task."""
    from scipy import stats

    pairs = [(before[task][0], after[task][0]) for task in before if None not in (before[task][0], after[task][0])]
    earlier, later = zip(*pairs, strict=True)
    interval = stats.ttest_rel(later, earlier).confidence_interval(0.95)
    return (sum(later) - sum(earlier)) / len(pairs), (float(interval.low), float(interval.high))


if __name__ == "__main__":
    main()
