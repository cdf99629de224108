"""What is left of sandboxes after their processes were killed at random moments, and one sweep.

    python -m benchmarks.sandbox_kills --out benchmarks/results/sandbox_kills.json    # 200 of each, 5 minutes

A worker process holds a provider and keeps three sandboxes busy. The victim of each round is, in turn, the worker, its
driver (the worker then ends at once, as rollout workers do when their node loses the driver), or a process of a box.
Then everything of the round is killed, one sweep runs, and what is still there is counted: processes, mounts, control
groups, lease files, sandboxes at the service. Every count must be 0; the command exits with 1 otherwise. A service goes
on with creations that it was asked for: one that ends after the sweep is left to a second one, and `_second_sweeps`
says how often that was.
The Daytona service is the tests' own, its sandboxes real boxes of this machine.
"""

import asyncio
import contextlib
import json
import multiprocessing
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import tyro

from benchmarks.hardware import describe_hardware
from envs.daytona.config import DaytonaConfig
from envs.errors import EpisodeError, SandboxRefused
from envs.lease import sweep
from envs.local.cgroups import find_cgroups
from envs.local.provider import LocalConfig, LocalProvider
from envs.providers import LeasingProvider, ProviderName, SandboxConfig, build_provider
from envs.task import Environment, Limits, Provenance, Task, VerifierSpec

_TASK = Task(
    id="kills",
    instruction="",
    environment=Environment(network_mode="no-network", memory_mb=256, storage_mb=64, workdir="/app"),
    verifier=VerifierSpec(),
    limits=Limits(),
    provenance=Provenance(),
    path=Path("/nonexistent"),
)
_COMMAND = "sleep 1000 >/dev/null 2>&1 & setsid sleep 1000 >/dev/null 2>&1 & sleep 0.03; echo done"
_VICTIMS = ("worker", "driver", "agent")
_START_S = 120.0
_CREATION_S = 0.1
"""What the service takes at most for a creation that it has begun, on a machine that is not busy."""
_KEY = "key"


@dataclass(frozen=True, kw_only=True)
class Config:
    """What to kill."""

    out: Path
    """File for the JSON."""
    kills: int = 200
    """Of each provider."""
    deadline_s: float = 1200.0
    """The command fails when a provider's kills take longer than this."""
    providers: tuple[ProviderName, ...] = (ProviderName.LOCAL, ProviderName.DAYTONA)
    seed: int = 0


def main(config: Config) -> None:
    """Kills, counts and writes the JSON."""
    hardware = describe_hardware()
    figures: dict[str, float] = {}
    for provider in config.providers:
        rng = random.Random(config.seed)
        try:
            figures |= asyncio.run(kill_at_random(provider, kills=config.kills, rng=rng, deadline_s=config.deadline_s))
        except TimeoutError as error:
            raise SystemExit(f"error: {error}") from None
    result = {"hardware": hardware, "figures": figures}
    config.out.parent.mkdir(parents=True, exist_ok=True)
    config.out.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))
    if any(count for name, count in figures.items() if "_left_" in name):
        sys.exit(1)


async def kill_at_random(
    provider: ProviderName, *, kills: int, rng: random.Random, deadline_s: float
) -> dict[str, float]:
    """Figures named by the provider: how many kills of what, what was left in all, and how long a round and a sweep
    took. Prints how far it is. Raises TimeoutError when a round begins after the deadline.
    """
    left, rounds_s, sweeps_ms = Counter[str](), list[float](), list[float]()
    second_sweeps, end = 0, time.monotonic() + deadline_s
    victims = [_VICTIMS[k % len(_VICTIMS)] for k in range(kills)]
    with tempfile.TemporaryDirectory(prefix="thresher-kills-") as directory:
        os.chmod(directory, 0o755)  # boxes run as a user of their own, who must reach the agent in the cache
        async with _service(provider, Path(directory)) as (config, service_pid):
            for number, victim in enumerate(victims, 1):
                began = time.monotonic()
                if began > end:
                    raise TimeoutError(f"{provider}: {number - 1} of {kills} kills in {deadline_s:g} s; left {left}")
                pids = await asyncio.to_thread(_round, config, victim, service_pid, rng)
                sweeps_ms.append(await _sweep(config))
                found = await _count_left(config, pids)
                if found["sandboxes"]:
                    second_sweeps += 1
                    await _sweep(config)
                    found = await _count_left(config, pids)
                left.update(found)
                rounds_s.append(time.monotonic() - began)
                if number % 10 == 0 or number == kills:
                    total = sum(left.values())
                    print(f"{provider}: {number} of {kills} kills, left {total}, {sum(rounds_s):.0f} s", flush=True)
    names = ("processes", "mounts", "cgroups", "leases", "sandboxes")
    figures = {f"{provider}_left_{name}": float(left[name]) for name in names}
    figures |= {f"{provider}_kills_of_{victim}": float(victims.count(victim)) for victim in _VICTIMS}
    if provider is not ProviderName.LOCAL:
        figures[f"{provider}_second_sweeps"] = float(second_sweeps)
    figures[f"{provider}_round_s_p50"] = round(statistics.median(rounds_s), 3)
    return figures | {f"{provider}_sweep_ms_p50": round(statistics.median(sweeps_ms), 1)}


def _round(config: SandboxConfig, victim: str, service_pid: int, rng: random.Random) -> list[int]:
    """One life of a driver and its worker, until the kill; returns the pids that hold labels."""
    processes = multiprocessing.get_context("forkserver")
    # The main module is imported by the server, once; else every process that it forks would do so.
    processes.set_forkserver_preload(["__main__", "envs.providers", "envs.daytona.provider"])
    driver_alive, worker_sees = processes.Pipe()
    told, tells = processes.Pipe(duplex=False)
    driver = processes.Process(target=_drive, args=(driver_alive,), daemon=True)
    worker = processes.Process(target=_work, args=(config, worker_sees, tells), daemon=True)
    for process in (driver, worker):
        process.start()
    for end in (driver_alive, worker_sees, tells):
        end.close()
    assert worker.pid is not None
    try:
        if not told.poll(_START_S):
            raise RuntimeError(f"the worker started no sandbox within {_START_S:g} s")
        time.sleep(rng.uniform(0, 0.25))
        _kill(victim, driver, worker, service_pid, rng)
        time.sleep(rng.uniform(0, 0.05))
    finally:
        for process in (driver, worker):
            process.kill()
            process.join(10)
        told.close()
    return [worker.pid]


def _kill(
    victim: str, driver: ForkServerProcess, worker: ForkServerProcess, service_pid: int, rng: random.Random
) -> None:
    if victim == "agent":
        boxes = _boxes_of(worker, service_pid or worker.pid or 0)
        with contextlib.suppress(ProcessLookupError):
            os.kill(rng.choice(boxes), signal.SIGKILL)
    elif victim == "worker":
        worker.kill()
    else:
        driver.kill()
        worker.join(10)


def _boxes_of(worker: ForkServerProcess, pid: int) -> list[int]:
    """Processes that hold the labels of a worker's boxes, once there are some: it stops one and starts the next."""
    deadline = time.monotonic() + _START_S
    while not (boxes := _labelled(pid)):
        if time.monotonic() > deadline or not worker.is_alive():
            raise RuntimeError(f"the worker {worker.pid} has no sandbox; it {'runs' if worker.is_alive() else 'ended'}")
        time.sleep(0.005)
    return boxes


def _drive(alive: Connection) -> None:
    """Only lives: its end of the pipe is what the worker watches."""
    alive.poll(None)


def _work(config: SandboxConfig, driver: Connection, tells: Connection) -> None:
    threading.Thread(target=_end_with, args=(driver,), daemon=True).start()
    os.environ[config.daytona.key_variable] = _KEY
    asyncio.run(_play(config, tells))


def _end_with(driver: Connection) -> None:
    driver.poll(None)
    os._exit(1)


async def _play(config: SandboxConfig, tells: Connection) -> None:
    provider = build_provider(config, run="kills")
    await asyncio.gather(*(_keep_busy(provider, f"g.{k}", tells) for k in range(3)))


async def _keep_busy(provider: LeasingProvider, owner: str, tells: Connection) -> None:
    while True:
        try:
            async with provider.start(_TASK, owner=owner) as sandbox:
                tells.send(os.getpid())
                await sandbox.exec(_COMMAND, timeout_s=30)
        except SandboxRefused:
            raise
        except EpisodeError:
            continue  # its agent was killed; the next sandbox is a new one


async def _sweep(config: SandboxConfig) -> float:
    """Milliseconds of what `python -m recipes.sandboxes sweep` does."""
    provider = build_provider(config, run="sweep")
    began = time.perf_counter()
    try:
        await sweep(provider)
        if isinstance(provider, LocalProvider):
            await provider.sweep_machine()
        return (time.perf_counter() - began) * 1e3
    finally:
        await provider.close()


async def _count_left(config: SandboxConfig, pids: list[int]) -> dict[str, int]:
    """Of these label holders; processes and groups may take a moment to vanish from the kernel's tables, and what a
    service was still creating a moment to appear in its list.
    """
    deadline = time.monotonic() + 3
    while any((found := _on_this_machine(pids)).values()) and time.monotonic() < deadline:  # noqa: ASYNC110
        await asyncio.sleep(0.02)
    is_local = config.provider is ProviderName.LOCAL
    provider = build_provider(config, run="count")
    try:
        if not is_local:
            await asyncio.sleep(_CREATION_S)
        leases = await provider.list_leases()
    finally:
        await provider.close()
    return found | {"leases": len(leases) if is_local else 0, "sandboxes": 0 if is_local else len(leases)}


def _on_this_machine(pids: list[int]) -> dict[str, int]:
    prefixes = tuple(f"thresher-{pid}-" for pid in pids)
    groups = {
        path for parent in set(find_cgroups().parents.values()) for p in prefixes for path in parent.glob(f"{p}*")
    }
    mounts = [
        line for line in Path("/proc/self/mountinfo").read_text().splitlines() if any(p in line for p in prefixes)
    ]
    processes = [process for pid in pids for process in _labelled(pid)]
    return {"processes": len(processes), "cgroups": len(groups), "mounts": len(mounts)}


def _labelled(pid: int) -> list[int]:
    """Launchers and bubblewraps of this holder, and everything below them."""
    wanted, parents = set[int](), dict[int, int]()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
            if (stat.parent / "cmdline").read_bytes().startswith(f"thresher-{pid}-".encode()):
                wanted.add(int(stat.parent.name))
    size = -1
    while size != len(wanted):
        size = len(wanted)
        wanted |= {child for child, parent in parents.items() if parent in wanted}
    return sorted(wanted)


@asynccontextmanager
async def _service(provider: ProviderName, directory: Path) -> AsyncIterator[tuple[SandboxConfig, int]]:
    """The config to reach the provider; for daytona with a service in a process of its own, whose pid is given."""
    config = SandboxConfig(provider=provider, local=LocalConfig(cache_dir=directory / "cache"))
    if provider is not ProviderName.DAYTONA:
        yield config, 0
        return
    os.environ[config.daytona.key_variable] = _KEY
    address = directory / "address"
    command = [sys.executable, "-m", "tests.fakes.daytona_api", "--address-file", str(address)]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as service:  # noqa: ASYNC220 - a few ms
        try:
            async with asyncio.timeout(_START_S):
                while not address.exists():  # noqa: ASYNC110 - another process makes it
                    await asyncio.sleep(0.05)
            yield replace(config, daytona=DaytonaConfig(api_url=address.read_text())), service.pid
        finally:
            service.communicate(timeout=_START_S)


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__, config=(tyro.conf.EnumChoicesFromValues,)))
