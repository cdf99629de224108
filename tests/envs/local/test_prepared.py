"""Prepared environments: made once, the same in every box, and never more on disk than allowed."""

import asyncio
import io
import os
import tarfile
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace
from hashlib import md5
from pathlib import Path
from typing import Any

import pytest

from envs.errors import SandboxError, SandboxRefused
from envs.local.layer import layer_entries
from envs.local.provider import LocalProvider
from envs.local.wire import Kind, encode_put
from envs.task import Task
from tests.envs.local.boxes import SMALL, make_provider, make_task, own_leases
from tests.envs.local.test_dockerfile import write


def archive(*members: tarfile.TarInfo) -> io.BytesIO:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as tar:
        for member in members:
            tar.addfile(member, io.BytesIO(b"x" * member.size))
    file.seek(0)
    return file


def member(name: str, kind: bytes = tarfile.REGTYPE, *, size: int = 0, mode: int = 0o644) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.size, info.mode, info.mtime = kind, size, mode, 7
    return info


def test_a_layer_holds_files_and_links_but_nothing_of_the_mounts() -> None:
    link = member("./app/b", tarfile.SYMTYPE)
    link.linkname = "a"
    members = [member(f"./{name}") for name in ("usr/bin/x", "etc/ld.so.cache", "opt/agent/x")]
    entries = list(layer_entries(archive(*members, member("./app/a", size=2, mode=0o750), link), ("/x:/opt/agent",)))
    assert entries == [
        encode_put(Kind.FILE, "/app/a", b"xx", mode=0o750),
        encode_put(Kind.TIME, "/app/a", b"\7" + b"\0" * 7),
        encode_put(Kind.LINK, "/app/b", b"a"),
    ]


def test_a_directory_that_is_closed_is_closed_again_after_it_was_filled() -> None:
    inner = member("./a/b/f")
    dirs = [member(name, tarfile.DIRTYPE, mode=0o555) for name in ("./a", "./a/b")]
    paths = [(entry[:8], entry[12:].split(b"\0")[0]) for entry in layer_entries(archive(*dirs, inner), ())]
    kind = {name: encode_put(value, "/", mode=mode)[:8] for name, value, mode in (
        ("open", Kind.DIR, 0o755), ("closed", Kind.DIR, 0o555), ("file", Kind.FILE, 0o644), ("time", Kind.TIME, 0o755),
    )}  # fmt: skip
    assert paths == [
        (kind["open"], b"/a"), (kind["open"], b"/a/b"), (kind["file"], b"/a/b/f"), (kind["time"], b"/a/b/f"),
        (kind["closed"], b"/a/b"), (kind["closed"], b"/a"),
    ]  # fmt: skip


def test_what_no_entry_can_make_is_refused_by_name() -> None:
    with pytest.raises(SandboxRefused, match="/app/pipe is no plain file"):
        list(layer_entries(archive(member("./app/pipe", tarfile.FIFOTYPE)), ()))
    with pytest.raises(SandboxRefused, match="keep what RUN made"):
        list(layer_entries(io.BytesIO(b"no archive"), ()))


@asynccontextmanager
async def keeping(directory: Path, **config: Any) -> AsyncGenerator[LocalProvider]:
    """A provider that keeps its layers there. The compiled agent stays where boxes of another user reach it."""
    provider = make_provider(**config)
    provider._environments._directory = directory
    await provider.provenance()
    try:
        yield provider
    finally:
        await provider.close()


async def play(provider: LocalProvider, task: Task, command: str) -> str:
    async with provider.start(task, owner="t") as sandbox:
        return (await sandbox.exec(command, timeout_s=30)).stdout.decode()


def layers(root: Path) -> list[Path]:
    return sorted((root / "layers").iterdir())


DOCKERFILE = """FROM x
ENV WORD=hello
WORKDIR /work
COPY big in/
RUN echo $WORD $(date +%N) >once && ln -s once link && ln once hard && mkfifo /run/x && rm /run/x
RUN ["/bin/sh", "-c", "mkdir -p /opt/d/e && echo 1 >/opt/d/e/f && chmod 555 /opt/d/e /opt/d && rm in/big"]
RUN touch -d @1000 once; sleep 1000 & echo "root2:x:0:0::/:" >>/etc/passwd; mkdir -p /tmp/kept
COPY late .
"""


@pytest.mark.sandbox
async def test_commands_run_once_and_every_box_starts_with_what_they_made(tmp_path: Path) -> None:
    """0.3 s."""
    write(tmp_path, DOCKERFILE, "big", "late")
    task = make_task(tmp_path, **SMALL)
    look = (
        "pwd; cat once link hard late; ls in; stat -c '%a %Y' once; stat -c %a /opt/d /opt/d/e /tmp /tmp/kept /root; "
        "tail -1 /etc/passwd; pgrep sleep; ls -A / | grep layer; touch /etc/new once && echo mine >once"
    )
    async with keeping(tmp_path / "layers") as provider:
        seen = await asyncio.gather(*(play(provider, task, look) for _ in range(3)))
    assert len(set(seen)) == 1, "a box saw what another made of its files, or the command ran again"
    lines = seen[0].split("\n")
    assert lines[0] == "/work" and lines[1].startswith("hello ") and lines[2:4] == [lines[1]] * 2
    assert lines[4:] == ["late644 1000", "555", "555", "1777", "755", "700", "root2:x:0:0::/:", ""]
    assert len(layers(tmp_path)) == 1
    async with keeping(tmp_path / "layers") as again:
        assert await play(again, task, "cat once") == lines[1] + "\n", "another provider uses the same layer"


@pytest.mark.sandbox
async def test_a_command_that_fails_is_refused_with_what_it_said_and_not_tried_again(tmp_path: Path) -> None:
    """1.4 s, of which 1 s is the limit."""
    write(tmp_path, "FROM x\nRUN echo $$ >>/usr/x\n")
    write(tmp_path / "slow", "FROM x\nRUN sleep 30\n")
    async with keeping(tmp_path / "layers") as provider:
        builds = list[Task]()
        build = provider._environments._build
        provider._environments._build = lambda task: builds.append(task) or build(task)
        for _ in range(2):
            with pytest.raises(SandboxRefused, match=r":2: RUN ended with 2: .*Read-only.*another sandbox provider"):
                await play(provider, make_task(tmp_path, **SMALL), "")
        assert len(builds) == 1
        with pytest.raises(SandboxRefused, match="RUN did not end within 1 s"):
            await play(provider, make_task(tmp_path / "slow", build_timeout_s=0.1, **SMALL), "")
        assert await own_leases(provider) == []
    assert layers(tmp_path) == []


@pytest.mark.sandbox
async def test_large_copies_are_a_layer_that_follows_the_files_and_makes_room(tmp_path: Path) -> None:
    """0.2 s."""
    data = write(tmp_path, "FROM x\nCOPY data /data\n").parent / "data"
    task = make_task(tmp_path, **SMALL)
    for _ in range(3):
        data.write_bytes(os.urandom(3 << 20))
        async with keeping(tmp_path / "layers", max_layers_mb=5) as provider:
            assert await play(provider, task, "md5sum </data") == f"{md5(data.read_bytes()).hexdigest()}  -\n"
            (kept,) = layers(tmp_path)  # two would take 6 MB
            kept.unlink()
            assert await play(provider, task, "md5sum </data") == f"{md5(data.read_bytes()).hexdigest()}  -\n"


@pytest.mark.sandbox
async def test_a_layer_too_large_for_its_box_is_the_providers_failure(tmp_path: Path) -> None:
    """0.2 s."""
    (write(tmp_path, "FROM x\nCOPY data /data\n").parent / "data").write_bytes(bytes(3 << 20))
    async with keeping(tmp_path / "layers") as provider:
        with pytest.raises(SandboxError, match="write /data inside: No space left"):
            await play(provider, make_task(tmp_path, memory_mb=256, storage_mb=2), "")
        write(tmp_path, "FROM x\nRUN true\nCOPY data /data\n")
        with pytest.raises(SandboxError, match="prepare the environment of task u: write /data inside: No space left"):
            await play(provider, replace(make_task(tmp_path, memory_mb=256, storage_mb=1), id="u"), "")
    assert len(layers(tmp_path)) == 1


@pytest.mark.sandbox
async def test_a_cancelled_rollout_leaves_the_preparation_to_the_others(tmp_path: Path) -> None:
    """0.5 s."""
    write(tmp_path, "FROM x\nRUN sleep 0.3; echo done >/made\n")
    async with keeping(tmp_path / "layers") as provider:
        task = make_task(tmp_path, **SMALL)
        first, second = (asyncio.create_task(play(provider, task, "cat /made")) for _ in range(2))
        await asyncio.sleep(0.1)
        first.cancel()
        assert await second == "done\n"


@pytest.mark.sandbox
async def test_closing_ends_what_is_being_prepared(tmp_path: Path) -> None:
    """0.3 s."""
    write(tmp_path, "FROM x\nRUN sleep 30\n")
    async with keeping(tmp_path / "layers") as provider:
        starting = asyncio.create_task(play(provider, make_task(tmp_path, **SMALL), ""))
        await asyncio.sleep(0.1)
        await provider.close()
        with pytest.raises(SandboxRefused, match="closed"):
            await starting
        assert layers(tmp_path) == [] and await own_leases(provider) == []
