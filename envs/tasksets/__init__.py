"""Task sets by name: what `--tasks` of a recipe means.

Invariant: a generated or unpacked set is written once, whole or not at all, under a name that its parameters and the
source of its generator (or the bytes of its package) decide, so a cached set is never stale. Called by recipes.
"""

import hashlib
import os
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from envs.errors import TaskError
from envs.harbor import find_task_dirs, load_task, log_ignored_keys
from envs.packages import unpack_packages
from envs.playable import refuse_unplayable
from envs.registry import dataset_task_dirs, registry_task_dirs
from envs.task import Task
from envs.tasksets import humaneval, shell, shell_families

NAMED_SETS = "shell:train, shell:heldout, either with :easy, :hard or :FAMILY,FAMILY after it, and humaneval"
DEFAULT_COUNTS = {"train": 3000, "heldout": 600}
"""How many tasks a shell split has unless asked otherwise."""

PATHS = "a directory of Harbor tasks, a .parquet of task packages, a dataset.toml, or registry.json:NAME@VERSION"

_REGISTRY = re.compile(r"(.+\.json):([^:]+)")
_SLICE = re.compile(r"\[(\d*):(\d*)\]$")


def resolve_tasks(
    spec: str, *, cache_dir: Path | None = None, limit: int | None = None, count: int | None = None, seed: int = 0
) -> list[Task]:
    """The Tasks of `shell:SPLIT`, `shell:SPLIT:FAMILIES`, `humaneval`, or of what PATHS lists.

    A slice may follow: "shell:train[100:300]" is the tasks 100 to 299 of the set, and `limit` keeps the first so many.
    `count` and `seed` are those of the shell set. Raises TaskError, also when no task is left or one cannot be played.
    """
    if limit is not None and limit < 1:
        raise TaskError(f"tasks {spec!r}: limit must be >= 1, got {limit}")
    found = _SLICE.search(spec)
    base = spec[: found.start()] if found else spec
    start, stop = (int(found[1] or 0), int(found[2]) if found[2] else None) if found else (0, None)
    if limit is not None:
        stop = start + limit if stop is None else min(stop, start + limit)
    if stop is not None and stop <= start:
        raise TaskError(f"tasks {spec!r}: the slice is empty; its end must be above its start")
    paths = locate_tasks(base, cache_dir=cache_dir, count=count, seed=seed)
    if start >= len(paths):
        raise TaskError(f"tasks {spec!r}: {base} ends before task {start}; start the slice lower")
    tasks = [load_task(path) for path in paths[start:stop]]
    log_ignored_keys(spec, tasks)
    for task in tasks:
        refuse_unplayable(task)
    return tasks


def locate_tasks(spec: str, *, cache_dir: Path | None = None, count: int | None = None, seed: int = 0) -> list[Path]:
    """The task directories of a set without slice, generated or unpacked where they have to be; not read yet.

    Raises TaskError when there are none, or two of one name.
    """
    paths = _locate(spec, cache_dir or default_cache_dir(), count, seed)
    if not paths:
        raise TaskError(f"{spec}: holds no task; each task is a sub-directory with task.toml and instruction.md")
    twice = [name for name, number in Counter(path.name for path in paths).items() if number > 1]
    if twice:
        raise TaskError(f"{spec}: {len(twice)} ids come twice, {twice[0]!r} first; rename their directories")
    return paths


def default_cache_dir() -> Path:
    """Where generated sets are kept between runs: under $THRESHER_CACHE, or under .cache in the working directory."""
    return Path(os.environ.get("THRESHER_CACHE", ".cache")).absolute() / "tasks"


def _locate(spec: str, cache_dir: Path, count: int | None, seed: int) -> list[Path]:
    name, *rest = spec.split(":")
    if name == "shell":
        return find_task_dirs(_shell_set(spec, rest, cache_dir, count, seed))
    if spec == "humaneval":
        return find_task_dirs(_cached(cache_dir, "humaneval", _version(humaneval), humaneval.write_task_set))
    path = Path(spec)
    if path.is_dir():
        return find_task_dirs(path)
    if path.suffix == ".parquet" and path.is_file():
        return find_task_dirs(_unpacked(path, cache_dir))
    if path.suffix == ".toml" and path.is_file():
        return dataset_task_dirs(path)
    found = _REGISTRY.fullmatch(spec)
    if found and Path(found[1]).is_file():
        return registry_task_dirs(Path(found[1]), found[2])
    raise TaskError(f"tasks {spec!r}: neither {PATHS}, nor a task set; the sets are {NAMED_SETS}")


def _unpacked(path: Path, cache_dir: Path) -> Path:
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return _cached(cache_dir, f"package-{path.stem}", digest[:24], lambda target: unpack_packages(path, target))


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
