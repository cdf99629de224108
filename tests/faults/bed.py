"""The bed of the fault tests: runs a recipe, kills -9 a part of it at a given moment, and brings the run to its end.

Invariant: only processes below the one that was started here are looked at, so no other cluster of the machine is hurt.
Called by tests/faults/test_kills.py, jobs.py, matrix.py and learns.py beside it.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import psutil

from recipes.audit import audit_store

ROOT = Path(__file__).parents[2]
_POLL_S = 0.1


class Victim(StrEnum):
    """What is killed."""

    DRIVER = "driver"
    ROLLOUT_WORKER = "rollout worker"
    INFERENCE_SERVER = "inference server"
    LEARNER_RANK = "learner rank"
    NODE = "node"
    """A raylet with all its workers, of a cluster of three."""
    JOB = "submitted job"
    """The driver of a job on a cluster with token authentication; see tests/faults/jobs.py."""


ACTORS = {
    Victim.ROLLOUT_WORKER: "ray::RolloutWorker",
    Victim.INFERENCE_SERVER: "ray::InferenceServer",
    Victim.LEARNER_RANK: "ray::LearnerRank",
}
"""How Ray names an actor's process."""

HARVEST = ("recipes.harvest", "--tasks", "shell:train", "--harness", "oracle", "--rollouts.max-rollouts", "4")
SERVED_HARVEST = (
    *("recipes.harvest", "--tasks", "shell:train", "--harness", "terminus-2", "--policy", "tiny"),
    *("--rollouts.max-rollouts", "4"),
)
"""By an untrained policy, so that there is a server to kill."""
RLOO = (
    *("recipes.rloo", "--tasks", "shell:train", "--limit", "64", "--groups-per-step", "4", "--group-size", "2"),
    *("--checkpoint-every", "2", "--max-staleness", "1", "--grace-s", "20"),
)
PLACED = {
    "recipes.harvest": ("--rollouts.resources.num-cpus", "1", "--rollouts.num-workers", "2"),
    "recipes.rloo": (
        *("--rollouts.resources.num-cpus", "1", "--rollouts.num-workers", "2", "--learner.resources.num-cpus", "1"),
        *("--policy.server.num-cpus", "1", "--policy.num-servers", "2"),
    ),
}
"""Flags that keep a recipe's actors off the head of a cluster whose head has no CPUs."""


@dataclass(frozen=True, kw_only=True)
class Ended:
    """A run that came to its end."""

    num_kills: int
    num_starts: int
    seconds: float
    findings: int
    """What the audit counted."""
    summary: Mapping[str, Any]
    events: tuple[str, ...]
    """Names of what events.jsonl says was made good."""


def run_with_kill(
    recipe: Sequence[str],
    run: Path,
    victim: Victim,
    *,
    after_groups: int,
    delay_s: float = 0.0,
    limit_s: float = 300.0,
    env: Mapping[str, str] | None = None,
    nodes: Sequence[int] = (),
) -> Ended:
    """Kills `victim` once `after_groups` Groups are stored and `delay_s` passed; starts again what does not live on.

    AssertionError with the recipe's last lines when it does not end well within `limit_s`. `nodes` are the processes of
    the raylets that may be killed.
    """
    began, deadline = time.monotonic(), time.monotonic() + limit_s
    command = [sys.executable, "-m", *recipe, "--run", str(run)]
    with started(command, env) as process:
        wait_for_groups(run, after_groups, process, deadline)
        time.sleep(delay_s)
        num_kills = kill(victim, process, nodes)
        if victim is not Victim.DRIVER:
            wait_for_end(process, run, deadline)
    num_starts = 1
    if victim is Victim.DRIVER:
        num_starts = 2
        with started(command, env) as process:
            wait_for_end(process, run, deadline)
    return ended_of(run, num_kills=num_kills, num_starts=num_starts, seconds=time.monotonic() - began)


def ended_of(run: Path, *, num_kills: int, num_starts: int, seconds: float) -> Ended:
    """What a run directory tells of its end."""
    return Ended(
        num_kills=num_kills,
        num_starts=num_starts,
        seconds=round(seconds, 1),
        findings=audit_store(run, "store")[0].num_findings,
        summary=json.loads((run / "summary.json").read_text()),
        events=_events(run),
    )


@contextmanager
def three_raylets() -> Iterator[tuple[Mapping[str, str], list[int]]]:
    """A cluster of a head without CPUs and two nodes; the environment that joins it, and the nodes' raylets."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.faults.three_raylets"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        facts = json.loads(next(line for line in process.stdout if line.startswith("{")))
        yield {"RAY_ADDRESS": facts["address"]}, facts["raylets"]
    finally:
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            _kill_tree(process.pid)


@contextmanager
def started(
    command: Sequence[str], env: Mapping[str, str] | None, cwd: Path = ROOT
) -> Iterator["subprocess.Popen[bytes]"]:
    """A command that ends with its run's directory, for the length of the block; its output goes there."""
    run = Path(command[-1])
    run.mkdir(parents=True, exist_ok=True)
    with open(run / "log.txt", "ab") as log:
        process = subprocess.Popen(command, cwd=cwd, env={**os.environ, **(env or {})}, stdout=log, stderr=log)
    try:
        yield process
    finally:
        if process.poll() is None:
            _kill_tree(process.pid)
        process.wait(timeout=10)


def wait_for_groups(run: Path, count: int, process: "subprocess.Popen[bytes]", deadline: float) -> None:
    """Returns when `count` Groups are stored; AssertionError when the process ends before, or they do not come."""
    while _num_stored(run) < count:
        assert process.poll() is None, f"ended before the kill: {_last_lines(run)}"
        assert time.monotonic() < deadline, f"{_num_stored(run)} of {count} Groups came: {_last_lines(run)}"
        time.sleep(_POLL_S)


def wait_for_end(process: "subprocess.Popen[bytes]", run: Path, deadline: float) -> None:
    """Returns when the process has ended well; AssertionError with its last lines otherwise."""
    try:
        code = process.wait(timeout=max(1.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        raise AssertionError(f"did not end in time: {_last_lines(run)}") from None
    assert code == 0, f"exit code {code}: {_last_lines(run)}"


def _num_stored(run: Path) -> int:
    """Frames that begin in the store; cheap enough to ask ten times a second."""
    return sum(path.read_bytes().count(b"TRJ1") for path in (run / "store").glob("*.seg"))


def kill(victim: Victim, process: "subprocess.Popen[bytes]", nodes: Sequence[int]) -> int:
    """Kills -9, of a node all its processes; returns how many. AssertionError when it is not there."""
    if victim is Victim.DRIVER:
        # Ray's own processes are the driver's children here; they end by themselves when it is gone, as on a cluster.
        os.kill(process.pid, signal.SIGKILL)
        return 1
    if victim is Victim.NODE:
        return _kill_tree(max(nodes, key=_num_actors))  # the run may have all its actors on one of them
    names = ACTORS[victim]
    for each in _processes(process.pid):
        if _title(each).startswith(names):
            each.kill()
            return 1
    raise AssertionError(f"no process of {names} is there to kill")


def _num_actors(raylet: int) -> int:
    return sum(_title(each).startswith(tuple(ACTORS.values())) for each in _processes(raylet))


def _processes(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def _kill_tree(pid: int) -> int:
    processes = [*_processes(pid), psutil.Process(pid)]
    for each in processes:
        try:
            each.kill()
        except psutil.NoSuchProcess:
            continue
    return len(processes)


def _events(run: Path) -> tuple[str, ...]:
    path = run / "events.jsonl"
    return tuple(json.loads(line)["event"] for line in path.read_text().splitlines()) if path.exists() else ()


def _last_lines(run: Path) -> str:
    return (run / "log.txt").read_text(errors="replace")[-3000:]
