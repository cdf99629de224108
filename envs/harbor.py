"""Harbor task directories read into Tasks.

Invariant: what is returned can be run as it stands; a directory that asks for what we do not offer yet is refused, in
one line that names the path, the fault and the remedy. Unknown keys are ignored, as in Harbor's own reader.
Called by envs/tasksets and recipes before any work starts. Schema: Harbor 1.4 with its legacy forms.
"""

import os
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from envs.errors import TaskError
from envs.task import Environment, Limits, Provenance, Task, VerifierSpec

_COMPOSE_FILES = ("docker-compose.yaml", "docker-compose.yml", "singularity-compose.yaml")
_NETWORK_MODES = ("public", "no-network", "allowlist")
_MB_PER_UNIT = {"G": 1024.0, "M": 1.0, "K": 1 / 1024}


def load_tasks(directory: Path | str, *, limit: int | None = None, names: Collection[str] | None = None) -> list[Task]:
    """The Tasks of a directory, sorted by name; a directory that is itself a task gives that one.

    Children with neither task.toml nor instruction.md are no tasks and are passed over; every other child must load.
    `names` keeps those ids only and each must exist; `limit` keeps the first so many. Raises TaskError.
    """
    root = Path(directory)
    if not root.is_dir():
        raise TaskError(f"{root}: no such directory; give a Harbor task directory or a directory of them")
    paths = [root] if _is_task(root) else sorted(child for child in root.iterdir() if _is_task(child))
    if names is not None:
        missing = sorted(set(names) - {path.name for path in paths})
        if missing:
            raise TaskError(f"{root}: no task named {', '.join(missing)}; list the directory to see what it holds")
        paths = [path for path in paths if path.name in names]
    tasks = [load_task(path) for path in paths[:limit]]
    if not tasks:
        raise TaskError(f"{root}: holds no task; each task is a sub-directory with task.toml and instruction.md")
    return tasks


def load_task(path: Path | str) -> Task:
    """The Task of one Harbor task directory. Raises TaskError, one line."""
    root = Path(path).absolute()
    if not root.is_dir():
        raise TaskError(f"{root}: no such directory; give a Harbor task directory")
    toml_path = root / "task.toml"
    try:
        settings = _parse_settings(_read_text(toml_path, "a task needs one, and an empty file will do"))
    except _Fault as fault:
        raise TaskError(f"{toml_path}: {' '.join(str(fault).split())}") from None
    _check_files(root, has_image=settings.environment.docker_image is not None)
    return Task(
        id=root.name,
        instruction=_read_instruction(root / "instruction.md"),
        environment=settings.environment,
        verifier=settings.verifier,
        limits=settings.limits,
        provenance=settings.provenance,
        path=root,
    )


class _Fault(Exception):
    """What is wrong in a task.toml, before the path is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Settings:
    """What a task.toml says."""

    environment: Environment
    verifier: VerifierSpec
    limits: Limits
    provenance: Provenance


def _is_task(path: Path) -> bool:
    return (path / "task.toml").exists() or (path / "instruction.md").exists()


def _read_text(path: Path, remedy: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        raise TaskError(f"{path}: no such file; {remedy}") from None
    except UnicodeDecodeError as error:
        raise TaskError(f"{path}: not UTF-8 at byte {error.start}; save it as UTF-8") from None
    except OSError as error:
        raise TaskError(f"{path}: cannot be read ({error.strerror}); check its permissions") from None


def _read_instruction(path: Path) -> str:
    """The instruction without its leading canary comments."""
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


def _check_files(root: Path, *, has_image: bool) -> None:
    environment, tests = root / "environment", root / "tests"
    if not has_image and not environment.is_dir():
        raise TaskError(f"{environment}: no such directory; add it with a Dockerfile, or set environment.docker_image")
    if (link := _find_link(str(tests))) is not None:
        raise TaskError(f"{link}: is a symbolic link, which no sandbox uploads; put the file itself there")
    if not (tests / "test.sh").is_file():
        raise TaskError(f"{tests / 'test.sh'}: no such file; add the script that writes /logs/verifier/reward.txt")
    for name in _COMPOSE_FILES:
        if (environment / name).exists():
            raise TaskError(f"{environment / name}: compose is not supported yet; use a single Dockerfile")
    if (root / "trajectory.json").exists():
        raise TaskError(f"{root / 'trajectory.json'}: a prior trajectory is not supported yet; remove the file")


def _find_link(path: str) -> str | None:
    """The first symbolic link at or under `path`."""
    if os.path.islink(path):
        return path
    if not os.path.isdir(path):
        return None
    with os.scandir(path) as entries:
        found = [entry.path for entry in entries if entry.is_symlink() or entry.is_dir()]
    return next(filter(None, map(_find_link, sorted(found))), None)


# Generated sets repeat a few files thousands of times, and tomllib is pure Python.
@lru_cache(maxsize=256)
def _parse_settings(text: str) -> _Settings:
    try:
        root = _Table("", tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise _Fault(f"not valid TOML: {error}; correct that line") from None
    version = root.text("schema_version") or root.text("version") or "1.4"
    if version.split(".")[0] != "1":
        raise _Fault(f"schema_version {version!r} is unknown; use 1.4")
    agent, environment = root.table("agent"), root.table("environment")
    _refuse_unsupported(root, agent, environment)
    return _Settings(
        environment=_environment(environment),
        verifier=_verifier(root.table("verifier")),
        limits=Limits(agent_timeout_s=agent.number("timeout_sec")),
        provenance=_provenance(root),
    )


def _refuse_unsupported(root: "_Table", agent: "_Table", environment: "_Table") -> None:
    """Refuses what would change the meaning of the Task if it were passed over."""
    root.refuse("steps", "artifacts")
    root.table("solution").refuse("env")
    agent.refuse("user", "allowed_hosts")
    environment.refuse("gpus", "gpu_types", "tpu", "mcp_servers", "skills_dir", "healthcheck", "allowed_hosts")
    if (system := environment.text("os")) not in (None, "linux"):
        raise _Fault(f"environment.os {system!r} is not supported; only linux is")
    mode = agent.text("network_mode")
    if mode is not None and mode != _network_mode(environment):
        raise _Fault("agent.network_mode differs from environment.network_mode, which is not supported yet; drop it")


def _environment(table: "_Table") -> Environment:
    defaults = Environment()
    timeout_s = table.number("build_timeout_sec")
    return Environment(
        docker_image=table.text("docker_image"),
        workdir=table.text("workdir"),
        cpus=table.number("cpus"),
        memory_mb=_megabytes(table, "memory"),
        storage_mb=_megabytes(table, "storage"),
        env=table.variables("env"),
        network_mode=_network_mode(table),
        build_timeout_s=defaults.build_timeout_s if timeout_s is None else timeout_s,
    )


def _network_mode(table: "_Table") -> str:
    mode, legacy = table.text("network_mode"), table.values.get("allow_internet")
    if legacy is not None and not isinstance(legacy, bool):
        raise _Fault(f"environment.allow_internet must be true or false, got {legacy!r}")
    if mode is None:
        return "no-network" if legacy is False else "public"
    if mode not in _NETWORK_MODES:
        raise _Fault(f"environment.network_mode must be one of {', '.join(_NETWORK_MODES)}, got {mode!r}")
    return mode


def _megabytes(table: "_Table", name: str) -> int | None:
    """The value of `<name>_mb`, or of the legacy `<name>` such as "2G"; both must agree."""
    number, text = table.number(f"{name}_mb"), table.text(name)
    current = None if number is None else int(number)
    if text is None:
        return current
    digits, factor = text[:-1], _MB_PER_UNIT.get(text[-1:].upper())
    if factor is None or not digits.replace(".", "", 1).isdigit():
        raise _Fault(f"environment.{name} must be like 2G, 512M or 1024K, got {text!r}; or set {name}_mb")
    legacy = int(float(digits) * factor)
    if current is not None and current != legacy:
        raise _Fault(f"environment.{name} {text!r} contradicts {name}_mb {current}; keep {name}_mb")
    return legacy


def _verifier(table: "_Table") -> VerifierSpec:
    table.refuse("user", "network_mode", "allowed_hosts", "environment", "collect")
    if (mode := table.text("environment_mode")) not in (None, "shared"):
        raise _Fault(f"verifier.environment_mode {mode!r} is not supported yet; only shared is")
    timeout_s = table.number("timeout_sec")
    return VerifierSpec(
        timeout_s=VerifierSpec().timeout_s if timeout_s is None else timeout_s, env=table.variables("env")
    )


def _provenance(root: "_Table") -> Provenance:
    """Where the Task came from; metadata is free in Harbor, so only strings of the names we know are taken."""
    metadata = {key: value for key, value in root.table("metadata").values.items() if isinstance(value, str)}
    return Provenance(
        source=root.text("source") or metadata.get("source", ""),
        licence=metadata.get("licence", metadata.get("license", "")),
        parent=metadata.get("parent", ""),
        family=metadata.get("family", ""),
        split=metadata.get("split", ""),
    )


class _Table:
    """A table of task.toml whose values are checked as they are read."""

    def __init__(self, name: str, values: Mapping[str, Any]) -> None:
        self.name = name
        self.values = values

    def table(self, key: str) -> "_Table":
        value = self.values.get(key, {})
        if not isinstance(value, dict):
            raise _Fault(f"{self._path(key)} must be a table, got {value!r}")
        return _Table(key, value)  # pyright: ignore[reportUnknownArgumentType]

    def text(self, key: str) -> str | None:
        value = self.values.get(key)
        if value is not None and not isinstance(value, str):
            raise _Fault(f"{self._path(key)} must be a string, got {value!r}")
        return value

    def number(self, key: str) -> float | None:
        value = self.values.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise _Fault(f"{self._path(key)} must be a number above 0, got {value!r}")
        return float(value)

    def variables(self, key: str) -> dict[str, str]:
        table = self.table(key)
        for name, value in table.values.items():
            if not isinstance(value, str):
                raise _Fault(f"{self._path(key)}.{name} must be a string, got {value!r}; quote it")
            if "${" in value:
                raise _Fault(f"{self._path(key)}.{name}: host variables are not supported yet; write the value itself")
        return dict(table.values)

    def refuse(self, *keys: str) -> None:
        """Faults on the first of these keys that asks for something; false, 0 and empty ask for nothing."""
        for key in keys:
            if self.values.get(key):
                raise _Fault(f"{self._path(key)} is not supported yet; remove it, or leave this task out")

    def _path(self, key: str) -> str:
        return f"{self.name}.{key}" if self.name else key
