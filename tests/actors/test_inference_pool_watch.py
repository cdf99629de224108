"""The pool over fake actors: a server that is silent or was out of reach is ended before it comes back.

Else it would sample on with weights that all others, and the bound on staleness, have left behind.
"""

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray.exceptions

from actors import inference_pool
from actors.inference_config import InferencePoolConfig
from actors.inference_errors import ServerNotReady
from actors.inference_pool import InferencePool, ServerHandle
from trajectories.schema import PolicyVersion

V0 = PolicyVersion(lineage=0, n=0)


class FakeActor:
    """A server's actor. `fails` says what becomes of the next health check: "silent", "unreachable", "died"."""

    def __init__(self) -> None:
        self.pid_now = 1
        self.fails = ""
        self.health, self.start = SimpleNamespace(remote=self._health), SimpleNamespace(remote=self._start)

    def die(self) -> None:
        self.pid_now += 1

    async def _health(self) -> Any:
        failure, self.fails = self.fails, ""
        if failure == "silent":
            await asyncio.sleep(60)
        if failure == "died":
            self.die()
        if failure:
            raise ray.exceptions.ActorUnavailableError("restarting", None)
        return self._told()

    async def _start(self, version: PolicyVersion | None) -> Any:
        return self._told()

    def _told(self) -> Any:
        return SimpleNamespace(pid=self.pid_now, is_ready=True, version=V0, num_running=0, num_waiting=0)


def pool_at(model: Path) -> InferencePool:
    (model / "config.json").write_text(json.dumps({"vocab_size": 8, "dtype": "float32"}))
    return InferencePool(InferencePoolConfig(health_interval_s=0.001, health_timeout_s=0.05), model, ())


@pytest.mark.parametrize(("failure", "ended"), [("silent", [1]), ("unreachable", [1]), ("died", [])])
async def test_only_a_new_process_is_given_weights(
    failure: str, ended: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = pool_at(tmp_path)
    actor = FakeActor()
    handle = ServerHandle("server-0", actor)
    killed: list[int] = []
    healed: list[int] = []
    is_healed = asyncio.Event()

    def kill(actor: FakeActor, *, no_restart: bool) -> None:
        assert not no_restart
        killed.append(actor.pid_now)
        actor.die()

    async def heal(server: ServerHandle) -> None:
        healed.append(server.pid)
        is_healed.set()

    monkeypatch.setattr(inference_pool.ray, "kill", kill)
    pool.heal_with(heal)
    await handle.refresh(1)
    pool._watch(handle)
    actor.fails = failure
    async with asyncio.timeout(5):
        await is_healed.wait()
    pool._watches["server-0"].cancel()
    assert (killed, healed, handle.pid) == (ended, [2], 2)


async def test_a_server_that_is_starting_anew_can_be_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[FakeActor] = []
    monkeypatch.setattr(inference_pool.ray, "kill", killed.append)
    pool = pool_at(tmp_path)
    pool.servers = tuple(ServerHandle(f"server-{index}", FakeActor()) for index in range(2))

    async def still_starting() -> None:
        raise ServerNotReady("server-1 is still starting")

    pool.servers[1].actor.drain = SimpleNamespace(remote=still_starting)
    gone = pool.servers[1].actor
    assert await pool.remove("server-1", deadline_s=5) == 0
    assert ([server.name for server in pool.servers], killed) == (["server-0"], [gone])
