"""Prepared environments: made once, the same in every box, and never more on disk than allowed."""

import asyncio
import io
import os
import tarfile
import threading
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace
from hashlib import md5
from pathlib import Path
from typing import Any, cast

import pytest

from envs.errors import SandboxError, SandboxRefused
from envs.local import prepared
from envs.local.layer import download_files, layer_entries
from envs.local.prepared import MAX_HELD_BYTES, PreparedEnvironments
from envs.local.provider import LocalProvider
from envs.local.wire import Kind, encode_put
from envs.sandbox import ExecResult
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


def prepared_at(root: Path) -> PreparedEnvironments:
    """Without boxes, so for environments that run no command."""
    return PreparedEnvironments(root, cast(Any, None), max_mb=1, mounts=())


def large_task(path: Path) -> Task:
    """One whose files are a layer."""
    (write(path, "FROM x\nCOPY data /data\n").parent / "data").write_bytes(os.urandom(MAX_HELD_BYTES + 1))
    return make_task(path)


async def test_two_providers_of_a_process_write_layers_beside_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under one name, one would remove what the other writes, and a third could finish it as its own."""
    both = threading.Barrier(2)
    write_out = prepared._write

    def write_together(target: Path, entries: Any) -> None:
        both.wait(5)
        write_out(target, entries)
        both.wait(5)

    monkeypatch.setattr(prepared, "_write", write_together)
    tasks = [large_task(tmp_path / name) for name in "ab"]
    made = await asyncio.gather(*(prepared_at(tmp_path / "root").of(task) for task in tasks))
    assert sorted(each.content for each in made) == layers(tmp_path / "root")


async def test_a_layer_that_another_process_removes_while_room_is_made_is_no_error(tmp_path: Path) -> None:
    environments = prepared_at(tmp_path)
    (tmp_path / "layers").mkdir()
    (tmp_path / "layers" / "gone").symlink_to("nowhere")  # listed, and not there when it is looked at
    made = await environments.of(large_task(tmp_path / "task"))
    assert made.content in layers(tmp_path)


async def test_a_layer_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a power failure leaves an empty layer, of which boxes without the Task's files would be made."""
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.fstat(fd).st_size))
    named: list[int] = []
    rename = Path.rename
    monkeypatch.setattr(Path, "rename", lambda old, new: named.append(len(synced)) or rename(old, new))
    made = await prepared_at(tmp_path).of(large_task(tmp_path / "task"))
    assert isinstance(made.content, Path) and (synced, named) == ([made.content.stat().st_size], [1])


class PackedBox:
    """A box that packs `archive` and gives out as much of it at once as a provider keeps of a command's output."""

    def __init__(self, archive: bytes, *, max_output: int = 1 << 20, breaks_at: int = 1 << 40) -> None:
        self._archive, self._max_output, self._breaks_at = archive, max_output, breaks_at

    async def kill_all(self) -> None:
        return None

    async def exec(self, command: str, *, timeout_s: float, cwd: str) -> ExecResult:
        if "tar" in command:
            return ExecResult(exit_code=0, stdout=b"%d\n" % len(self._archive), stderr=b"")
        (start,) = [int(word[5:]) for word in command.split() if word.startswith("skip=")]
        if start >= self._breaks_at:
            return ExecResult(exit_code=137, stdout=b"", stderr=b"")
        return ExecResult(exit_code=0, stdout=self._archive[start : start + self._max_output], stderr=b"")


async def test_all_of_a_packed_box_is_read_however_little_is_kept_of_an_output() -> None:
    content, file = os.urandom(1000), io.BytesIO()
    await download_files(cast(Any, PackedBox(content, max_output=300)), file)
    assert file.read() == content
    with pytest.raises(SandboxError, match=r"read what RUN made: .* ended with 137") as raised:
        await download_files(cast(Any, PackedBox(content, max_output=300, breaks_at=600)), io.BytesIO())
    assert not isinstance(raised.value, SandboxRefused), "which would hold for good"


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


@pytest.mark.sandbox
async def test_a_layer_that_goes_while_a_box_starts_is_made_again(tmp_path: Path) -> None:
    """0.2 s. Boxes may wait long for their turn, and other runs make room meanwhile."""
    task = replace(large_task(tmp_path), environment=make_task(**SMALL).environment)
    async with keeping(tmp_path / "layers") as provider:
        start = provider._start_bare

        async def start_late(size: Any) -> Any:
            for layer in layers(tmp_path):
                layer.unlink()
            return await start(size)

        provider._start_bare = start_late  # type: ignore[method-assign]
        assert await play(provider, task, "stat -c %s /data") == f"{MAX_HELD_BYTES + 1}\n"
