"""Task sets by name: what `--tasks` of a recipe means.

Invariant: a generated set is written once, whole or not at all, under a name that its parameters and the source of its
generator decide, so a cached set is never stale. Called by recipes.
"""

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from envs.errors import TaskError
from envs.harbor import load_tasks
from envs.task import Task
from envs.tasksets import humaneval, shell, shell_families

NAMED_SETS = "shell:train, shell:heldout, either with :easy, :hard or :FAMILY,FAMILY after it, and humaneval"
DEFAULT_COUNTS = {"train": 3000, "heldout": 600}
"""How many tasks a shell split has unless asked otherwise."""


def resolve_tasks(
    spec: str, *, cache_dir: Path, limit: int | None = None, count: int | None = None, seed: int = 0
) -> list[Task]:
    """The Tasks of `shell:SPLIT`, `shell:SPLIT:FAMILIES`, `humaneval`, or of a directory of Harbor tasks.

    `count` and `seed` are those of the shell set; `limit` keeps the first so many of any set. Raises TaskError.
    """
    name, *rest = spec.split(":")
    if name == "shell":
        directory = _shell_set(spec, rest, cache_dir, count, seed)
    elif spec == "humaneval":
        directory = _cached(cache_dir, "humaneval", _version(humaneval), humaneval.write_task_set)
    elif Path(spec).exists():
        directory = Path(spec)
    else:
        raise TaskError(f"tasks {spec!r}: neither a directory nor a task set; the sets are {NAMED_SETS}")
    return load_tasks(directory, limit=limit)


def _shell_set(spec: str, rest: list[str], cache_dir: Path, count: int | None, seed: int) -> Path:
    if not 1 <= len(rest) <= 2 or rest[0] not in shell.SPLITS:
        raise TaskError(f"tasks {spec!r}: no such shell set; the sets are {NAMED_SETS}")
    split, families = rest[0], _families(rest[1] if len(rest) == 2 else "easy")
    size = DEFAULT_COUNTS[split] if count is None else count

    def write(directory: Path) -> None:
        try:
            shell.write_task_set(directory, split=split, count=size, seed=seed, families=families)
        except ValueError as error:
            raise TaskError(f"tasks {spec!r}: {error}") from None

    version = _version(shell, shell_families, ",".join(families))
    return _cached(cache_dir, f"shell-{split}-{size}-{seed}", version, write)


def _families(text: str) -> tuple[str, ...]:
    named = {"easy": shell_families.EASY_FAMILIES, "hard": shell_families.HARD_FAMILIES}
    return named.get(text) or tuple(text.split(","))


def _version(*parts: object) -> str:
    """A digest of the sources of these modules, and of these strings."""
    digest = hashlib.sha256()
    for part in parts:
        source = getattr(part, "__file__", None)
        digest.update(Path(source).read_bytes() if source else str(part).encode())
    return digest.hexdigest()[:12]


def _cached(cache_dir: Path, name: str, version: str, write: Callable[[Path], object]) -> Path:
    """The directory of this set and version, written now if it is not there yet."""
    target = cache_dir / f"{name}-{version}"
    if target.is_dir():
        return target
    cache_dir.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=cache_dir))
    try:
        write(draft)
        draft.chmod(0o755)
        os.rename(draft, target)
    except OSError:
        if not target.is_dir():
            raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return target
