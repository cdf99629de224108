"""Submitted jobs that end before their time, and are submitted again with the same command.

Invariant: only the driver that names this run's directory is killed. Called by tests/test_job_submit.py and
tests/faults/matrix.py.
"""

import subprocess
import time
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path

import psutil

from tests.faults.bed import Ended, ended_of, started, wait_for_end, wait_for_groups
from tests.faults.head import RAY, Head


class HowItEnds(StrEnum):
    """What ends the job's first driver."""

    KILL = "kill -9"
    STOP = "ray job stop"


def run_job_with_kill(
    recipe: Sequence[str],
    run: Path,
    how: HowItEnds,
    *,
    head: Head,
    checkout: Path,
    after_groups: int,
    delay_s: float = 0.0,
    limit_s: float = 300.0,
) -> Ended:
    """Submits, ends the driver once `after_groups` Groups are stored, and submits again; as `run_with_kill`."""
    began, deadline = time.monotonic(), time.monotonic() + limit_s
    command = head.submission("python", "-m", *recipe, "--run", str(run))
    with started(command, head.env, cwd=checkout) as client:
        wait_for_groups(run, after_groups, client, deadline)
        time.sleep(delay_s)
        _end_driver(run, how, head)
        code = client.wait(timeout=max(1.0, deadline - time.monotonic()))
        assert code != 0 or how is HowItEnds.STOP, "a job whose driver is gone has failed; one that was stopped has not"
    with started(command, head.env, cwd=checkout) as client:
        wait_for_end(client, run, deadline)
    return ended_of(run, num_kills=1, num_starts=2, seconds=time.monotonic() - began)


def _end_driver(run: Path, how: HowItEnds, head: Head) -> None:
    commands = {each: each.info["cmdline"] or [] for each in psutil.process_iter(["cmdline"])}
    (driver,) = (each for each, command in commands.items() if str(run) in command and command[1:2] == ["-m"])
    if how is HowItEnds.KILL:
        driver.kill()
        return
    job = driver.environ()["RAY_JOB_CONFIG_JSON_ENV_VAR"]
    submission_id = job.partition('"job_submission_id": "')[2].partition('"')[0]
    stop = [str(RAY), "job", "stop", f"--address={head.address}", submission_id]
    subprocess.run(stop, env=head.env, check=True, capture_output=True, timeout=60)
