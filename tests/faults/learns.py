"""One training run with each part killed on the way, and what it learned: held-out Tasks before and after it.

The run is the demo's: 28 steps of 32 Groups of 8 from a policy after SFT. Each kill comes at a random moment of its own
share of the run; a killed driver is started again, all else the run makes good itself.

python -m tests.faults.learns --policy runs/demo/sft/model --out learns.json
"""

import json
import random
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import tyro

from benchmarks.hardware import describe_hardware
from benchmarks.staleness import EPISODE, evaluate
from recipes.record import code_revision
from recipes.statistics import paired_gain
from tests.faults.bed import Ended, Victim, ended_of, kill, started, wait_for_end, wait_for_groups

GROUPS_PER_STEP = 32
VICTIMS = (Victim.DRIVER, Victim.ROLLOUT_WORKER, Victim.INFERENCE_SERVER, Victim.LEARNER_RANK)
MAX_DELAY_S = 10.0
"""Between a stored Group and the kill; a step takes about as long."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """Train while every part is killed, and compare with the policy that the run began with."""

    policy: Path
    """Directory of a policy after SFT."""
    out: Path
    """File for the result."""
    steps: int = 28
    """Optimizer steps."""
    num_heldout: int = 480
    """Tasks of each evaluation."""
    limit_s: float = 3000.0
    """Deadline of the training run, restarts included."""
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class Kill:
    """One kill."""

    victim: Victim
    after_groups: int
    """How many Groups are stored before it."""
    delay_s: float
    """How long after that it comes."""


def main(config: Config) -> None:
    """Trains, evaluates and writes the result; exits non-zero when the books do not agree or nothing was learned."""
    kills = plan_kills(config)
    scratch = Path(tempfile.mkdtemp(prefix="learns-"))
    try:
        ended = _train(config, kills, scratch / "run")
        before = evaluate(config.policy, scratch / "before", config.num_heldout)
        after = evaluate(scratch / "run" / "model", scratch / "after", config.num_heldout)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    gain, interval = paired_gain(before["rewards"], after["rewards"])
    figures = {
        "solved_before": before["solved"],
        "solved_after": after["solved"],
        "gain": gain,
        "gain_ci95": interval,
        "num_kills": ended.num_kills,
        "audit_findings": ended.findings,
        "rl_steps": ended.summary["rl_steps"],
        "lineages": ended.summary["lineages"],
        "num_starts": ended.num_starts,
        "seconds": ended.seconds,
    }
    result = {
        "command": "python -m tests.faults.learns " + " ".join(sys.argv[1:]),
        "hardware": describe_hardware(),
        "revision": code_revision(),
        "figures": figures,
        "kills": [{"victim": str(k.victim), "after_groups": k.after_groups, "delay_s": k.delay_s} for k in kills],
        "events": ended.events,
    }
    config.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(figures, indent=1))
    if ended.findings or ended.summary["rl_steps"] != config.steps or interval[0] <= 0:
        raise SystemExit("the books do not agree, steps are missing, or nothing was learned")


def plan_kills(config: Config) -> list[Kill]:
    """In the order of their moments: the run is cut into equal shares, and each holds one kill."""
    dice = random.Random(config.seed)
    victims = dice.sample(VICTIMS, len(VICTIMS))
    num_groups = GROUPS_PER_STEP * (config.steps - 2)  # the last steps are left for what was killed to come back
    return [
        Kill(
            victim=victim,
            after_groups=int(num_groups * (share + dice.random()) / len(victims)),
            delay_s=round(dice.uniform(0, MAX_DELAY_S), 2),
        )
        for share, victim in enumerate(victims)
    ]


def _train(config: Config, kills: list[Kill], run: Path) -> Ended:
    command = [sys.executable, "-m", "recipes.rloo", "--policy", str(config.policy), *EPISODE]
    command += ["--tasks", "shell:train[1200:]", "--learner.lr", "6e-4", "--checkpoint-every", "4"]
    command += ["--steps", str(config.steps), "--run", str(run)]
    began = time.monotonic()
    deadline, left = began + config.limit_s, list(kills)
    num_starts = num_kills = 0
    is_over = False
    while not is_over:
        num_starts += 1
        with started(command, None) as process:
            while left:
                next_kill = left.pop(0)
                wait_for_groups(run, next_kill.after_groups, process, deadline)
                time.sleep(next_kill.delay_s)
                num_kills += kill(next_kill.victim, process, ())
                print(f"killed {next_kill}", flush=True)
                if next_kill.victim is Victim.DRIVER:
                    break
            else:
                wait_for_end(process, run, deadline)
                is_over = True
    return ended_of(run, num_kills=num_kills, num_starts=num_starts, seconds=time.monotonic() - began)


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
