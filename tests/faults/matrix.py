"""The fault matrix: each part of a run killed at random moments, for harvest and RLOO; the result as JSON.

The first moment of every part comes before the second of any, and the result is written after each case, so that a
matrix that was interrupted, or that ran out of its time, leaves what it has.

python -m tests.faults.matrix --out faults.json
python -m tests.faults.matrix --out faults.json --moments 1 --recipes harvest
"""

import dataclasses
import json
import os
import random
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from benchmarks.hardware import describe_hardware
from recipes.record import code_revision
from tests.faults.bed import HARVEST, PLACED, RLOO, SERVED_HARVEST, Ended, Victim, run_with_kill, three_raylets
from tests.faults.head import copy_checkout, ray_head
from tests.faults.jobs import HowItEnds, run_job_with_kill

VICTIMS = {
    "harvest": (Victim.DRIVER, Victim.ROLLOUT_WORKER, Victim.INFERENCE_SERVER, Victim.NODE, Victim.JOB),
    "rloo": tuple(Victim),
}
SERVED_TASKS = 24
"""Tasks of a harvest by a policy, whose rollouts take longer than the oracle's."""
MAX_DELAY_S = 1.0
"""Between a stored Group and the kill: the moment is not always the same point of the loop."""


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
    """Tasks of each harvest by the oracle."""
    limit_s: float = 300.0
    """Deadline of one run, its restart included."""
    budget_s: float = 2100.0
    """No case starts after so long; what was left out is counted."""
    seed: int = 0

    def __post_init__(self) -> None:
        if unknown := set(self.recipes) - VICTIMS.keys():
            raise ValueError(f"recipes must be of {', '.join(VICTIMS)}, got {', '.join(sorted(unknown))}")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One kill."""

    recipe: str
    victim: Victim
    after_groups: int
    """How many Groups are stored before it."""
    delay_s: float
    """How long after that it comes."""
    how: HowItEnds
    """Of a submitted job."""


def main(config: Config) -> None:
    """Runs the matrix, prints two lines a case, and writes the result after each."""
    cases, results = list(_cases(config)), list[dict[str, Any]]()
    began = time.monotonic()
    for number, case in enumerate(cases, start=1):
        if time.monotonic() - began > config.budget_s:
            print(f"{len(cases) - len(results)} of {len(cases)} cases left out: {config.budget_s:g} s are over")
            break
        print(f"case {number} of {len(cases)}: {case.recipe}, {case.victim}, after {case.after_groups} Groups")
        results.append(_facts_of(case) | _play(config, case))
        print(json.dumps(results[-1]), flush=True)
        _write(config, results, num_left_out=len(cases) - len(results), seconds=time.monotonic() - began)
    if failed := sum(not result["passed"] for result in results):
        raise SystemExit(f"{failed} of {len(results)} cases failed")


def _cases(config: Config) -> Iterator[Case]:
    dice = random.Random(config.seed)
    for _ in range(config.moments):
        for recipe in config.recipes:
            for victim in VICTIMS[recipe]:
                yield Case(
                    recipe=recipe,
                    victim=victim,
                    after_groups=dice.randint(1, _last_moment(config, recipe, victim)),
                    delay_s=round(dice.uniform(0, MAX_DELAY_S), 2),
                    how=dice.choice(list(HowItEnds)),
                )


def _last_moment(config: Config, recipe: str, victim: Victim) -> int:
    """Groups after which there is still enough to do for the kill to meet the run."""
    if recipe == "rloo":
        return 4 * (config.steps - 2)
    return (SERVED_TASKS if victim is Victim.INFERENCE_SERVER else config.tasks) // 2


def _command(config: Config, case: Case) -> tuple[str, ...]:
    if case.recipe == "rloo":
        return (*RLOO, "--steps", str(config.steps), "--policy", config.policy)
    if case.victim is Victim.INFERENCE_SERVER:
        return (*SERVED_HARVEST, "--limit", str(SERVED_TASKS))
    return (*HARVEST, "--limit", str(config.tasks))


def _play(config: Config, case: Case) -> dict[str, Any]:
    """What became of one case; whatever goes wrong in it is data, since the others are to be played too."""
    scratch = Path(tempfile.mkdtemp(prefix="faults-"))
    began = time.monotonic()
    try:
        ended = _run(config, case, scratch)
    except Exception as error:
        what = str(error) if isinstance(error, AssertionError) else traceback.format_exc()
        return {"passed": False, "error": what[-1500:], "seconds": round(time.monotonic() - began, 1)}
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return {"passed": ended.findings == 0 and _is_whole(config, case, ended), "error": ""} | _facts(ended)


def _run(config: Config, case: Case, scratch: Path) -> Ended:
    command, run = _command(config, case), scratch / "run"
    limits: dict[str, Any] = {
        "after_groups": case.after_groups,
        "delay_s": case.delay_s,
        "limit_s": config.limit_s,
    }
    if case.victim is Victim.JOB:
        copy_checkout(scratch / "checkout")
        with ray_head() as head:
            return run_job_with_kill(command, run, case.how, head=head, checkout=scratch / "checkout", **limits)
    if case.victim is Victim.NODE:
        with three_raylets() as (env, nodes):
            return run_with_kill((*command, *PLACED[command[0]]), run, case.victim, env=env, nodes=nodes, **limits)
    return run_with_kill(command, run, case.victim, **limits)


def _is_whole(config: Config, case: Case, ended: Ended) -> bool:
    """Whether the run took all its steps, or played all its Tasks."""
    if case.recipe == "rloo":
        return ended.summary["rl_steps"] == config.steps
    return ended.summary["harvested"] == (SERVED_TASKS if case.victim is Victim.INFERENCE_SERVER else config.tasks)


def _facts_of(case: Case) -> dict[str, Any]:
    facts = dataclasses.asdict(case) | {"victim": str(case.victim), "how": str(case.how)}
    return facts if case.victim is Victim.JOB else facts | {"how": "kill -9"}


def _facts(ended: Ended) -> dict[str, Any]:
    facts = dataclasses.asdict(ended)
    summary = facts.pop("summary")
    return facts | {name: summary[name] for name in ("rl_steps", "harvested", "lineages") if name in summary}


def _write(config: Config, results: list[dict[str, Any]], *, num_left_out: int, seconds: float) -> None:
    figures = {
        "num_cases": len(results),
        "num_passed": sum(result["passed"] for result in results),
        "num_left_out": num_left_out,
        "audit_findings": sum(result.get("findings", 0) for result in results),
        "seconds": round(seconds, 1),
    }
    result = {
        "hardware": describe_hardware(),
        "figures": figures,
        "command": "python -m tests.faults.matrix " + " ".join(sys.argv[1:]),
        "revision": code_revision(),
        "seed": config.seed,
        "cases": results,
    }
    partial = config.out.with_name(f".{config.out.name}.partial")
    partial.write_text(json.dumps(result, indent=2) + "\n")
    os.replace(partial, config.out)


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
