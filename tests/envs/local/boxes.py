"""Tasks and providers for the tests of the local sandbox."""

import os
from pathlib import Path
from typing import Any

from envs.lease import this_holder
from envs.local.provider import LocalConfig, LocalProvider
from envs.task import Environment, Limits, Provenance, Task, VerifierSpec

IS_ROOT = os.geteuid() == 0
SMALL: dict[str, Any] = {"memory_mb": 256, "storage_mb": 64}


def make_task(path: Path = Path("/nonexistent"), **environment: Any) -> Task:
    """A Task with this environment; without `path` it has no files."""
    return Task(
        id="t",
        instruction="Do it",
        environment=Environment(**environment),
        verifier=VerifierSpec(),
        limits=Limits(),
        provenance=Provenance(),
        path=path,
    )


def make_provider(**config: Any) -> LocalProvider:
    """With soft limits where no cgroups can be written, which is what an unprivileged user must opt in to.

    No box is started ahead, as tests count what there is.
    """
    soft = {} if IS_ROOT else {"allow_soft_limits": True, "soft_max_processes": 300}
    return LocalProvider(LocalConfig(**{"max_processes": 128, "network": "none", "max_warm": 0, **soft, **config}))


async def own_leases(provider: LocalProvider) -> list[str]:
    """Owners of the leases that this process holds; others on this machine have theirs."""
    return [each.lease.owner for each in await provider.list_leases() if each.lease.holder == this_holder()]
