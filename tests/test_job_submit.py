"""The recipes as submitted jobs: a private Ray head with token authentication, and `ray job submit` against it.

Invariant: the head has its own ports, token and temporary directory, so no other cluster of this machine is touched.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from envs.tasksets.shell import write_task_set
from recipes.audit import audit_store

pytestmark = pytest.mark.ray

REPOSITORY = Path(__file__).resolve().parent.parent
RAY = Path(sys.executable).with_name("ray")
START_LIMIT_S = 90
JOB_LIMIT_S = 100
LOCAL_FOLDERS = (".git", ".venv", ".venv-gpu", "runs", ".cache", ".ruff_cache", "recipes/__pycache__")


@dataclass(frozen=True, kw_only=True)
class Head:
    """A running Ray head and what a client needs to reach it."""

    address: str
    env: Mapping[str, str]
    """Environment of a client that holds the token."""


@pytest.fixture(scope="module")
def head() -> Iterator[Head]:
    # A short path: Ray puts unix sockets below it, and their names are limited to 107 bytes.
    scratch = Path(tempfile.mkdtemp(prefix="rh", dir="/tmp"))
    token = scratch / "token"
    token.write_text("0123456789abcdef" * 4)
    token.chmod(0o600)
    gcs, dashboard, client, agent, agent_grpc, metrics = free_ports(6)
    env = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    # Jobs run `python`: the one of this environment.
    env["PATH"] = f"{Path(sys.executable).parent}:{env['PATH']}"
    env |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token), "RAY_USAGE_STATS_ENABLED": "0"}
    command = [
        *(RAY, "start", "--head", "--block", f"--temp-dir={scratch}", "--num-cpus=2", "--node-ip-address=127.0.0.1"),
        *(f"--port={gcs}", f"--dashboard-port={dashboard}", f"--ray-client-server-port={client}"),
        *(f"--dashboard-agent-listen-port={agent}", f"--dashboard-agent-grpc-port={agent_grpc}"),
        *(f"--metrics-export-port={metrics}", f"--object-store-memory={100 << 20}"),
    ]
    log = scratch / "head.log"
    process = subprocess.Popen(command, env=env, stdout=log.open("w"), stderr=subprocess.STDOUT, start_new_session=True)
    try:
        address = f"http://127.0.0.1:{dashboard}"
        wait_until_serving(process, address, env, log)
        yield Head(address=address, env=env)
    finally:
        stop(process)
        shutil.rmtree(scratch, ignore_errors=True)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of this repository's files, with what a used checkout has beside them."""
    root = tmp_path_factory.mktemp("checkout")
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
    )
    for name in filter(None, listed.stdout.split("\0")):
        if (REPOSITORY / name).is_file():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPOSITORY / name, root / name)
    for folder in LOCAL_FOLDERS:
        (root / folder).mkdir(parents=True, exist_ok=True)
        (root / folder / "planted").write_text("must stay here")
    return root


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def wait_until_serving(process: "subprocess.Popen[bytes]", address: str, env: Mapping[str, str], log: Path) -> None:
    """Polls the jobs API with the client itself; the head answers it last of all."""
    probe = [RAY, "job", "list", f"--address={address}"]
    deadline = time.monotonic() + START_LIMIT_S
    while subprocess.run(probe, env=env, capture_output=True, check=False, timeout=30).returncode:
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.5)


def stop(process: "subprocess.Popen[bytes]") -> None:
    """Ray ends its children when its first process is asked to; what has not gone within 10 s is killed."""
    process.terminate()
    try:
        process.wait(timeout=10)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(timeout=10)


def submit(
    head: Head, checkout: Path, *entrypoint: str, env: Mapping[str, str] | None = None
) -> "subprocess.CompletedProcess[str]":
    """`ray job submit` as docs/cluster.md writes it."""
    return subprocess.run(
        [RAY, "job", "submit", f"--address={head.address}", "--working-dir=.", "--", *entrypoint],
        cwd=checkout,
        env=head.env if env is None else env,
        capture_output=True,
        text=True,
        timeout=JOB_LIMIT_S,
        check=False,
    )


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
@pytest.mark.exhaustive
def test_a_killed_job_that_is_submitted_again_plays_each_task_once(head: Head, checkout: Path, tmp_path: Path) -> None:
    run, tasks = tmp_path / "harvest", tmp_path / "tasks"
    write_task_set(tasks, split="train", count=40, seed=0)
    harvest = ("python", "-m", "recipes.harvest", "--tasks", str(tasks), "--harness", "oracle", "--run", str(run))
    client = subprocess.Popen(
        [
            RAY,
            "job",
            "submit",
            f"--address={head.address}",
            "--working-dir=.",
            "--",
            *harvest,
            "--rollouts.max-rollouts=2",
        ],
        cwd=checkout,
        env=head.env,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + JOB_LIMIT_S
    while sum(path.read_bytes().count(b"TRJ1") for path in (run / "store").glob("*.seg")) < 5:
        assert client.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
    # The run directory is this test's own, so its driver is the one Python process that names it after `-m`.
    commands = {each: each.info["cmdline"] or [] for each in psutil.process_iter(["cmdline"])}
    (driver,) = (each for each, command in commands.items() if str(run) in command and command[1:2] == ["-m"])
    driver.kill()
    assert client.wait(timeout=60) != 0
    again = submit(head, checkout, *harvest, "--rollouts.max-rollouts=2")
    assert again.returncode == 0, again.stdout + again.stderr
    assert json.loads((run / "summary.json").read_text())["harvested"] == 40
    assert audit_store(run, "store")[0].num_findings == 0
