"""A private Ray head with token authentication, and `ray job submit` against it as docs/cluster.md writes it.

Invariant: the head has its own ports, token and temporary directory, so no other cluster of this machine is touched.
Called by tests/test_job_submit.py and tests/faults/jobs.py.
"""

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
RAY = Path(sys.executable).with_name("ray")
START_LIMIT_S = 90
JOB_LIMIT_S = 100
LOCAL_FOLDERS = (".git", ".venv", ".venv-gpu", "runs", ".cache", ".ruff_cache", "recipes/__pycache__")
"""What a used checkout has beside its files."""


@dataclass(frozen=True, kw_only=True)
class Head:
    """A running Ray head and what a client needs to reach it."""

    address: str
    env: Mapping[str, str]
    """Environment of a client that holds the token."""

    def submission(self, *entrypoint: str) -> list[str]:
        """The command that submits a job and follows it to its end."""
        return [str(RAY), "job", "submit", f"--address={self.address}", "--working-dir=.", "--", *entrypoint]


@contextmanager
def ray_head() -> Iterator[Head]:
    """A head for the length of the block."""
    # A short path: Ray puts unix sockets below it, and their names are limited to 107 bytes.
    scratch = Path(tempfile.mkdtemp(prefix="rh", dir="/tmp"))
    token = scratch / "token"
    token.write_text("0123456789abcdef" * 4)
    token.chmod(0o600)
    gcs, dashboard, client, agent, agent_grpc, metrics = free_ports(6)
    env = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    # Jobs run `python`: the one of this environment.
    env["PATH"] = f"{Path(sys.executable).parent}:{env['PATH']}"
    env["THRESHER_CACHE"] = str(REPOSITORY / ".cache")  # what jobs make outlives their copies of the code
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


def copy_checkout(root: Path) -> None:
    """A copy of this repository's files, with what a used checkout has beside them."""
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


def free_ports(count: int) -> list[int]:
    """Ports of the loopback that nobody has just now."""
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
        head.submission(*entrypoint),
        cwd=checkout,
        env=head.env if env is None else env,
        capture_output=True,
        text=True,
        timeout=JOB_LIMIT_S,
        check=False,
    )
