"""Task packages: many task directories in one Parquet file, a row each (OpenThoughts-Agent's form).

    path         string   directory of the task, relative; its last part is the Task's id
    task_binary  binary   tar.gz of the directory's content

Invariant: a file is read in batches and written whole or not at all. Called by envs/tasksets and recipes/tasks.
"""

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path, PurePosixPath
from typing import Any

from envs.errors import TaskError
from envs.unpack import UnpackLimits, pack, unpack

_BATCH_ROWS = 64
_GROUP_BYTES = 32 << 20
"""Rows are gathered to about this size before they are written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedTask:
    """One row."""

    row: int
    """From 0."""
    id: str
    data: bytes


def read_packages(path: Path) -> Iterator[PackedTask]:
    """The rows of a Parquet file. Raises TaskError for a foreign file, a bad path, or an id that comes twice."""
    pa, pq = _arrow()
    try:
        file = pq.ParquetFile(path)
    except FileNotFoundError:
        raise TaskError(f"{path}: no such file; give a Parquet file of task packages") from None
    except pa.ArrowInvalid as error:
        raise TaskError(f"{path}: not a Parquet file ({' '.join(str(error).split())[:200]})") from None
    with file:
        _check_columns(path, file.schema_arrow)
        seen: set[str] = set()
        rows = (
            row for batch in file.iter_batches(_BATCH_ROWS, columns=["path", "task_binary"]) for row in _rows(batch)
        )
        for index, (name, data) in enumerate(rows):
            task_id = _task_id(name)
            if task_id is None:
                raise TaskError(
                    f"{path}: row {index}: path {name!r} must be relative, without '..', and no hidden name"
                )
            if data is None:
                raise TaskError(f"{path}: row {index} ({task_id}): task_binary is null; pack the task there")
            if task_id in seen:
                raise TaskError(f"{path}: row {index}: a second task {task_id!r}; ids are the last part of path")
            seen.add(task_id)
            yield PackedTask(row=index, id=task_id, data=data)


def unpack_packages(path: Path, target: Path, *, limits: UnpackLimits | None = None) -> int:
    """Unpacks every row into a directory of its own under `target`; how many. Raises TaskError naming file and row."""
    num_tasks = 0
    target.mkdir(parents=True, exist_ok=True)
    for packed in read_packages(path):
        try:
            unpack(packed.data, target / packed.id, limits=limits)
        except TaskError as error:
            raise TaskError(f"{path}: row {packed.row} ({packed.id}): {error}") from None
        num_tasks += 1
    return num_tasks


def write_packages(task_dirs: Iterable[Path], path: Path) -> int:
    """Packs these directories into `path`, replacing it once all are in; how many. The same files, the same bytes."""
    pa, pq = _arrow()
    schema = pa.schema([("path", pa.string()), ("task_binary", pa.binary())])
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    num_tasks = 0
    try:
        with pq.ParquetWriter(partial, schema, compression="none") as writer:
            for group in _groups(task_dirs):
                writer.write_table(pa.Table.from_pylist(group, schema=schema))
                num_tasks += len(group)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    return num_tasks


def _arrow() -> tuple[Any, Any]:
    """pyarrow and pyarrow.parquet: they have no types, and loading them takes a third of a second."""
    return import_module("pyarrow"), import_module("pyarrow.parquet")


def _check_columns(path: Path, schema: Any) -> None:
    for name, right in (("path", "string"), ("task_binary", "binary")):
        kind = str(schema.field(name).type) if name in schema.names else None
        if kind is None or kind.removeprefix("large_") != right:
            raise TaskError(f"{path}: column {name} is {kind or 'missing'}; task packages have path and task_binary")


def _rows(batch: Any) -> Iterator[tuple[Any, Any]]:
    return zip(batch.column("path").to_pylist(), batch.column("task_binary").to_pylist(), strict=True)


def _task_id(name: str | None) -> str | None:
    """The last part of a path that stays inside and is no hidden name; None for any other."""
    path = PurePosixPath(name or "/")
    is_inner = not path.is_absolute() and ".." not in path.parts and "\\" not in str(path) and "\0" not in str(path)
    return path.name if is_inner and path.name and not path.name.startswith(".") and len(path.name) < 200 else None


def _groups(task_dirs: Iterable[Path]) -> Iterator[list[dict[str, Any]]]:
    held: list[dict[str, Any]] = []
    size = 0
    for directory in task_dirs:
        held.append({"path": directory.name, "task_binary": pack(directory)})
        size += len(held[-1]["task_binary"])
        if size >= _GROUP_BYTES:
            yield held
            held, size = [], 0
    if held:
        yield held
