"""Small Harbor task directories for tests."""

from collections.abc import Collection
from pathlib import Path

from envs.harbor import find_task_dirs, load_task
from envs.task import Task

NO_NETWORK = '[environment]\nnetwork_mode = "no-network"\n'
PASSING_TEST = "echo looked at it\necho 1 >/logs/verifier/reward.txt\n"


def make_task_dir(root: Path, name: str = "a-task", *, toml: str = NO_NETWORK, test_sh: str = PASSING_TEST) -> Path:
    """A valid task directory: an instruction, an empty environment and a test script."""
    path = root / name
    for folder in ("environment", "tests", "solution"):
        (path / folder).mkdir(parents=True)
    (path / "task.toml").write_text(toml)
    (path / "instruction.md").write_text("Do it\n")
    (path / "tests" / "test.sh").write_text(test_sh)
    (path / "solution" / "solve.sh").write_text("echo done\n")
    return path


def load_tasks(root: Path, *, names: Collection[str] = ()) -> list[Task]:
    """The Tasks that a directory holds, sorted; only those of `names` where it is given."""
    tasks = [load_task(path) for path in find_task_dirs(root) if not names or path.name in names]
    assert tasks and len(tasks) >= len(names)
    return tasks
