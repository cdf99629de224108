"""A cluster of one's own is started, whatever other runs left behind; its actors' threads share the cores."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from actors.cluster import ClusterConfig, Resources, start_cluster
from actors.inference_config import ServerConfig


@pytest.fixture
def note(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where Ray notes the cluster of this machine; a killed driver does not take it away."""
    scratch = Path(tempfile.mkdtemp(prefix="tc", dir="/tmp"))  # short: unix sockets lie below
    (scratch / "ray").mkdir()
    monkeypatch.setenv("RAY_TMPDIR", str(scratch))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    yield scratch / "ray" / "ray_current_cluster"
    shutil.rmtree(scratch, ignore_errors=True)


@pytest.mark.ray
async def test_a_cluster_that_a_killed_run_left_a_note_of_is_not_joined(note: Path) -> None:
    note.write_text("127.0.0.1:1")
    async with start_cluster(ClusterConfig()):
        assert len(ray.nodes()) == 1


def test_threads_of_actors_and_of_engines_on_cpus_spin_only_briefly() -> None:
    wanted = {"OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "10000"}
    assert Resources(threads=2).options()["runtime_env"] == {"env_vars": wanted}
    assert ServerConfig(threads=2).environment().items() >= wanted.items()
