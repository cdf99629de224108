"""What a hostile policy may try from inside a box, and what it gets; test_unprivileged runs it again as a user."""

import asyncio
import os
import socket
import time
from pathlib import Path

import pytest

from envs.errors import SandboxDied
from envs.local.provider import LocalProvider
from envs.sandbox import ExecResult, Sandbox
from tests.envs.local import inside
from tests.envs.local.boxes import IS_ROOT, SMALL, make_task

pytestmark = [pytest.mark.sandbox, pytest.mark.timeout(90)]
needs_cgroups = pytest.mark.skipif(not IS_ROOT, reason="memory and CPU in all are bound by cgroups only")


async def run_python(box: Sandbox, program: str, *args: str, timeout_s: float = 30) -> ExecResult:
    await box.write_file("/tmp/program.py", program.encode())
    return await box.exec(" ".join(["/usr/bin/python3 /tmp/program.py", *args]), timeout_s=timeout_s)


async def assert_alive(box: Sandbox) -> None:
    assert (await box.exec("echo alive", timeout_s=30)).stdout == b"alive\n"


async def test_privileged_calls_are_denied(box: Sandbox) -> None:
    result = await run_python(box, inside.SYSCALLS)
    found = dict(line.split() for line in result.stdout.decode().splitlines())
    assert len(found) == 41, result
    assert found.pop("read-self") == "done", "this call would work if the agent let itself be read"
    assert {name: answer for name, answer in found.items() if answer == "done"} == {}
    assert {found[name] for name in ("clone3", "x32", "future")} == {"ENOSYS"}
    denied = ("mount", "unshare-user", "clone-user", "setns", "bpf", "io_uring", "keyctl", "perf", "prlimit-agent")
    assert {found[name] for name in denied} == {"EPERM"}
    assert {found[name] for name in ("vsock", "alg", "packet")} == {"EAFNOSUPPORT"}


async def test_commands_are_root_of_nothing(box: Sandbox) -> None:
    status = (await box.exec("id -u; grep -E '^(Cap|NoNewPrivs|Seccomp:)' /proc/self/status", timeout_s=20)).stdout
    lines = status.decode().split("\n")
    assert lines[0] == "0"
    assert [line.split()[1] for line in lines[1:-1]] == ["0" * 16] * 5 + ["1", "2"]


async def test_the_host_is_out_of_sight(box: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_OF_THE_HOST", "hunter2")
    secret = tmp_path / "secret"
    secret.write_text("hunter2")
    script = f"""cat {secret} /etc/shadow; ls {Path.cwd()} /root /home /sys /boot; env; cat /proc/*/environ
        for p in /proc/[0-9]*; do echo $p; done; ls -la /proc/1/fd /proc/1/cwd /proc/1/exe; mount"""
    result = await box.exec(script, timeout_s=20)
    text = result.stdout.decode(errors="replace")
    assert "hunter2" not in text and "SECRET" not in text
    assert text.count("/proc/") < 30, "only the processes of the box"
    assert f"/proc/{os.getpid()}\n" not in text
    assert "socket:" not in text and str(tmp_path) not in text
    root = await box.exec("ls -A /", timeout_s=20)
    assert {"solution", "tests", "work", "boot", "sys"} & set(root.stdout.decode().split()) == set()


async def test_no_network_and_no_socket_of_the_host(box: Sandbox) -> None:
    name = f"thresher-test-{os.getpid()}"
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as abstract:
        abstract.bind("\0" + name)
        abstract.listen()
        result = await run_python(box, inside.CONNECT, str(server.getsockname()[1]), name)
    assert result.stdout.decode().split() == ["ConnectionRefusedError", "OSError", "ConnectionRefusedError"]


async def test_boxes_do_not_see_each_other(box: Sandbox, provider: LocalProvider) -> None:
    await box.write_file("/tmp/mine", b"1")
    await box.exec("sleep 1000 >/dev/null 2>&1 &", timeout_s=20)
    async with provider.start(make_task(**SMALL), owner="other") as other:
        result = await other.exec("ls /tmp; pgrep sleep; kill -9 -1", timeout_s=20)
        assert b"mine" not in result.stdout and result.stdout == b""
        await assert_alive(other)
    assert (await box.exec("pgrep -c sleep", timeout_s=20)).stdout == b"1\n"


async def test_the_first_process_cannot_be_killed_or_stopped(box: Sandbox) -> None:
    await box.exec("for s in KILL STOP TERM INT HUP SEGV QUIT USR1 CHLD; do kill -$s 1; done", timeout_s=20)
    await assert_alive(box)


async def test_a_fork_bomb_is_bound_and_swept(box: Sandbox) -> None:
    try:
        assert (await box.exec(inside.FORK_BOMB, timeout_s=2)).exit_code == 124
    except SandboxDied:
        return  # the bomb may also leave no room for a command
    await box.kill_all()
    await assert_alive(box)
    assert int((await box.exec("ls -d /proc/[0-9]* | wc -l", timeout_s=30)).stdout) < 10


@needs_cgroups
async def test_memory_is_bound_for_one_process_and_for_several(box: Sandbox) -> None:
    assert (await run_python(box, inside.ALLOCATE, "2000")).exit_code == 137
    four = "for k in 1 2 3 4; do /usr/bin/python3 /tmp/program.py 200 & done; wait"
    result = await box.exec(four, timeout_s=60)
    assert result.stdout.count(b"kept") < 4, result
    await assert_alive(box)


async def test_a_large_allocation_fails(box: Sandbox) -> None:
    assert (await run_python(box, inside.ALLOCATE, "2000")).exit_code != 0
    await assert_alive(box)


@needs_cgroups
async def test_a_box_that_has_its_agent_killed_died_from_inside(provider: LocalProvider) -> None:
    with pytest.raises(SandboxDied):
        async with provider.start(make_task(**SMALL), owner="t") as box:
            await run_python(box, inside.KILL_AGENT)
            await asyncio.sleep(0.2)
            await assert_alive(box)


@needs_cgroups
async def test_a_box_killed_by_its_host_did_not_die_from_inside(provider: LocalProvider) -> None:
    with pytest.raises(Exception, match="killed from outside") as caught:
        async with provider.start(make_task(**SMALL), owner="t") as box:
            marker = "sleep 4321.5"
            started = "until tr '\\0' ' ' </proc/$!/cmdline | grep -q ^sleep; do :; done"
            await box.exec(f"{marker} >/dev/null 2>&1 & {started}", timeout_s=20)
            agent = parent_of(find_process(marker))
            os.kill(agent, 9)
            await box.exec("true", timeout_s=20)
    assert not isinstance(caught.value, SandboxDied)


async def test_the_disk_is_bound(box: Sandbox) -> None:
    result = await box.exec("head -c 500M /dev/zero >/tmp/big; stat -c %s /tmp/big; rm /tmp/big", timeout_s=60)
    assert b"No space left" in result.stderr
    assert int(result.stdout) <= 64 << 20
    assert (
        await box.exec("head -c 500M /dev/zero >/dev/shm/big; stat -c %s /dev/shm/big", timeout_s=60)
    ).exit_code == 0
    await assert_alive(box)


async def test_many_inodes_harm_only_their_box(box: Sandbox, provider: LocalProvider) -> None:
    result = await run_python(box, inside.INODES, timeout_s=60)
    assert result.exit_code in (0, 1, 137, 124)
    async with provider.start(make_task(**SMALL), owner="other") as other:
        await assert_alive(other)


async def test_a_daemon_ends_with_kill_all_and_with_the_box(provider: LocalProvider) -> None:
    async with provider.start(make_task(**SMALL), owner="t") as box:
        await run_python(box, inside.DAEMON)
        assert (await box.exec("pgrep -fc program.py", timeout_s=20)).stdout == b"1\n"
        await box.kill_all()
        assert (await box.exec("pgrep -fc program.py", timeout_s=20)).stdout == b"0\n"
        await box.exec("setsid sleep 4322.5 >/dev/null 2>&1 &", timeout_s=20)
        await asyncio.sleep(0.1)
        assert find_process("sleep 4322.5")
    assert not find_process("sleep 4322.5")


@needs_cgroups
async def test_spinners_share_one_quota(provider: LocalProvider) -> None:
    async with provider.start(make_task(**SMALL, cpus=0.2), owner="t") as box:
        await box.exec(f"for k in $(seq 8); do ({inside.SPIN}) & done >/dev/null 2>&1", timeout_s=20)
        began = time.monotonic()
        await asyncio.sleep(1.0)
        await assert_alive(box)
        used = (await box.exec("cat /proc/[0-9]*/stat | awk '{s += $14} END {print s}'", timeout_s=60)).stdout
        assert int(used) / os.sysconf("SC_CLK_TCK") < 0.4 * (time.monotonic() - began) + 0.2


async def test_a_file_in_the_way_is_replaced_not_followed(box: Sandbox) -> None:
    await box.exec(
        "mkdir -p /tests; mkfifo /tests/test.sh; ln -s /app/elsewhere /tests/link; chmod 0 /tests", timeout_s=20
    )
    await box.write_file("/tests/test.sh", b"real")
    await box.write_file("/tests/link", b"real")
    assert await box.read_file("/tests/test.sh") == await box.read_file("/tests/link") == b"real"
    assert await box.read_file("/app/elsewhere") is None
    await box.exec("mkfifo /app/pipe", timeout_s=20)
    assert await box.read_file("/app/pipe") is None


def find_process(command: str) -> int:
    """Host pid of the process with this command line, 0 for none."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if path.read_bytes().replace(b"\0", b" ").decode(errors="replace").strip() == command:
                return int(path.parent.name)
        except OSError:
            continue
    return 0


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


async def test_what_loads_the_verifiers_programs_cannot_be_replaced(box: Sandbox) -> None:
    attempts = {
        "preload": "echo /tmp/evil.so > /etc/ld.so.preload",
        "remove preload": "rm -f /etc/ld.so.preload; echo /tmp/evil.so > /etc/ld.so.preload",
        "move over preload": "echo /tmp/evil.so > /etc/p; mv -f /etc/p /etc/ld.so.preload",
        "rename etc": "mv /etc /etc2",
        "cache": "echo > /etc/ld.so.cache",
        "loader": "rm -rf /lib64 && mkdir /lib64",
        "rename lib": "mv /lib /lib2",
        "rename bin": "mv /bin /bin2",
        "usr": "mv /usr /usr2",
        "shell": "echo > /bin/bash",
    }
    results = {name: (await box.exec(command, timeout_s=20)).exit_code for name, command in attempts.items()}
    assert [name for name, exit_code in results.items() if exit_code == 0] == []
    probe = "test -s /etc/ld.so.preload; echo $?; echo mine > /etc/motd && cat /etc/motd; ls -d /lib64 /bin /sbin /lib"
    assert (await box.exec(probe, timeout_s=20)).stdout == b"1\nmine\n/bin\n/lib\n/lib64\n/sbin\n"
