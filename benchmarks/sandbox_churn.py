"""How fast local Sandboxes are made, used and removed, and how many live at once.

    python -m benchmarks.sandbox_churn --out benchmarks/results/sandbox_churn.json

Each figure is of real bubblewrap boxes with their limits on; `load_1m` tells how busy the machine was otherwise. No box
is started ahead but for `warm_create_to_exec_ms_p50`; benchmarks/sandbox_clones.py says what `clone_ms_p50` is of.
`podman_create_to_exec_ms_p50` is of containers of the podman provider in the same run, from an image of this machine's
own programs; where podman is missing (scripts/podman.sh installs it) it is absent, and "podman" in the result says so.
"""

import asyncio
import json
import os
import shutil
import statistics
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import tyro

from benchmarks.hardware import describe_hardware
from benchmarks.sandbox_clones import measure_clones, measure_warm
from envs.local.provider import LocalConfig, LocalProvider
from envs.sandbox import Sandbox
from envs.task import Environment, Limits, Provenance, Task, VerifierSpec
from tests.envs.containers.base_image import import_base_image
from tests.envs.containers.podman import ENGINE_ARGS, make_podman

_TASK = Task(
    id="churn",
    instruction="",
    environment=Environment(network_mode="no-network"),
    verifier=VerifierSpec(),
    limits=Limits(),
    provenance=Provenance(),
    path=Path("/nonexistent"),
)
_TYPE = "tmux send-keys -t m 'echo hi' Enter \\; capture-pane -p -t m"


@dataclass(frozen=True, kw_only=True)
class Config:
    """What to measure with."""

    out: Path
    """File for the JSON."""
    boxes: int = 200
    """Sandboxes made one after the other, and again 8 at once."""
    clones: int = 30
    """Sandboxes of a prepared environment, and as many that are not."""
    alive: int = 256
    """Sandboxes to keep alive at once."""
    terminals: int = 64
    """Sandboxes with a tmux each."""
    containers: int = 20
    """Podman containers made one after the other, for comparison."""
    soft_limits: bool = False
    """Allow a machine without writable cgroups."""


async def main(config: Config) -> None:
    """Measures and writes the JSON."""
    hardware = describe_hardware()
    local = LocalConfig(allow_soft_limits=config.soft_limits, max_warm=0)
    provider = LocalProvider(local)
    provenance = await provider.provenance()
    figures = await _measure_cold(local)
    figures |= await _measure_one_by_one(provider, config.boxes)
    figures |= await measure_warm(local, _TASK, boxes=config.boxes // 2)
    figures |= await measure_clones(local, _TASK, boxes=config.clones)
    figures |= {"create_exec_destroy_per_s": await _measure_churn(provider, config.boxes, at_once=8)}
    figures |= await _measure_alive(provider, config.alive)
    figures |= {"tmux_cycles_per_s": await _measure_terminals(provider, config.terminals)}
    await provider.close()
    podman_figures, podman = await _measure_podman(config.containers)
    figures |= podman_figures
    result = {
        "hardware": hardware,
        "provenance": provenance,
        "podman": podman,
        "figures": {k: round(v, 3) for k, v in figures.items()},
    }
    config.out.parent.mkdir(parents=True, exist_ok=True)
    config.out.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


async def _measure_cold(config: LocalConfig) -> dict[str, float]:
    """Without a parked launcher: each box waits for a new one to enter its cgroups."""
    times_ms: list[float] = []
    provider = LocalProvider(config)
    await provider.provenance()
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(provider.start(_TASK, owner="takes the parked launcher"))
        for k in range(20):
            began = time.perf_counter()
            sandbox = await stack.enter_async_context(provider.start(_TASK, owner=f"cold-{k}"))
            await sandbox.exec("/bin/true", timeout_s=60)
            times_ms.append(_ms_since(began))
    await provider.close()
    return {"new_slot_create_to_exec_ms_p50": statistics.median(times_ms)}


async def _measure_one_by_one(provider: LocalProvider, boxes: int) -> dict[str, float]:
    create_ms: list[float] = []
    exec_ms: list[float] = []
    shell_ms: list[float] = []
    destroy_ms: list[float] = []
    for k in range(boxes):
        began = time.perf_counter()
        async with provider.start(_TASK, owner=f"one-{k}") as sandbox:
            await sandbox.exec("/bin/true", timeout_s=60)
            create_ms.append(_ms_since(began))
            exec_ms += [await _timed(lambda: sandbox.exec("/bin/true", timeout_s=60)) for _ in range(5)]
            shell_ms.append(await _timed(lambda: sandbox.exec("true; true", timeout_s=60)))
            began = time.perf_counter()
        destroy_ms.append(_ms_since(began))
    return {
        "create_to_exec_ms_p50": statistics.median(create_ms),
        "create_to_exec_ms_p95": statistics.quantiles(create_ms, n=20)[-1],
        "exec_ms_p50": statistics.median(exec_ms),
        "exec_shell_ms_p50": statistics.median(shell_ms),
        "destroy_ms_p50": statistics.median(destroy_ms),
    }


async def _measure_podman(containers: int) -> tuple[dict[str, float], str]:
    """The podman figures and what they were measured with; no figures, and why, where there is no podman."""
    if shutil.which("podman") is None:
        return {}, "absent: podman is not installed; scripts/podman.sh installs it"
    image = import_base_image("podman", ENGINE_ARGS)
    provider = make_podman(image, run="churn")
    version = (await provider.provenance())["version"]
    create_ms, exec_ms = list[float](), list[float]()
    for k in range(containers):
        began = time.perf_counter()
        async with provider.start(_TASK, owner=f"podman-{k}") as sandbox:
            await sandbox.exec("/bin/true", timeout_s=60)
            create_ms.append(_ms_since(began))
            exec_ms += [await _timed(lambda: sandbox.exec("/bin/true", timeout_s=60)) for _ in range(5)]
    await provider.close()
    figures = {
        "podman_create_to_exec_ms_p50": statistics.median(create_ms),
        "podman_exec_ms_p50": statistics.median(exec_ms),
    }
    return figures, f"podman {version}, {' '.join(ENGINE_ARGS)}"


async def _measure_churn(provider: LocalProvider, boxes: int, *, at_once: int) -> float:
    """Whole lives a second."""

    async def live(count: int) -> None:
        for _ in range(count):
            async with provider.start(_TASK, owner="churn") as sandbox:
                await sandbox.exec("/bin/true", timeout_s=60)

    began = time.perf_counter()
    await asyncio.gather(*(live(boxes // at_once) for _ in range(at_once)))
    return boxes // at_once * at_once / (time.perf_counter() - began)


async def _measure_alive(provider: LocalProvider, alive: int) -> dict[str, float]:
    async with AsyncExitStack() as stack:
        began = time.perf_counter()
        sandboxes = await _start(provider, stack, alive)
        create_all_ms = _ms_since(began)
        results = await asyncio.gather(*(sandbox.exec("/bin/true", timeout_s=120) for sandbox in sandboxes))
        memory_mb = sum(map(_pss_mb, _descendants())) / alive
        return {
            "alive_at_once": float(sum(result.exit_code == 0 for result in results)),
            "create_all_ms": create_all_ms,
            "mb_per_idle_sandbox": memory_mb,
        }


async def _measure_terminals(provider: LocalProvider, terminals: int, *, cycles: int = 10) -> float:
    """Send keys and read the screen, so often a second over all Sandboxes."""

    async def use(sandbox: Sandbox) -> None:
        for _ in range(cycles):
            result = await sandbox.exec(_TYPE, timeout_s=120)
            assert result.exit_code == 0, result

    async with AsyncExitStack() as stack:
        sandboxes = await _start(provider, stack, terminals)
        started = "tmux new-session -d -s m -x 160 -y 40"
        await asyncio.gather(*(sandbox.exec(started, timeout_s=120) for sandbox in sandboxes))
        began = time.perf_counter()
        await asyncio.gather(*map(use, sandboxes))
        return terminals * cycles / (time.perf_counter() - began)


async def _start(provider: LocalProvider, stack: AsyncExitStack, count: int) -> list[Sandbox]:
    starting = (stack.enter_async_context(provider.start(_TASK, owner=f"alive-{k}")) for k in range(count))
    return list(await asyncio.gather(*starting))


async def _timed(call: Callable[[], Awaitable[object]]) -> float:
    began = time.perf_counter()
    await call()
    return _ms_since(began)


def _ms_since(began: float) -> float:
    return (time.perf_counter() - began) * 1e3


def _descendants() -> list[int]:
    """Every process below this one: launchers, bubblewraps and agents."""
    parents: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        parents.setdefault(int(fields[1]), []).append(int(path.parent.name))
    found, todo = list[int](), [os.getpid()]
    while todo:
        below = parents.get(todo.pop(), [])
        found += below
        todo += below
    return found


def _pss_mb(pid: int) -> float:
    """Memory of a process, its share of what it shares; 0 when it may not be read or is gone."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0.0
    return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024


if __name__ == "__main__":
    asyncio.run(main(tyro.cli(Config, description=__doc__)))
