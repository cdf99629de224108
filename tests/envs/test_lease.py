"""Leases tell who may remove a Sandbox."""

import os
import subprocess
import sys
import time

import pytest

from envs.errors import SandboxError
from envs.lease import Lease, LeasedSandbox, LeaseTerms, lease_of, sweep, this_holder


class Register:
    """Sandboxes in a list."""

    name = "list"

    def __init__(self, *leases: Lease) -> None:
        self.sandboxes = [
            LeasedSandbox(provider=self.name, id=str(k), lease=lease, state="running") for k, lease in enumerate(leases)
        ]

    async def list_leases(self) -> list[LeasedSandbox]:
        return list(self.sandboxes)

    async def remove(self, sandbox: LeasedSandbox) -> None:
        self.sandboxes.remove(sandbox)

    async def close(self) -> None:
        self.sandboxes.clear()


def lease(run: str = "r", *, holder: str | None = None, left_s: float = 60.0) -> Lease:
    return Lease(run=run, owner="g.0", expires_at=time.time() + left_s, holder=holder or this_holder())


def ended_holder() -> str:
    """The holder of a process that has ended."""
    program = "from envs.lease import this_holder; print(this_holder())"
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.strip()


def test_a_lease_survives_its_labels() -> None:
    held = LeaseTerms(run="runs/a", duration_s=100).lease("g.1")
    again = lease_of(held.labels())
    assert (again.run, again.owner, again.holder) == ("runs/a", "g.1", this_holder())
    assert abs(again.expires_at - held.expires_at) <= 1


def test_a_lease_is_abandoned_when_its_time_is_over_or_its_process_is_gone() -> None:
    now = time.time()
    assert not lease().is_abandoned(now)
    assert lease(left_s=-1).is_abandoned(now)
    assert lease(holder=ended_holder()).is_abandoned(now)
    machine, pid, start = this_holder().split(".")
    assert lease(holder=f"{machine}.{pid}.{int(start) + 1}").is_abandoned(now), "the pid is another process's now"
    assert not lease(holder=f"another.{pid}.1").is_abandoned(now), "of other machines only the expiry is known"
    assert not lease(holder="").is_abandoned(now)
    assert int(pid) == os.getpid()


def test_labels_that_were_cut_count_as_expired() -> None:
    assert lease_of({"thresher.run": "r"}).is_abandoned(time.time())
    assert lease_of({"thresher.run": "r", "thresher.expires": "soon"}).is_abandoned(time.time())


async def test_a_sweep_takes_what_is_abandoned_and_nothing_else() -> None:
    register = Register(lease(), lease(left_s=-1), lease(holder="another.1.1"))
    assert [s.id for s in await sweep(register)] == ["1"]
    assert [s.id for s in register.sandboxes] == ["0", "2"]


async def test_a_removal_that_fails_keeps_no_other_from_being_removed() -> None:
    class Stubborn(Register):
        async def remove(self, sandbox: LeasedSandbox) -> None:
            if sandbox.id == "0":
                raise SandboxError("not now")
            await super().remove(sandbox)

    register = Stubborn(*(lease(left_s=-1) for _ in range(20)))
    with pytest.raises(SandboxError, match="not now"):
        await sweep(register)
    assert [s.id for s in register.sandboxes] == ["0"]


async def test_a_sweep_of_a_run_takes_all_of_that_run() -> None:
    register = Register(lease("a"), lease("b", left_s=-1), lease("a", holder="another.1.1"))
    assert [s.id for s in await sweep(register, run="a")] == ["0", "2"]
    assert [s.lease.run for s in register.sandboxes] == ["b"]
