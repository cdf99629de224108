"""`python -m recipes.tasks`: what check says of good and bad sets, and the way there and back of convert."""

from pathlib import Path

import pytest

from envs.errors import TaskError
from envs.packages import write_packages
from envs.unpack import pack
from recipes.tasks import Check, Config, List, check, convert, main
from tests.envs.task_dirs import make_task_dir


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    for name in ("a", "b"):
        make_task_dir(tmp_path / "set", name)
    return tmp_path / "set"


def test_a_good_set_is_counted_with_its_rate(tasks: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(str(tasks))
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(f"{tasks}: 2 tasks, 0 malformed; checked in ")
    assert line.endswith(" a second")


async def test_every_malformed_task_gets_its_line_and_the_exit_code_is_1(tasks: Path, capsys) -> None:
    (make_task_dir(tasks, "bad", toml="agent = 3") / "README.md").touch()
    (make_task_dir(tasks, "worse") / "instruction.md").unlink()
    with pytest.raises(SystemExit) as stop:
        await main(Config(do=Check(source=str(tasks))))
    assert stop.value.code == 1
    errors = [line for line in capsys.readouterr().out.splitlines() if line.startswith("error: ")]
    assert errors == [
        f"error: {tasks}/bad/task.toml: agent must be a table, got 3",
        f"error: {tasks}/worse/instruction.md: no such file; write the instruction there",
    ]


def test_unknown_keys_and_what_no_episode_plays_are_notes(tasks: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("x", "y"):
        make_task_dir(tasks, name, toml='future = 1\n[environment]\nskills_dir = "/skills"\n')
    assert check(str(tasks))
    assert [line for line in capsys.readouterr().out.splitlines() if line.startswith("note: ")] == [
        "note: environment.skills_dir is not played yet: 2 tasks, x first",
        "note: unknown key future of task.toml ignored: 2 tasks, x first",
    ]


def test_a_package_is_checked_row_by_row(tasks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = make_task_dir(tmp_path, "bad", toml="agent = 3")
    package = tmp_path / "set.parquet"
    write_packages([tasks / "a", bad], package)
    assert not check(str(package))
    first, last = capsys.readouterr().out.splitlines()
    assert first == f"error: {package}: row 1 (bad)/task.toml: agent must be a table, got 3"
    assert last.startswith(f"{package}: 2 tasks, 1 malformed")


def test_convert_goes_to_parquet_and_back(tasks: Path, tmp_path: Path) -> None:
    convert(str(tasks), tmp_path / "set.parquet")
    convert(str(tmp_path / "set.parquet"), tmp_path / "again")
    assert [pack(tmp_path / "again" / name) for name in ("a", "b")] == [pack(tasks / name) for name in ("a", "b")]


def test_convert_refuses_a_malformed_task_and_a_directory_that_exists(tasks: Path, tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="exists already"):
        convert(str(tasks), tasks)
    (tasks / "b" / "tests" / "test.sh").unlink()
    for target in ("set.parquet", "copy"):
        with pytest.raises(TaskError, match=r"b/tests/test\.sh: no such file"):
            convert(str(tasks), tmp_path / target)
        assert not (tmp_path / target).exists()
    assert [path.name for path in tmp_path.iterdir()] == ["set"]


async def test_list_prints_a_line_for_each_task(tasks: Path, capsys: pytest.CaptureFixture[str]) -> None:
    await main(Config(do=List(source=str(tasks), limit=1)))
    assert capsys.readouterr().out == "a  Dockerfile  no-network  no limit  1 step  Do it\n"
