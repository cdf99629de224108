"""A server over two tensor-parallel workers: shards are read back, and nothing outlives a killed server."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.actors.tiny_qwen3 import save_tiny_qwen3

PROGRAM = """
import asyncio, os, sys
from pathlib import Path
from actors.inference_config import ServerConfig, UpdateMode
CONFIG = ServerConfig(max_model_len=256, tensor_parallel_size=2, kv_cache_gb=0.1)
os.environ.update(CONFIG.environment())
from actors.inference_engine import Engine
from tests.actors.tiny_qwen3 import TinySource
from trajectories.schema import PolicyVersion

async def main(model, stages):
    engine = await Engine.start(model, CONFIG, name="server-0", version=None)
    source = TinySource(model)
    for n in range(2):
        manifest = source.stage(stages, PolicyVersion(lineage=0, n=n))
        report = await engine.weights.load(manifest, mode=UpdateMode.KEEP, max_columns=1024, admits=True)
        assert report.unread == () and report.num_values > 500_000, report
        gaps = [abs(a - b) for a, b in zip(await engine.probe(range(100, 160)), source.logprobs(range(100, 160)))]
        assert max(gaps) < 1e-5, max(gaps)
        source.step(n)
    print("PROVEN", flush=True)
    await asyncio.sleep(600)

if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), Path(sys.argv[2])))
"""


@pytest.mark.vllm
@pytest.mark.exhaustive
@pytest.mark.timeout(300)
@pytest.mark.parametrize("is_tied", [True, False])
def test_shards_are_proven_and_no_worker_outlives_a_killed_server(tmp_path: Path, is_tied: bool):
    model = save_tiny_qwen3(tmp_path / "model", is_tied=is_tied)
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    with (tmp_path / "log").open("w") as log:
        server = subprocess.Popen(
            [sys.executable, str(program), str(model), str(tmp_path / "stages")],
            env={**os.environ, "PYTHONPATH": os.getcwd()},
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        while "PROVEN" not in (said := (tmp_path / "log").read_text()):
            assert server.poll() is None, said[-3000:]
            time.sleep(0.2)
        engine = psutil.Process(server.pid).children(recursive=True)
    finally:
        server.send_signal(signal.SIGKILL)
        server.wait()
    assert len(engine) >= 3, "one engine core and two workers"
    _, alive = psutil.wait_procs(engine, timeout=10)
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]
