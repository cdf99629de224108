"""What a rollout's Sandbox costs when its Task's environment was prepared, or a box was started ahead.

The Task's Dockerfile copies 4 MB in 64 files and makes 8 MB of them in two commands. `clone_ms_p50` is start to first
exec of a Sandbox made of the prepared environment; `unprepared_ms_p50` the same with the files uploaded and the
commands run in each Sandbox anew, taking turns with it; `prepare_ms` is what preparing took, once.
Called by benchmarks/sandbox_churn.py.
"""

import asyncio
import os
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from envs.local.provider import LocalConfig, LocalProvider
from envs.task import Task

_COMMANDS = (
    "cat data/* >joined && sha256sum data/* >sums",
    "mkdir -p /opt/tool && gzip -1 <joined >/opt/tool/joined.gz",
)
_DOCKERFILE = "\n".join(["FROM scratch", "WORKDIR /work", "COPY data data", *(f"RUN {each}" for each in _COMMANDS), ""])
_PAUSE_S = 0.05


async def measure_clones(config: LocalConfig, bare: Task, *, boxes: int) -> dict[str, float]:
    """Figures of a prepared environment; `bare` is a Task without files."""
    clone_ms, unprepared_ms = list[float](), list[float]()
    with tempfile.TemporaryDirectory(prefix="thresher-clones-") as directory:
        os.chmod(directory, 0o755)  # boxes run as a user of their own, who must reach the agent in the cache
        task = replace(bare, id="clones", path=_write_task(Path(directory)))
        provider = LocalProvider(replace(config, cache_dir=Path(directory) / "cache", max_warm=0))
        await provider.provenance()
        began = time.perf_counter()
        async with provider.start(task, owner="prepare"):
            prepare_ms = _ms_since(began)
        for k in range(boxes):
            began = time.perf_counter()
            async with provider.start(task, owner=f"clone-{k}") as sandbox:
                checked = await sandbox.exec("/usr/bin/test -s /opt/tool/joined.gz", timeout_s=60)
                clone_ms.append(_ms_since(began))
                assert checked.exit_code == 0
            began = time.perf_counter()
            async with provider.start(bare, owner=f"unprepared-{k}") as sandbox:
                await sandbox.upload_dir(task.path / "environment" / "data", "/work/data")
                for command in _COMMANDS:
                    result = await sandbox.exec(command, timeout_s=60, cwd="/work")
                    assert result.exit_code == 0, result
                await sandbox.exec("/usr/bin/test -s /opt/tool/joined.gz", timeout_s=60)
                unprepared_ms.append(_ms_since(began))
        await provider.close()
    return {
        "clone_ms_p50": statistics.median(clone_ms),
        "unprepared_ms_p50": statistics.median(unprepared_ms),
        "prepare_ms": prepare_ms,
    }


async def measure_warm(config: LocalConfig, bare: Task, *, boxes: int) -> dict[str, float]:
    """Start to first exec where a box waits: rollouts that begin 50 ms after the last one ended."""
    times_ms = list[float]()
    provider = LocalProvider(replace(config, max_warm=2))
    for k in range(boxes + 2):  # two of the same size, and boxes are started ahead
        began = time.perf_counter()
        async with provider.start(bare, owner=f"warm-{k}") as sandbox:
            await sandbox.exec("/bin/true", timeout_s=60)
            times_ms.append(_ms_since(began))
        await asyncio.sleep(_PAUSE_S)
    await provider.close()
    return {"warm_create_to_exec_ms_p50": statistics.median(times_ms[2:])}


def _write_task(root: Path) -> Path:
    data = root / "task" / "environment" / "data"
    data.mkdir(parents=True)
    for k in range(64):
        (data / f"{k:02}").write_bytes(os.urandom(1 << 16))
    (data.parent / "Dockerfile").write_text(_DOCKERFILE)
    return root / "task"


def _ms_since(began: float) -> float:
    return (time.perf_counter() - began) * 1e3
