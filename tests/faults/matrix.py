"""The fault matrix: each part of a run killed at random moments, for harvest and RLOO; the result as JSON.

python -m tests.faults.matrix --out faults.json
python -m tests.faults.matrix --out faults.json --moments 1 --recipes harvest
"""

import dataclasses
import json
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from benchmarks.hardware import describe_hardware
from recipes.record import code_revision
from tests.faults.bed import HARVEST, PLACED, RLOO, Victim, run_with_kill, three_raylets

VICTIMS = {
    "harvest": (Victim.DRIVER, Victim.ROLLOUT_WORKER, Victim.NODE),
    "rloo": (Victim.DRIVER, Victim.ROLLOUT_WORKER, Victim.INFERENCE_SERVER, Victim.LEARNER_RANK, Victim.NODE),
}


@dataclass(frozen=True, kw_only=True)
class Config:
    """Kill every part at random moments; the audit must print zeros each time."""

    out: Path
    """File for the result."""
    moments: int = 3
    """Kills of each part, each in a run of its own."""
    recipes: tuple[str, ...] = ("harvest", "rloo")
    policy: str = "tiny"
    """For RLOO: tiny (untrained), or a directory with a policy that was taught."""
    steps: int = 6
    """Optimizer steps of each RLOO run."""
    tasks: int = 60
    """Tasks of each harvest."""
    limit_s: float = 600.0
    """Deadline of one run, its restart included."""
    seed: int = 0


def main(config: Config) -> None:
    """Runs the matrix, prints a line a case, and writes the result."""
    cases: list[dict[str, Any]] = []
    began = time.monotonic()
    for recipe, victim, moment in _cases(config):
        case = {"recipe": recipe, "victim": str(victim), "after_groups": moment} | _play(config, recipe, victim, moment)
        cases.append(case)
        print(json.dumps(case), flush=True)
        _write(config, cases, time.monotonic() - began)
    if failed := sum(not case["passed"] for case in cases):
        raise SystemExit(f"{failed} of {len(cases)} cases failed")


def _cases(config: Config) -> Iterator[tuple[str, Victim, int]]:
    dice = random.Random(config.seed)
    for recipe in config.recipes:
        most = config.tasks - 10 if recipe == "harvest" else 4 * (config.steps - 2)
        for victim in VICTIMS[recipe]:
            for _ in range(config.moments):
                yield recipe, victim, dice.randint(1, most)


def _play(config: Config, recipe: str, victim: Victim, moment: int) -> dict[str, Any]:
    scratch = Path(tempfile.mkdtemp(prefix="faults-"))
    command = (
        (*HARVEST, "--limit", str(config.tasks))
        if recipe == "harvest"
        else (*RLOO, "--steps", str(config.steps), "--policy", config.policy)
    )
    limits = {"after_groups": moment, "limit_s": config.limit_s}
    try:
        if victim is Victim.NODE:
            with three_raylets() as (env, nodes):
                placed = (*command, *PLACED[command[0]])
                ended = run_with_kill(placed, scratch / "run", victim, env=env, nodes=nodes, **limits)
        else:
            ended = run_with_kill(command, scratch / "run", victim, **limits)
        return {"passed": ended.findings == 0, "error": ""} | _facts(ended)
    except AssertionError as error:
        return {"passed": False, "error": str(error)[-1500:]}
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _facts(ended: Any) -> dict[str, Any]:
    facts = dataclasses.asdict(ended)
    summary = facts.pop("summary")
    return facts | {name: summary[name] for name in ("rl_steps", "harvested", "lineages") if name in summary}


def _write(config: Config, cases: list[dict[str, Any]], seconds: float) -> None:
    figures = {
        "num_cases": len(cases),
        "num_passed": sum(case["passed"] for case in cases),
        "audit_findings": sum(case.get("findings", 0) for case in cases),
        "seconds": round(seconds, 1),
    }
    result = {
        "hardware": describe_hardware(),
        "figures": figures,
        "command": "python -m tests.faults.matrix " + " ".join(sys.argv[1:]),
        "revision": code_revision(),
        "seed": config.seed,
        "cases": cases,
    }
    config.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
