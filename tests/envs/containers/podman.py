"""A podman that works here: as root, with runc and control groups of its own making, and with no registry."""

import subprocess
from pathlib import Path
from typing import Any

from envs.containers.engine import EngineName
from envs.containers.provider import ContainerConfig, ContainerProvider
from envs.lease import LeaseTerms
from tests.envs.containers.base_image import import_base_image

SCRIPT = Path(__file__).parents[3] / "scripts" / "podman.sh"
ENGINE_ARGS = ("--cgroup-manager=cgroupfs", "--runtime=runc")
RUN_ARGS = ("--ulimit=nproc=4096:4096",)
_DEFAULTS: dict[str, Any] = {
    "engine_args": ENGINE_ARGS,
    "run_args": RUN_ARGS,
    "build_args": ("--network=none",),
    "network": "none",
}


def install_podman() -> str:
    """Installs podman where it is missing, and returns the name of the test image."""
    subprocess.run(["bash", str(SCRIPT)], check=True, timeout=300)
    return import_base_image("podman", ENGINE_ARGS)


def make_podman(image: str, *, run: str = "test", **config: Any) -> ContainerProvider:
    chosen = ContainerConfig(**{**_DEFAULTS, "image": image, **config})
    return ContainerProvider(EngineName.PODMAN, chosen, terms=LeaseTerms(run=run))
