"""What is left of boxes after they end, in every way that they and their driver can end."""

import asyncio
import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from envs.errors import SandboxDied, SandboxError, SandboxRefused
from envs.local.boxes import BoxStarter
from envs.local.cgroups import find_cgroups
from envs.local.layout import bwrap_arguments
from envs.local.provider import LocalProvider
from envs.local.staging import Staged
from tests.envs.local.boxes import IS_ROOT, SMALL, make_provider, make_task
from tests.envs.local.test_attacks import find_process

pytestmark = pytest.mark.sandbox
needs_cgroups = pytest.mark.skipif(not IS_ROOT, reason="writes cgroups")


def children() -> set[int]:
    """Pids of this process's children, zombies included."""
    found = set[int]()
    for thread in Path("/proc/self/task").iterdir():
        found |= {int(pid) for pid in (thread / "children").read_text().split()}
    return found


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def own_cgroups() -> list[Path]:
    if not IS_ROOT:
        return []
    parents = set(find_cgroups().parents.values())
    return [path for parent in parents for path in parent.glob(f"thresher-{os.getpid()}-*")]


async def test_a_closed_provider_leaves_nothing() -> None:
    before = children(), open_files()
    provider = make_provider()
    for _ in range(2):
        async with asyncio.TaskGroup() as group:
            for k in range(12):
                group.create_task(play(provider, f"t{k}"))
    assert 1 <= len(children() - before[0]) <= 12, "one parked launcher for each box that was alive at once"
    await provider.close()
    assert (children(), open_files()) == before
    assert own_cgroups() == []


async def play(provider: LocalProvider, owner: str) -> None:
    async with provider.start(make_task(**SMALL), owner=owner) as sandbox:
        await sandbox.exec("sleep 1000 >/dev/null 2>&1 & echo $$ >/tmp/x", timeout_s=20)


async def test_a_slot_is_used_again_and_its_box_is_new(provider: LocalProvider) -> None:
    async with provider.start(make_task(**SMALL), owner="t1") as sandbox:
        await sandbox.write_file("/tmp/left", b"1")
        first = children()
    async with provider.start(make_task(memory_mb=300, storage_mb=32, cpus=2), owner="t2") as sandbox:
        assert await sandbox.read_file("/tmp/left") is None
        assert b"32M" in (await sandbox.exec("df -h /", timeout_s=20)).stdout
        assert children() == first


async def test_a_cancelled_start_leaves_nothing() -> None:
    before = children(), open_files()
    provider = make_provider()
    async with provider.start(make_task(**SMALL), owner="first"):
        pass
    for delay_s in (0.0, 0.001, 0.003, 0.006, 0.01, 0.02):
        starting = asyncio.create_task(play(provider, "t"))
        await asyncio.sleep(delay_s)
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
    async with asyncio.timeout(10):
        await play(provider, "last")
    await provider.close()
    assert (children(), open_files()) == before and own_cgroups() == []


async def test_no_more_boxes_are_created_at_once_than_the_config_says(monkeypatch: pytest.MonkeyPatch) -> None:
    provider = make_provider(max_creating=2)
    await provider.provenance()
    creating = 0
    most = 0
    start = BoxStarter.start

    async def counted(*args: object) -> object:
        nonlocal creating, most
        creating += 1
        most = max(most, creating)
        try:
            return await start(*args)  # type: ignore[arg-type]
        finally:
            creating -= 1

    monkeypatch.setattr(BoxStarter, "start", counted)
    async with asyncio.TaskGroup() as group:
        for k in range(6):
            group.create_task(play(provider, f"t{k}"))
    await provider.close()
    assert most == 2


DRIVER = """
import asyncio, os
from tests.envs.local.boxes import make_provider, make_task, SMALL
async def main():
    provider = make_provider()
    async with provider.start(make_task(**SMALL), owner="a") as a, provider.start(make_task(**SMALL), owner="b") as b:
        await a.exec("setsid sleep 4323.5 >/dev/null 2>&1 &", timeout_s=20)
        running = asyncio.create_task(b.exec("sleep 4324.5; true", timeout_s=999))
        await asyncio.sleep(0.3)
        print("up", flush=True)
        await asyncio.sleep(60)
asyncio.run(main())
"""


FORGETFUL = """
loop = asyncio.new_event_loop()
loop.run_until_complete(main())
print(os.getpid())
"""


@pytest.mark.timeout(60)
async def test_a_driver_killed_outright_leaves_no_process_or_mount_and_a_sweep_clears_the_rest() -> None:
    mounts = Path("/proc/self/mountinfo").read_text()
    driver = subprocess.Popen([sys.executable, "-c", DRIVER], stdout=subprocess.PIPE)  # noqa: ASYNC220
    with driver, driver.stdout as output:  # type: ignore[union-attr]
        assert output.readline() == b"up\n"
        assert find_process("sleep 4323.5") and find_process("sleep 4324.5")
        driver.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 10
    while find_process("sleep 4323.5") or find_process("sleep 4324.5") or descendants_by_cgroup(driver.pid):
        assert time.monotonic() < deadline, "processes outlive their driver"
        await asyncio.sleep(0.02)
    assert Path("/proc/self/mountinfo").read_text() == mounts
    if IS_ROOT:
        parents = set(find_cgroups().parents.values())
        assert any(list(parent.glob(f"thresher-{driver.pid}-*")) for parent in parents)
        provider = make_provider()
        await provider.provenance()  # the first thing asked of a provider makes it sweep
        await provider.close()
        assert not any(list(parent.glob(f"thresher-{driver.pid}-*")) for parent in parents)


def descendants_by_cgroup(pid: int) -> list[str]:
    if not IS_ROOT:
        return []
    parents = set(find_cgroups().parents.values())
    return [line for p in parents for f in p.glob(f"thresher-{pid}-*/cgroup.procs") for line in f.read_text().split()]


def test_a_driver_that_ends_without_closing_its_provider_leaves_nothing() -> None:
    ended = DRIVER.replace('print("up", flush=True)', "return").replace("asyncio.run(main())", FORGETFUL)
    done = subprocess.run([sys.executable, "-c", ended], capture_output=True, text=True, check=True)
    assert "Exception ignored" not in done.stderr
    pid = int(done.stdout)
    if IS_ROOT:
        parents = set(find_cgroups().parents.values())
        assert not any(list(parent.glob(f"thresher-{pid}-*")) for parent in parents)
    assert not find_process("sleep 4323.5")


@needs_cgroups
async def test_a_killed_launcher_is_replaced(provider: LocalProvider) -> None:
    before = children()
    async with provider.start(make_task(**SMALL), owner="t"):
        pass
    for pid in children() - before:
        os.kill(pid, signal.SIGKILL)
    await play(provider, "t")
    await provider.close()
    assert own_cgroups() == []


@pytest.mark.timeout(90)
async def test_processes_killed_at_random_moments_leave_nothing_and_only_typed_failures() -> None:
    """Launchers, bubblewraps, agents and commands alike, 60 of them, while six rollouts go on and boxes wait."""
    before = children(), open_files()
    chance = random.Random(0)
    provider = make_provider(max_warm=2)
    await provider.provenance()
    endings: list[str] = []
    is_over = asyncio.Event()

    async def play_on(owner: str) -> None:
        while not is_over.is_set():
            try:
                await play(provider, owner)
            except (SandboxError, SandboxDied) as error:
                endings.append(type(error).__name__)
            else:
                endings.append("played")

    async with asyncio.TaskGroup() as group:
        for k in range(6):
            group.create_task(play_on(f"t{k}"))
        for _ in range(60):
            await asyncio.sleep(chance.random() * 0.05)
            with contextlib.suppress(ProcessLookupError):
                os.kill(chance.choice(descendants() or [2**22]), signal.SIGKILL)
        is_over.set()
    await provider.close()
    assert "played" in endings and len(set(endings)) > 1
    assert (children(), open_files()) == before and own_cgroups() == []
    assert not find_process("sleep 1000")


def descendants() -> list[int]:
    """Every process below this one."""
    found, todo = list[int](), list(children())
    while todo:
        pid = todo.pop()
        found.append(pid)
        with contextlib.suppress(OSError):
            todo += [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return found


async def test_limits_that_cannot_be_enforced_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_cgroups(parent: Path | None = None) -> object:
        raise SandboxRefused("create cgroup: [Errno 13] Permission denied; run as root")

    monkeypatch.setattr("envs.local.provider.find_cgroups", no_cgroups)
    provider = make_provider(allow_soft_limits=False)
    with pytest.raises(SandboxRefused, match=r"create cgroup.*Errno 13.*run as root"):
        async with provider.start(make_task(), owner="t"):
            pass
    soft = make_provider(allow_soft_limits=True, soft_max_processes=500)
    assert (await soft.provenance())["limits"] == "rlimits"
    async with soft.start(make_task(**SMALL), owner="t") as sandbox:
        limits = (await sandbox.exec("ulimit -u -v -n -c", timeout_s=20)).stdout.decode()
        assert [line.split()[-1] for line in limits.splitlines()] == ["500", str(320 * 1024), "1024", "0"]
    await soft.close()


@pytest.mark.parametrize(
    ("breakage", "message"),
    [
        ("exit 1", "the box ended at once"),
        ("echo 'bwrap: Creating new namespace failed: Operation not permitted' >&2; exit 1", "Creating new namespace"),
    ],
)
async def test_a_machine_without_namespaces_is_refused_with_what_bwrap_said(
    breakage: str, message: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Not under pytest's directory, which other runs of pytest close to other users.
    tmp_path = Path(tempfile.mkdtemp(dir="/tmp"))
    request.addfinalizer(lambda: shutil.rmtree(tmp_path))
    fake = tmp_path / "bin" / "bwrap"
    fake.parent.mkdir()
    fake.write_text(f"#!/bin/sh\n{breakage}\n")
    fake.chmod(0o755)
    tmp_path.chmod(0o755)
    monkeypatch.setattr("envs.local.staging.find_bwrap", lambda: fake)
    provider = make_provider(cache_dir=tmp_path / "cache")
    with pytest.raises(SandboxRefused, match=f"(?s){message}.*enable user namespaces"):
        async with provider.start(make_task(), owner="t"):
            pass
    await provider.close()


async def test_an_unisolated_bwrap_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = make_provider()
    await real.provenance()
    await real.close()

    def without_network_namespace(staged: Staged, *, disk_bytes: int, mounts: tuple[str, ...]) -> list[str]:
        return [each for each in bwrap_arguments(staged, disk_bytes=disk_bytes) if each != "--unshare-net"]

    monkeypatch.setattr("envs.local.boxes.bwrap_arguments", without_network_namespace)
    provider = make_provider()
    with pytest.raises(SandboxRefused, match="shares this process's net namespace"):
        async with provider.start(make_task(), owner="t"):
            pass
    await provider.close()


async def test_a_task_that_wants_what_is_not_given_is_refused(provider: LocalProvider) -> None:
    with pytest.raises(SandboxRefused, match="allowlist"):
        provider.check(make_task(network_mode="allowlist"))
    strict = make_provider(network="refuse")
    with pytest.raises(SandboxRefused, match="public"):
        strict.check(make_task(network_mode="public"))
    strict.check(make_task(network_mode="no-network"))
    assert (await provider.provenance())["network"] == "none"


async def test_a_command_too_long_for_a_message_is_an_error_of_the_caller(provider: LocalProvider) -> None:
    async with provider.start(make_task(**SMALL), owner="t") as sandbox:
        with pytest.raises(ValueError, match="8 MiB"):
            await sandbox.exec("cat", timeout_s=1, stdin=b"x" * (9 << 20))
        with pytest.raises(ValueError, match="NUL"):
            await sandbox.exec("echo a\0b", timeout_s=1)
        with pytest.raises(SandboxError):
            await sandbox.write_file("/usr/bin/new", b"")
        assert (await sandbox.exec("echo on", timeout_s=20)).stdout == b"on\n"
