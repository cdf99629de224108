"""The recipes as submitted jobs, on a private Ray head with token authentication."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from envs.tasksets.shell import write_task_set
from tests.faults.head import Head, copy_checkout, ray_head, submit
from tests.faults.jobs import HowItEnds, run_job_with_kill

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def head() -> Iterator[Head]:
    with ray_head() as head:
        yield head


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("checkout")
    copy_checkout(root)
    return root


def test_a_submit_without_the_token_is_refused(head: Head, checkout: Path) -> None:
    env = {key: value for key, value in head.env.items() if not key.startswith("RAY_AUTH")}
    env |= {"HOME": "/nonexistent", "RAY_AUTH_MODE": "disabled"}
    done = submit(head, checkout, "python", "-m", "recipes.harvest", "--help", env=env)
    assert done.returncode != 0
    assert "authentication token" in done.stdout + done.stderr
    assert "submitted successfully" not in done.stdout


def test_what_is_uploaded_excludes_environment_runs_and_caches(head: Head, checkout: Path) -> None:
    done = submit(head, checkout, "find", ".", "-type", "f")
    assert done.returncode == 0, done.stdout + done.stderr
    uploaded = {line.removeprefix("./") for line in done.stdout.splitlines() if line.startswith("./")}
    assert {"recipes/launch.py", "actors/cluster.py", "trajectories/schema.py", "pyproject.toml"} <= uploaded
    assert not {name for name in uploaded if name.endswith("planted") or name.startswith(("tests/", "docs/"))}


@pytest.mark.sandbox
def test_a_harvest_runs_as_a_submitted_job(head: Head, checkout: Path, tmp_path: Path) -> None:
    run, tasks = tmp_path / "harvest", tmp_path / "tasks"
    write_task_set(tasks, split="train", count=4, seed=0)
    done = submit(
        head,
        checkout,
        *("python", "-m", "recipes.harvest", "--tasks", str(tasks), "--harness", "oracle", "--run", str(run)),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((run / "summary.json").read_text())
    assert summary["harvested"] == 4
    assert summary["sandbox"]["provider"] == "bubblewrap"


@pytest.mark.sandbox
@pytest.mark.timeout(300)
def test_a_killed_job_that_is_submitted_again_plays_each_task_once(head: Head, checkout: Path, tmp_path: Path) -> None:
    tasks = tmp_path / "tasks"
    write_task_set(tasks, split="train", count=24, seed=0)
    harvest = ("recipes.harvest", "--tasks", str(tasks), "--harness", "oracle", "--rollouts.max-rollouts=1")
    ended = run_job_with_kill(harvest, tmp_path / "run", HowItEnds.KILL, head=head, checkout=checkout, after_groups=5)
    assert (ended.findings, ended.summary["harvested"], ended.num_starts) == (0, 24, 2)
