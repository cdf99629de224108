"""Harbor task directories read into Tasks.

Invariant: what is returned holds all that the directory says, single-step or multi-step; a malformed directory is
refused in one line that names the path, the fault and the remedy. Unknown keys are ignored, as in Harbor's own reader,
and said once for a set. Whether a Task can be played here is for envs/playable.py and the provider to say.
Called by envs/tasksets and recipes/tasks. Schema: Harbor 1.4 with its legacy forms.
"""

import logging
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from envs.errors import TaskError
from envs.task import Step, Task
from envs.task_toml import Settings, StepSettings, parse_settings
from envs.toml_table import Fault

logger = logging.getLogger(__name__)

_COMPOSE_FILES = ("docker-compose.yaml", "docker-compose.yml", "singularity-compose.yaml")
_SCRIPT_ENDINGS = {"linux": ".sh", "windows": ".bat"}


def find_task_dirs(root: Path) -> list[Path]:
    """The task directories that `root` holds, sorted, or `root` itself where it is one; they may be malformed.

    Children with neither task.toml nor instruction.md are no tasks and are passed over. Raises TaskError.
    """
    if not root.is_dir():
        raise TaskError(f"{root}: no such directory; give a Harbor task directory or a directory of them")
    return [root] if _is_task(root) else sorted(child for child in root.iterdir() if _is_task(child))


def log_ignored_keys(where: Path | str, tasks: Sequence[Task]) -> None:
    """One line with the keys of the Tasks' task.toml files that mean nothing, and how many Tasks have each."""
    counts = Counter(key for task in tasks for key in task.ignored_keys)
    if counts:
        listed = ", ".join(f"{key} ({count})" for key, count in sorted(counts.items()))
        logger.warning("tasks=%s unknown keys of task.toml ignored (tasks that have them): %s", where, listed)


def load_task(path: Path | str) -> Task:
    """The Task of one Harbor task directory. Raises TaskError, one line."""
    root = Path(path).absolute()
    if not root.is_dir():
        raise TaskError(f"{root}: no such directory; give a Harbor task directory")
    toml_path = root / "task.toml"
    try:
        settings = parse_settings(_read_text(toml_path, "a task needs one, and an empty file will do"))
    except Fault as fault:
        raise TaskError(f"{toml_path}: {' '.join(str(fault).split())}") from None
    _check_files(root, settings)
    steps = tuple(_read_step(root / "steps" / step.name, step) for step in settings.steps)
    return Task(
        id=root.name,
        instruction=_read_instruction(root / "instruction.md", is_optional=bool(steps)),
        environment=settings.environment,
        verifier=settings.verifier,
        limits=settings.limits,
        provenance=settings.provenance,
        path=root,
        agent=settings.agent,
        solution_env=settings.solution_env,
        steps=steps,
        step_rewards=settings.step_rewards,
        artifacts=settings.artifacts,
        publication=settings.publication,
        compose_file=next((name for name in _COMPOSE_FILES if (root / "environment" / name).exists()), None),
        has_prior_trajectory=(root / "trajectory.json").exists(),
        metadata=settings.metadata,
        ignored_keys=settings.ignored_keys,
    )


def _is_task(path: Path) -> bool:
    return (path / "task.toml").exists() or (path / "instruction.md").exists()


def _read_step(path: Path, settings: StepSettings) -> Step:
    return Step(
        name=settings.name,
        instruction=_read_instruction(path / "instruction.md"),
        agent=settings.agent,
        verifier=settings.verifier,
        limits=settings.limits,
        min_reward=settings.min_reward,
        healthcheck=settings.healthcheck,
        artifacts=settings.artifacts,
    )


def _read_text(path: Path, remedy: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        raise TaskError(f"{path}: no such file; {remedy}") from None
    except UnicodeDecodeError as error:
        raise TaskError(f"{path}: not UTF-8 at byte {error.start}; save it as UTF-8") from None
    except OSError as error:
        raise TaskError(f"{path}: cannot be read ({error.strerror}); check its permissions") from None


def _read_instruction(path: Path, *, is_optional: bool = False) -> str:
    """The instruction without its leading canary comments."""
    if is_optional and not path.exists():
        return ""
    lines = _read_text(path, "write the instruction there").splitlines(keepends=True)
    first = 0
    while first < len(lines) and _is_canary(lines[first]):
        first += 1
    text = "".join(lines[first:]).strip()
    if not text:
        raise TaskError(f"{path}: empty; write the instruction there")
    return text


def _is_canary(line: str) -> bool:
    return line.lstrip().startswith(("<!--", "#")) and "canary" in line.lower()


def _check_files(root: Path, settings: Settings) -> None:
    environment = root / "environment"
    if settings.environment.docker_image is None and not environment.is_dir():
        raise TaskError(f"{environment}: no such directory; add it with a Dockerfile, or set environment.docker_image")
    for name in ("tests", "steps") if settings.steps else ("tests",):
        if (link := _find_link(str(root / name))) is not None:
            raise TaskError(f"{link}: is a symbolic link, which no sandbox uploads; put the file itself there")
    script = f"test{_SCRIPT_ENDINGS[settings.environment.os]}"
    shared = root / "tests" / script
    for folder in [root / "steps" / step.name / "tests" for step in settings.steps] or [root / "tests"]:
        if not (folder / script).is_file() and not shared.is_file():
            raise TaskError(f"{folder / script}: no such file; add the script that writes /logs/verifier/reward.txt")


def _find_link(path: str) -> str | None:
    """The first symbolic link at or under `path`."""
    if os.path.islink(path):
        return path
    if not os.path.isdir(path):
        return None
    with os.scandir(path) as entries:
        found = [entry.path for entry in entries if entry.is_symlink() or entry.is_dir()]
    return next(filter(None, map(_find_link, sorted(found))), None)
