"""What a container is built from, what bounds it, and what is left of it however it ends."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from envs.containers.provider import ContainerProvider
from envs.errors import SandboxDied, SandboxError
from envs.lease import sweep
from envs.verifier import verify
from tests.envs.containers.podman import ENGINE_ARGS, make_podman
from tests.envs.local.boxes import IS_ROOT, make_task
from tests.envs.task_dirs import make_task_dir

pytestmark = [pytest.mark.sandbox, pytest.mark.skipif(not IS_ROOT, reason="podman is set up for root here")]
REPOSITORY = Path(__file__).parents[3]
_HOLD = """
import asyncio, sys
from tests.envs.containers.podman import make_podman
from tests.envs.local.boxes import make_task

async def main():
    async with make_podman(sys.argv[1], run="killed").start(make_task(), owner="g.0") as sandbox:
        await sandbox.exec("setsid sleep 1000 >/dev/null 2>&1 &", timeout_s=20)
        print("started", flush=True)
        await sandbox.exec("sleep 1000", timeout_s=1000)

asyncio.run(main())
"""


def podman(*args: str) -> str:
    command = ["podman", *ENGINE_ARGS, *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


async def test_a_dockerfile_is_built_once_and_its_tests_judge_the_container(
    image: str, provider: ContainerProvider, tmp_path: Path
) -> None:
    path = make_task_dir(tmp_path, test_sh="grep -q made made.txt && echo $((1)) >/logs/verifier/reward.txt\n")
    dockerfile = f"FROM {image}\nWORKDIR /work/here\nENV GREETING=hello\nCOPY given.txt .\nRUN echo made >made.txt\n"
    (path / "environment" / "Dockerfile").write_text(dockerfile)
    (path / "environment" / "given.txt").write_text("given")
    task = make_task(path)
    async with provider.start(task, owner="g.0") as sandbox:
        assert sandbox.workdir == "/work/here"
        result = await sandbox.exec(
            'echo "$GREETING" "$(cat given.txt made.txt)"; id -u; ls /sys/class/net', timeout_s=20
        )
        assert result.stdout == b"hello givenmade\n0\nlo\n"
        assert (await verify(task, sandbox, timeout_s=20)).reward == 1
    again = make_podman(image, build_args=("--no-such-flag",))  # a second build would fail
    async with again.start(task, owner="g.1") as sandbox:
        assert await sandbox.read_file("made.txt") == b"made\n"
    await again.close()


async def test_memory_and_processes_are_bounded(image: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    provider = make_podman(image, max_processes=40)
    async with provider.start(make_task(memory_mb=64), owner="g.0") as sandbox:
        grown = await sandbox.exec("x=$(head -c 200000000 /dev/zero | tr '\\0' x); echo ${#x}", timeout_s=60)
        assert grown.exit_code != 0 or grown.stdout.strip() != b"200000000"
        forked = await sandbox.exec("for k in {1..100}; do sleep 5 & done", timeout_s=20)
        assert b"fork" in forked.stderr
        await sandbox.kill_all()
        assert (await sandbox.exec("echo alive", timeout_s=20)).stdout == b"alive\n"
    await provider.close()
    assert list(tmp_path.iterdir()) == [], "nothing is left where the driver stands"


async def test_a_driver_that_is_killed_leaves_no_container(image: str) -> None:
    driver = subprocess.Popen(  # noqa: ASYNC220 - a few ms
        [sys.executable, "-c", _HOLD, image],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": "."},
    )
    assert driver.stdout is not None and driver.stdout.readline() == b"started\n"
    assert podman("ps", "-q", "--filter", "label=thresher.run=killed").strip()
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    deadline = time.monotonic() + 20
    while podman("ps", "-aq", "--filter", "label=thresher.run=killed").strip():
        assert time.monotonic() < deadline, "the container outlived its driver"
        await asyncio.sleep(0.1)


async def test_a_sweep_ends_a_container_and_its_sandbox_says_so(image: str, provider: ContainerProvider) -> None:
    async with provider.start(make_task(), owner="g.5") as sandbox:
        running = asyncio.create_task(sandbox.exec("sleep 60", timeout_s=60))
        await asyncio.sleep(0.2)
        other = make_podman(image)
        (mine,) = [s for s in await other.list_leases() if s.lease.run == "test" and s.lease.owner == "g.5"]
        assert mine.state == "running" and await sweep(other) == []
        await other.remove(mine)
        with pytest.raises((SandboxDied, SandboxError)):
            await running
        await other.close()


async def test_an_image_that_cannot_be_had_is_infrastructure(provider: ContainerProvider) -> None:
    with pytest.raises(SandboxError, match="podman pull"):
        async with provider.start(make_task(docker_image="localhost:1/none:1"), owner="g.0"):
            pass
