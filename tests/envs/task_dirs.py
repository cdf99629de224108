"""Small Harbor task directories for tests."""

from pathlib import Path

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
