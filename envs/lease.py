"""Leases: who holds a Sandbox, for which run, and until when.

Invariant: every Sandbox of every provider carries a Lease that outlives its driver, so that anybody can tell later
whether it may be removed: its time is over, or the process that held it is gone from this machine.
Written by the providers (envs/local, envs/containers, envs/daytona); swept by them and by recipes/sandboxes.py.
"""

import asyncio
import functools
import hashlib
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from envs.local.labels import start_time

LABEL = "thresher.run"
"""Present on everything of this project that carries a Lease."""
_REMOVED_AT_ONCE = 8
"""A service takes about 0.1 s for each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseTerms:
    """What the Leases of one provider have in common."""

    run: str = "unnamed"
    """Name of the run directory."""
    duration_s: float = 4 * 3600.0
    """A Sandbox older than this may be removed by anyone; longer than any rollout."""

    def __post_init__(self) -> None:
        if self.duration_s <= 0:
            raise ValueError(f"duration_s must be > 0, got {self.duration_s}")

    def lease(self, owner: str) -> "Lease":
        """A Lease from now on, held by this process."""
        return Lease(run=self.run, owner=owner, expires_at=time.time() + self.duration_s, holder=this_holder())


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """The hold of one process on one Sandbox."""

    run: str
    owner: str
    """What it is for: a trajectory id."""
    expires_at: float
    """Unix time in seconds."""
    holder: str
    """machine.pid.start of the process; see `this_holder`."""

    def labels(self) -> dict[str, str]:
        """The Lease as labels of a container or a remote sandbox."""
        return {
            LABEL: self.run,
            "thresher.owner": self.owner,
            "thresher.expires": f"{self.expires_at:.0f}",
            "thresher.holder": self.holder,
        }

    def is_abandoned(self, now: float) -> bool:
        """Whether its time is over, or its holder was a process of this machine and is gone."""
        machine, pid, start = (*self.holder.split("."), "", "")[:3]
        is_here = machine == _machine() and pid.isdigit()
        return now >= self.expires_at or (is_here and start_time(int(pid)) != start)


@dataclass(frozen=True, slots=True, kw_only=True)
class LeasedSandbox:
    """A Sandbox as its provider lists it."""

    provider: str
    id: str
    lease: Lease
    state: str
    """In the provider's words."""


class LeaseRegister(Protocol):
    """What lists and removes the Sandboxes of a provider, whoever made them. Raises SandboxError."""

    name: str

    async def list_leases(self) -> list[LeasedSandbox]:
        """All that carry a Lease."""
        ...

    async def remove(self, sandbox: LeasedSandbox) -> None:
        """Ends and removes it; one that is gone already is no error."""
        ...

    async def close(self) -> None:
        """Frees what listing needed."""
        ...


async def sweep(register: LeaseRegister, *, run: str | None = None) -> list[LeasedSandbox]:
    """Removes what is abandoned, or all of `run` however alive; returns what it removed. Raises SandboxError."""
    now = time.time()
    found = await register.list_leases()
    swept = [s for s in found if (s.lease.run == run if run is not None else s.lease.is_abandoned(now))]
    at_once = asyncio.Semaphore(_REMOVED_AT_ONCE)

    async def remove(sandbox: LeasedSandbox) -> None:
        async with at_once:
            await register.remove(sandbox)

    endings = await asyncio.gather(*map(remove, swept), return_exceptions=True)
    for error in endings:
        if isinstance(error, BaseException):
            raise error  # now that whatever could be removed is
    return swept


def lease_of(labels: Mapping[str, str]) -> Lease:
    """The Lease that these labels hold; labels that someone cut count as expired."""
    expires = labels.get("thresher.expires", "")
    return Lease(
        run=labels.get(LABEL, ""),
        owner=labels.get("thresher.owner", ""),
        expires_at=float(expires) if expires.isdigit() else 0.0,
        holder=labels.get("thresher.holder", ""),
    )


def this_holder() -> str:
    """This process, never again another: the machine, the pid, and when it began."""
    pid = os.getpid()
    return f"{_machine()}.{pid}.{start_time(pid)}"


@functools.cache
def _machine() -> str:
    """This boot of this machine and this namespace of process ids: containers of one host are different machines."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return hashlib.sha256(f"{boot} {os.readlink('/proc/self/ns/pid')}".encode()).hexdigest()[:12]
