"""Lease files of local sandboxes, and that a sweep ends what they name."""

import asyncio
import json
import subprocess
import time
from pathlib import Path

import pytest

from envs.lease import Lease, LeaseTerms, sweep
from envs.local.leases import LeaseFiles
from envs.local.provider import LocalProvider
from tests.envs.local.boxes import make_provider, make_task


def test_a_lease_is_on_disk_while_it_is_held(tmp_path: Path) -> None:
    files = LeaseFiles(tmp_path)
    assert files.list() == []
    with files.hold(LeaseTerms(run="r").lease("g.0"), "thresher-1-2-3"):
        (found,) = files.list()
        assert (found.lease.run, found.lease.owner, found.state) == ("r", "g.0", "slot thresher-1-2-3")
        assert not found.lease.is_abandoned(time.time())
    assert files.list() == [] and list(tmp_path.rglob("lease-*")) == []


def test_a_damaged_lease_counts_as_expired(tmp_path: Path) -> None:
    (tmp_path / "leases").mkdir()
    (tmp_path / "leases" / "thresher-1-1-1").write_text('{"thresher.run": ')
    (tmp_path / "leases" / "thresher-1-1-2").write_text("[]")
    assert all(found.lease.is_abandoned(time.time()) for found in LeaseFiles(tmp_path).list())


def test_removing_a_lease_ends_the_processes_of_its_slot(tmp_path: Path) -> None:
    label = f"thresher-test-{time.time_ns()}"
    process = subprocess.Popen([label, "60"], executable="/bin/sleep")
    while not Path(f"/proc/{process.pid}/cmdline").read_bytes().startswith(label.encode()):
        time.sleep(0.01)  # the child has not become that program yet
    files = LeaseFiles(tmp_path)
    with files.hold(Lease(run="r", owner="o", expires_at=0, holder=""), label):
        files.remove(files.list()[0].id)
        assert process.wait(5) == -9 and files.list() == []


@pytest.mark.sandbox
async def test_a_running_sandbox_is_listed_and_a_sweep_of_its_run_ends_it(provider: LocalProvider) -> None:
    async with provider.start(make_task(memory_mb=256, storage_mb=64), owner="g.1") as sandbox:
        mine = [s for s in await provider.list_leases() if s.lease.owner == "g.1" and s.lease.run == "unnamed"]
        assert len(mine) == 1
        running = asyncio.create_task(sandbox.exec("sleep 60", timeout_s=60))
        await asyncio.sleep(0.1)
        other = make_provider()
        await other.remove(mine[0])
        with pytest.raises(Exception, match=r"sandbox|box"):
            await running
        assert json.dumps([s.id for s in await sweep(other)]) == "[]"
