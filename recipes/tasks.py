"""Tasks: checks a task set, converts it between directory and Parquet form, or lists what it holds.

A set is named as in `--tasks` of every recipe: a directory of Harbor tasks, a .parquet of task packages, a
dataset.toml, registry.json:NAME@VERSION, shell:train, humaneval. `check` prints a line for each malformed task, and
exits 1 if there was one.

    python -m recipes.tasks check my-tasks
    python -m recipes.tasks convert my-tasks my-tasks.parquet
    python -m recipes.tasks convert my-tasks.parquet unpacked
    python -m recipes.tasks list my-tasks --limit 20
"""

import os
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from envs.errors import TaskError
from envs.harbor import load_task
from envs.packages import read_packages, unpack_packages, write_packages
from envs.playable import unplayable
from envs.task import Task
from envs.tasksets import locate_tasks
from envs.unpack import pack, unpack
from recipes.launch import launch


@dataclass(frozen=True, kw_only=True)
class Check:
    """Say what is wrong where; exit 1 if anything is."""

    source: Annotated[str, tyro.conf.Positional]
    """The task set."""


@dataclass(frozen=True, kw_only=True)
class Convert:
    """Write the set in another form."""

    source: Annotated[str, tyro.conf.Positional]
    """The task set."""
    target: Annotated[Path, tyro.conf.Positional]
    """A .parquet file, which is replaced, or a directory that does not exist yet."""


@dataclass(frozen=True, kw_only=True)
class List:
    """Print a line for each Task."""

    source: Annotated[str, tyro.conf.Positional]
    """The task set."""
    limit: int | None = None
    """Print the first so many."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """What to do with which set."""

    do: tyro.conf.OmitSubcommandPrefixes[
        Annotated[Check, tyro.conf.subcommand("check")]
        | Annotated[Convert, tyro.conf.subcommand("convert")]
        | Annotated[List, tyro.conf.subcommand("list")]
    ]


async def main(config: Config) -> None:
    """Runs the command."""
    match config.do:
        case Check(source=source):
            if not check(source):
                raise SystemExit(1)
        case Convert(source=source, target=target):
            convert(source, target)
        case List(source=source, limit=limit):
            for path in locate_tasks(source)[:limit]:
                print(_line(load_task(path)))


def check(source: str) -> bool:
    """Whether every task of the set is well formed; prints what is wrong, what no episode plays yet, and the rate."""
    began, findings = time.perf_counter(), _Findings()
    for name, found in _load_each(source):
        findings.add(name, found)
    seconds = time.perf_counter() - began
    for line in findings.errors:
        print(f"error: {line}")
    for note, names in sorted(findings.notes.items()):
        print(f"note: {note}: {len(names)} tasks, {names[0]} first")
    print(
        f"{source}: {findings.num_tasks} tasks, {len(findings.errors)} malformed; "
        f"checked in {seconds:.2f} s, {findings.num_tasks / max(seconds, 1e-9):,.0f} a second"
    )
    return not findings.errors


def convert(source: str, target: Path) -> None:
    """Writes the set to `target`, whole or not at all; TaskError when a task is malformed or the directory exists."""
    began = time.perf_counter()
    if target.suffix == ".parquet":
        num_tasks = write_packages(_checked(locate_tasks(source)), target)
    else:
        num_tasks = _write_directory(source, target)
    print(f"{target}: {num_tasks} tasks, written in {time.perf_counter() - began:.1f} s")


@dataclass(frozen=True, slots=True)
class _Findings:
    """What a check found."""

    errors: list[str] = field(default_factory=list)
    notes: dict[str, list[str]] = field(default_factory=dict)
    """Task ids by note."""
    counts: Counter[str] = field(default_factory=Counter)

    @property
    def num_tasks(self) -> int:
        return self.counts["tasks"]

    def add(self, name: str, found: Task | TaskError) -> None:
        self.counts["tasks"] += 1
        if isinstance(found, TaskError):
            self.errors.append(str(found))
            return
        for key in found.ignored_keys:
            self.notes.setdefault(f"unknown key {key} of task.toml ignored", []).append(name)
        for reason in unplayable(found):
            self.notes.setdefault(reason, []).append(name)


def _load_each(source: str) -> Iterator[tuple[str, Task | TaskError]]:
    """Every task of the set, or what is wrong with it, by id; TaskError when the set itself cannot be read."""
    if Path(source).suffix == ".parquet" and Path(source).is_file():
        yield from _load_packed(Path(source))
        return
    for path in locate_tasks(source):
        yield path.name, _load(path)


def _load_packed(source: Path) -> Iterator[tuple[str, Task | TaskError]]:
    """Each task is unpacked, read and removed again, so that a set of any size fits."""
    with tempfile.TemporaryDirectory(prefix="thresher-check-", dir=_scratch()) as root:
        for packed in read_packages(source):
            path = Path(root) / packed.id
            where = f"{source}: row {packed.row} ({packed.id})"
            try:
                unpack(packed.data, path)
            except TaskError as error:
                yield packed.id, TaskError(f"{where}: {error}")
                continue
            found = _load(path)
            yield packed.id, TaskError(str(found).replace(str(path), where)) if isinstance(found, TaskError) else found
            shutil.rmtree(path)


def _scratch() -> str | None:
    """Memory where the machine has it: on disk, removing the directories costs twice as much as reading the tasks."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def _load(path: Path) -> Task | TaskError:
    try:
        return load_task(path)
    except TaskError as error:
        return error


def _checked(paths: list[Path]) -> Iterator[Path]:
    for path in paths:
        load_task(path)
        yield path


def _write_directory(source: str, target: Path) -> int:
    if target.exists():
        raise TaskError(f"{target}: exists already; give a directory that does not, or remove it")
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        if Path(source).suffix == ".parquet" and Path(source).is_file():
            num_tasks = unpack_packages(Path(source), draft)
            list(_checked(sorted(draft.iterdir())))
        else:
            paths = locate_tasks(source)
            for path in _checked(paths):
                unpack(pack(path), draft / path.name)
            num_tasks = len(paths)
        draft.chmod(0o755)
        draft.rename(target)
        return num_tasks
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _line(task: Task) -> str:
    """ "ID  IMAGE  NETWORK  agent N s  first line of the instruction"."""
    image = task.environment.docker_image or task.compose_file or "Dockerfile"
    limit_s = task.limits.agent_timeout_s
    limit = "no limit" if limit_s is None else f"{limit_s:g} s"
    steps = f"{len(task.steps)} steps" if task.steps else "1 step"
    instruction = task.instruction or task.steps[0].instruction
    first = instruction.splitlines()[0]
    return "  ".join((task.id, image, task.environment.network_mode, limit, steps, first[:80]))


if __name__ == "__main__":
    launch(Config, main)
