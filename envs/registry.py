"""Harbor's lists of tasks: registry.json and dataset.toml, resolved to task directories on this machine.

Invariant: nothing is fetched; an entry that lies elsewhere (a git repository, a task that is not here) is refused in
one line that says how to get it. Called by envs/tasksets and recipes/tasks.
"""

import hashlib
import json
import re
import tomllib
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, cast

from envs.errors import TaskError
from envs.toml_table import Fault, Table

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_PUBLISHED_FILES = ("task.toml", "instruction.md", "README.md", "trajectory.json")
_PUBLISHED_DIRS = ("environment", "tests", "solution", "steps")
_IGNORED = ("__pycache__", "*.pyc", ".DS_Store", "*.swp", "*.swo", "*~", ".harborignore")


def registry_task_dirs(registry: Path, selector: str) -> list[Path]:
    """The task directories of "NAME" or "NAME@VERSION" in a registry.json; paths are relative to its directory.

    The version may be left out where the name has one only. Raises TaskError.
    """
    name, _, version = selector.partition("@")
    try:
        entries = [Table(f"[{index}]", entry) for index, entry in enumerate(_read_list(registry))]
        named = [entry for entry in entries if entry.required_text("name") == name]
        chosen = [entry for entry in named if not version or entry.required_text("version") == version]
        if len(chosen) != 1:
            known = ", ".join(f"{entry.text('name')}@{entry.text('version')}" for entry in named or entries)
            raise Fault(f"{len(chosen)} entries are {selector!r}; name one of {known or 'none'}")
        return [_registry_task(registry.parent, task) for task in chosen[0].tables("tasks")]
    except Fault as fault:
        raise TaskError(f"{registry}: {fault}") from None


def dataset_task_dirs(manifest: Path) -> list[Path]:
    """The task directories that a dataset.toml names, each beside it as NAME or ORG/NAME, its digest checked."""
    try:
        root = Table("", tomllib.loads(manifest.read_text(encoding="utf-8")))
        root.table("dataset").required_text("name")
        return [_dataset_task(manifest.parent, task) for task in root.tables("tasks")]
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise TaskError(f"{manifest}: not valid TOML: {error}; correct that line") from None
    except Fault as fault:
        raise TaskError(f"{manifest}: {fault}") from None


def content_digest(task_dir: Path) -> str:
    """ "sha256:..." over the names and contents of a task's published files (Harbor 0.25's packager).

    Harbor's default ignore rules are applied; those of a .gitignore in the task are not.
    """
    outer = hashlib.sha256()
    for name in sorted(_published(task_dir)):
        inner = hashlib.sha256((task_dir / name).read_bytes()).hexdigest()
        outer.update(f"{name}\0{inner}\n".encode())
    return f"sha256:{outer.hexdigest()}"


def _read_list(registry: Path) -> list[dict[str, Any]]:
    try:
        content: Any = json.loads(registry.read_text(encoding="utf-8"))
    except ValueError as error:
        raise Fault(f"not valid JSON: {error}; correct it") from None
    if not isinstance(content, list) or not all(isinstance(entry, dict) for entry in cast(list[Any], content)):
        raise Fault("must be a list of datasets, each with name, version and tasks")
    return cast(list[dict[str, Any]], content)


def _registry_task(base: Path, task: Table) -> Path:
    name, path = task.required_text("name"), task.required_text("path")
    if (url := task.text("git_url")) is not None:
        commit = task.text("git_commit_id") or "the default branch"
        raise Fault(f"task {name} lies in {url}; clone it (at {commit}) and give the directory of its tasks")
    return _existing(base / path, name)


def _dataset_task(base: Path, task: Table) -> Path:
    name, digest = task.required_text("name"), task.required_text("digest")
    if name.count("/") != 1 or ".." in name or not _DIGEST.fullmatch(digest):
        raise Fault(f'{task.path}: want name "org/name" and digest "sha256:<64 hex digits>", got {name!r}, {digest!r}')
    nested, beside = base / name, base / name.split("/")[1]
    path = nested if nested.is_dir() else _existing(beside, name)
    found = content_digest(path)
    if found != digest:
        note = "; its .gitignore is not applied" if (path / ".gitignore").exists() else ""
        raise Fault(f"task {name}: {path} has digest {found}, not {digest}{note}; get the version that the list names")
    return path


def _existing(path: Path, name: str) -> Path:
    if not path.is_dir():
        raise Fault(f"task {name}: no directory {path}; download the task there")
    return path


def _published(task_dir: Path) -> Iterator[str]:
    for name in _PUBLISHED_FILES:
        if (task_dir / name).exists():
            yield name
    for folder in _PUBLISHED_DIRS:
        for path in (task_dir / folder).rglob("*"):
            relative = path.relative_to(task_dir)
            if path.is_file() and not any(fnmatchcase(part, rule) for part in relative.parts for rule in _IGNORED):
                yield relative.as_posix()
