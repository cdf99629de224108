"""Parquet packages and Harbor's lists of tasks, as `--tasks` resolves them."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from envs.errors import TaskError
from envs.packages import read_packages, unpack_packages, write_packages
from envs.registry import content_digest, dataset_task_dirs, registry_task_dirs
from envs.tasksets import resolve_tasks
from envs.unpack import pack
from tests.envs.task_dirs import make_task_dir


@pytest.fixture
def task_dirs(tmp_path: Path) -> list[Path]:
    return [make_task_dir(tmp_path / "set", name) for name in ("a", "b", "c")]


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def test_a_set_goes_through_parquet_and_comes_back_the_same(tmp_path: Path, task_dirs: list[Path]) -> None:
    assert write_packages(task_dirs, tmp_path / "set.parquet") == 3
    assert pq.read_schema(tmp_path / "set.parquet").names == ["path", "task_binary"]
    assert unpack_packages(tmp_path / "set.parquet", tmp_path / "out") == 3
    assert [pack(tmp_path / "out" / path.name) for path in task_dirs] == [pack(path) for path in task_dirs]


def test_the_last_part_of_the_path_is_the_id_and_large_types_are_read(tmp_path: Path, task_dirs: list[Path]) -> None:
    schema = pa.schema([("path", pa.large_string()), ("task_binary", pa.large_binary()), ("extra", pa.int64())])
    row = {"path": "train/x-0001", "task_binary": pack(task_dirs[0]), "extra": 1}
    pq.write_table(pa.Table.from_pylist([row], schema=schema), tmp_path / "one.parquet")
    assert [(packed.row, packed.id) for packed in read_packages(tmp_path / "one.parquet")] == [(0, "x-0001")]


@pytest.mark.parametrize("path", ["/etc/x", "../x", "a/../b", "", ".", ".hidden", "a\\b", None])
def test_a_row_whose_path_leaves_the_set_is_refused(tmp_path: Path, path: str | None) -> None:
    schema = pa.schema([("path", pa.string()), ("task_binary", pa.binary())])
    pq.write_table(pa.Table.from_pylist([{"path": path, "task_binary": b""}], schema=schema), tmp_path / "x.parquet")
    with pytest.raises(TaskError, match=r"x\.parquet: row 0: path .* must be relative"):
        list(read_packages(tmp_path / "x.parquet"))


def test_a_foreign_file_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "text.parquet").write_text("no parquet")
    with pytest.raises(TaskError, match=r"text\.parquet: not a Parquet file"):
        list(read_packages(tmp_path / "text.parquet"))
    with pytest.raises(TaskError, match="no such file"):
        list(read_packages(tmp_path / "none.parquet"))
    with pytest.raises(TaskError, match="column task_binary is missing"):
        list(read_packages(write_rows(tmp_path / "a.parquet", [{"path": "a"}])))
    with pytest.raises(TaskError, match="column task_binary is string"):
        list(read_packages(write_rows(tmp_path / "b.parquet", [{"path": "a", "task_binary": "text"}])))


def test_two_tasks_of_one_id_are_refused(tmp_path: Path) -> None:
    rows = [{"path": path, "task_binary": b""} for path in ("x/a", "y/a")]
    with pytest.raises(TaskError, match="row 1: a second task 'a'"):
        list(read_packages(write_rows(tmp_path / "a.parquet", rows)))


def test_a_bad_archive_is_named_by_file_and_row(tmp_path: Path, task_dirs: list[Path]) -> None:
    rows = [{"path": "a", "task_binary": pack(task_dirs[0])}, {"path": "b", "task_binary": b"nonsense"}]
    with pytest.raises(TaskError, match=r"a\.parquet: row 1 \(b\): not a readable tar archive"):
        unpack_packages(write_rows(tmp_path / "a.parquet", rows), tmp_path / "out")


def test_tasks_of_a_recipe_may_be_a_parquet_file(tmp_path: Path, task_dirs: list[Path]) -> None:
    package = tmp_path / "set.parquet"
    write_packages(task_dirs, package)
    tasks = resolve_tasks(f"{package}[1:3]", cache_dir=tmp_path / "cache")
    assert [task.id for task in tasks] == ["b", "c"]
    assert resolve_tasks(f"{package}[1:3]", cache_dir=tmp_path / "cache") == tasks  # unpacked once
    assert len(list((tmp_path / "cache").iterdir())) == 1
    write_packages(task_dirs[:1], package)
    assert [task.id for task in resolve_tasks(str(package), cache_dir=tmp_path / "cache")] == ["a"]


@pytest.fixture
def registry(tmp_path: Path, task_dirs: list[Path]) -> Path:
    def tasks(*names: str) -> list[dict[str, str]]:
        return [{"name": name, "path": f"set/{name}"} for name in names]

    elsewhere = [{"name": "x", "git_url": "https://git.example/r", "git_commit_id": "abc", "path": "x"}]
    entries = [
        {"name": "core", "version": "1.0", "description": "", "tasks": tasks("a", "b")},
        {"name": "core", "version": "2.0", "description": "", "tasks": tasks("c")},
        {"name": "one", "version": "1.0", "description": "", "tasks": tasks("a")},
        {"name": "remote", "version": "1.0", "description": "", "tasks": elsewhere},
        {"name": "lost", "version": "1.0", "description": "", "tasks": tasks("zzz")},
    ]
    (tmp_path / "registry.json").write_text(json.dumps(entries))
    return tmp_path / "registry.json"


def test_an_entry_of_a_registry_is_a_set(registry: Path) -> None:
    assert [task.id for task in resolve_tasks(f"{registry}:core@1.0")] == ["a", "b"]
    assert [task.id for task in resolve_tasks(f"{registry}:core@1.0[1:]")] == ["b"]
    assert [task.id for task in resolve_tasks(f"{registry}:one")] == ["a"]


@pytest.mark.parametrize(
    ("selector", "words"),
    [
        ("core", "2 entries are 'core'; name one of core@1.0, core@2.0"),
        ("core@3.0", "0 entries are 'core@3.0'; name one of core@1.0, core@2.0"),
        ("remote", "task x lies in https://git.example/r; clone it (at abc)"),
        ("lost", "task zzz: no directory"),
    ],
)
def test_an_entry_that_is_not_here_is_refused(registry: Path, selector: str, words: str) -> None:
    with pytest.raises(TaskError) as caught:
        registry_task_dirs(registry, selector)
    assert words in str(caught.value)


def manifest(directory: Path, digest: str) -> Path:
    text = f'[dataset]\nname = "org/set"\n\n[[tasks]]\nname = "org/a"\ndigest = "{digest}"\n'
    (directory / "dataset.toml").write_text(text)
    return directory / "dataset.toml"


def test_a_dataset_names_tasks_by_the_digest_of_their_files(tmp_path: Path, task_dirs: list[Path]) -> None:
    files = {"instruction.md": b"Do it\n", "solution/solve.sh": b"echo done\n"}
    files |= {"task.toml": (task_dirs[0] / "task.toml").read_bytes()}
    files |= {"tests/test.sh": (task_dirs[0] / "tests" / "test.sh").read_bytes()}
    lines = "".join(f"{name}\0{hashlib.sha256(data).hexdigest()}\n" for name, data in sorted(files.items()))
    digest = f"sha256:{hashlib.sha256(lines.encode()).hexdigest()}"
    (task_dirs[0] / "tests" / "__pycache__").mkdir()
    (task_dirs[0] / "tests" / "__pycache__" / "x.pyc").touch()
    assert content_digest(task_dirs[0]) == digest
    assert [task.id for task in resolve_tasks(str(manifest(tmp_path / "set", digest)))] == ["a"]


def test_a_dataset_whose_task_was_changed_is_refused(tmp_path: Path, task_dirs: list[Path]) -> None:
    path = manifest(tmp_path / "set", content_digest(task_dirs[0]))
    (task_dirs[0] / "instruction.md").write_text("Do something else\n")
    with pytest.raises(TaskError, match=r"task org/a: .* has digest sha256:.*, not sha256:"):
        dataset_task_dirs(path)
    with pytest.raises(TaskError, match=r'want name "org/name" and digest'):
        dataset_task_dirs(manifest(tmp_path / "set", "md5:0"))


def test_a_set_with_a_task_that_no_episode_plays_is_refused_before_work(tmp_path: Path) -> None:
    make_task_dir(tmp_path, "a", toml='[environment]\nskills_dir = "/skills"\n')
    with pytest.raises(TaskError, match=r"task a: environment\.skills_dir is not played yet"):
        resolve_tasks(str(tmp_path))
