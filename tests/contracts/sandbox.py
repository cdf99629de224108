"""What every Sandbox keeps: fakes and real providers are run against these checks."""

import asyncio
import contextlib
import re
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from envs.errors import SandboxError
from envs.sandbox import Sandbox, SandboxProvider
from envs.task import Task

SandboxCheck = Callable[[SandboxProvider, Task, Path], Awaitable[None]]


async def a_command_gives_its_status_and_both_streams(provider: SandboxProvider, task: Task, tmp: Path) -> None:
    async with provider.start(task, owner="t") as sandbox:
        result = await sandbox.exec("echo out; echo err >&2; exit 7", timeout_s=20)
        assert (result.exit_code, result.stdout, result.stderr) == (7, b"out\n", b"err\n")
        assert (await sandbox.exec("kill -9 $$", timeout_s=20)).exit_code == 137
        assert (await sandbox.exec("no-such-program", timeout_s=20)).exit_code == 127
        assert (await sandbox.exec("/bin/echo 'a  b' \\;", timeout_s=20)).stdout == b"a  b ;\n"
        assert (await sandbox.exec("/no/such/program", timeout_s=20)).exit_code == 127


async def a_command_has_its_stdin_variables_and_directory(provider: SandboxProvider, task: Task, tmp: Path) -> None:
    async with provider.start(task, owner="t") as sandbox:
        assert (await sandbox.exec("cat", timeout_s=20, stdin=b"x\0y" * 100_000)).stdout == b"x\0y" * 100_000
        assert (await sandbox.exec("cat", timeout_s=20)).stdout == b""
        env = {"GREETING": "hello  world", "EMPTY": ""}
        assert (await sandbox.exec('echo "$GREETING,$EMPTY"', timeout_s=20, env=env)).stdout == b"hello  world,\n"
        assert (await sandbox.exec('echo "$GREETING"', timeout_s=20)).stdout == b"\n", "variables outlive their command"
        await sandbox.write_file("/app/deep/er/file", b"1")
        assert (await sandbox.exec("cat file", timeout_s=20, cwd="/app/deep/er")).stdout == b"1"
        assert (await sandbox.exec("cat deep/er/file", timeout_s=20)).stdout == b"1"


async def a_command_past_its_timeout_is_killed(provider: SandboxProvider, task: Task, tmp: Path) -> None:
    async with provider.start(task, owner="t") as sandbox:
        for command in ("sleep 30", "trap '' TERM INT HUP; while :; do sleep 1; done", "sleep 30 & sleep 30 | cat"):
            async with asyncio.timeout(10):
                assert (await sandbox.exec(command, timeout_s=0.3)).exit_code == 124
        assert (await sandbox.exec("echo alive", timeout_s=20)).stdout == b"alive\n"


async def commands_run_at_the_same_time(provider: SandboxProvider, task: Task, tmp: Path) -> None:
    async with provider.start(task, owner="t") as sandbox:
        async with asyncio.timeout(8):
            commands = (sandbox.exec(f"sleep 1; echo {k}", timeout_s=20) for k in range(16))
            results = await asyncio.gather(*commands)
        assert [result.stdout for result in results] == [b"%d\n" % k for k in range(16)]


async def files_come_back_as_they_were_written(provider: SandboxProvider, task: Task, tmp: Path) -> None:
    data = bytes(range(256)) * 12_000  # about 3 MB: more than one message
    async with provider.start(task, owner="t") as sandbox:
        await sandbox.write_file("/app/new/data", data)
        assert await sandbox.read_file("/app/new/data", max_bytes=len(data)) == data
        with pytest.raises(SandboxError):
            await sandbox.read_file("/app/new/data", max_bytes=len(data) - 1)
        await sandbox.write_file("/app/new/data", b"short")
        assert await sandbox.read_file("/app/new/data") == b"short"
        await sandbox.write_file("/app/run", b"#!/bin/sh\necho ran\n", mode=0o755)
        assert (await sandbox.exec("./run; stat -c %a new/data", timeout_s=20)).stdout == b"ran\n644\n"
        assert await sandbox.read_file("/app/none") is None
        assert await sandbox.read_file("/app/new") is None


async def a_directory_is_uploaded_with_its_modes(provider: SandboxProvider, task: Task, tmp: Path) -> None:
    source = tmp / "source"
    (source / "sub" / "empty").mkdir(parents=True)
    (source / "sub" / "tool").write_text("echo tool\n")
    (source / "sub" / "tool").chmod(0o755)
    (source / "plain").write_text("text")
    async with provider.start(task, owner="t") as sandbox:
        await sandbox.upload_dir(source, "/app/up")
        result = await sandbox.exec("cd up; find . | sort; stat -c %a sub/tool; cat plain", timeout_s=20)
        assert result.stdout == b".\n./plain\n./sub\n./sub/empty\n./sub/tool\n755\ntext"
        (source / "link").symlink_to("/etc/passwd")
        with pytest.raises(SandboxError):
            await sandbox.upload_dir(source, "/app/again")


async def kill_all_leaves_nothing_running(provider: SandboxProvider, task: Task, tmp: Path) -> None:
    async with provider.start(task, owner="t") as sandbox:
        await sandbox.exec("while :; do echo x >>beat; sleep 0.02; done >/dev/null 2>&1 &", timeout_s=20)
        running = asyncio.create_task(sandbox.exec("sleep 30", timeout_s=60))
        await asyncio.sleep(0.3)
        await sandbox.kill_all()
        before = await sandbox.read_file("/app/beat")
        await asyncio.sleep(0.2)
        assert before and await sandbox.read_file("/app/beat") == before
        assert (await running).exit_code == 137
        assert (await sandbox.exec("echo on", timeout_s=20)).stdout == b"on\n"


async def stop_is_final_and_may_be_repeated(provider: SandboxProvider, task: Task, tmp: Path) -> None:
    async with provider.start(task, owner="t") as sandbox:
        await sandbox.stop()
        await asyncio.gather(sandbox.stop(), sandbox.stop())
        with pytest.raises(SandboxError):
            await sandbox.exec("true", timeout_s=20)


async def a_cancelled_rollout_stops_its_sandbox(provider: SandboxProvider, task: Task, tmp: Path) -> None:
    started: asyncio.Future[Sandbox] = asyncio.get_running_loop().create_future()

    async def rollout() -> None:
        async with provider.start(task, owner="t") as sandbox:
            started.set_result(sandbox)
            await sandbox.exec("sleep 60", timeout_s=120)

    running = asyncio.create_task(rollout())
    held = await started
    await asyncio.sleep(0.1)
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        async with asyncio.timeout(10):
            await running
    with pytest.raises(SandboxError):
        await held.exec("true", timeout_s=20)


async def a_flood_is_cut_and_does_no_harm(provider: SandboxProvider, task: Task, tmp: Path) -> None:
    async with provider.start(task, owner="t") as sandbox:
        result = await sandbox.exec("yes", timeout_s=1)
        assert result.exit_code == 124
        assert len(result.stdout) <= 1 << 20 and re.fullmatch(rb"(y\n)*y?", result.stdout)
        result = await sandbox.exec("head -c 3000000 /dev/zero; echo end >&2", timeout_s=20)
        assert (result.exit_code, len(result.stdout), result.stderr) == (0, 1 << 20, b"end\n")


CHECKS: tuple[SandboxCheck, ...] = (
    a_command_gives_its_status_and_both_streams,
    a_command_has_its_stdin_variables_and_directory,
    a_command_past_its_timeout_is_killed,
    commands_run_at_the_same_time,
    files_come_back_as_they_were_written,
    a_directory_is_uploaded_with_its_modes,
    kill_all_leaves_nothing_running,
    stop_is_final_and_may_be_repeated,
    a_cancelled_rollout_stops_its_sandbox,
    a_flood_is_cut_and_does_no_harm,
)
