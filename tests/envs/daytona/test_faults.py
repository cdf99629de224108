"""What a Daytona service may answer, and what it becomes: infrastructure, never a reward or the agent's fault."""

import asyncio
import time
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from envs.creation import CreationConfig, RateGate
from envs.daytona.config import DaytonaConfig
from envs.daytona.errors import SandboxQuota, SandboxVanished, retry_after_s, sandbox_error
from envs.daytona.provider import DaytonaProvider
from envs.errors import SandboxDied, SandboxError, SandboxRefused
from envs.lease import LeaseTerms, sweep
from tests.envs.local.boxes import make_provider, make_task
from tests.fakes.daytona_api import DaytonaApi, Fault, serve_daytona
from trajectories.schema import Outcome

pytestmark = [pytest.mark.sandbox, pytest.mark.timeout(60)]
CREATE = "POST /api/sandbox$"
TASK = make_task(workdir="/app")


@pytest.fixture
async def api(monkeypatch: pytest.MonkeyPatch) -> AsyncGenerator[DaytonaApi]:
    monkeypatch.setenv("DAYTONA_API_KEY", "key")
    boxes = make_provider()
    async with serve_daytona(boxes) as api:
        yield api
    await boxes.close()


@pytest.fixture
async def provider(api: DaytonaApi) -> AsyncGenerator[DaytonaProvider]:
    provider = make(api)
    yield provider
    await provider.close()


def make(api: DaytonaApi, *, gate: RateGate | None = None, run: str = "r", **config: Any) -> DaytonaProvider:
    chosen = DaytonaConfig(**{"api_url": api.url, "retry_s": 5, "request_timeout_s": 5, **config})
    return DaytonaProvider(chosen, terms=LeaseTerms(run=run), gate=gate)


async def use(provider: DaytonaProvider, command: str = "echo hi") -> bytes:
    async with provider.start(TASK, owner="g.0") as sandbox:
        return (await sandbox.exec(command, timeout_s=20)).stdout


async def test_a_sandbox_is_created_with_its_lease_and_ends_by_itself(
    api: DaytonaApi, provider: DaytonaProvider
) -> None:
    task = make_task(workdir="/app", network_mode="no-network", cpus=1.5, memory_mb=1500, docker_image="base:1")
    async with provider.start(task, owner="g.7"):
        (remote,) = api.remotes.values()
        asked = remote.asked
        (listed,) = await provider.list_leases()
    assert (listed.lease.run, listed.lease.owner) == ("r", "g.7")
    assert asked["labels"]["thresher.run"] == "r" and asked["labels"]["thresher.owner"] == "g.7"
    assert (asked["autoStopInterval"], asked["autoDeleteInterval"], asked["ttlMinutes"]) == (30, 0, 240)
    assert (asked["cpu"], asked["memory"], asked["networkBlockAll"]) == (2, 2, True)
    assert asked["buildInfo"]["dockerfileContent"].strip() == "FROM base:1"
    assert api.remotes == {} and sum(request.startswith("DELETE") for request in api.requests) == 1


async def test_a_rate_limit_is_waited_out_by_every_creation(api: DaytonaApi) -> None:
    gate = RateGate(CreationConfig())
    first, second = make(api, gate=gate), make(api, gate=gate)
    await asyncio.gather(first.provenance(), second.provenance())
    api.faults.append(Fault(on=CREATE, status=429, message="Too many requests", headers={"Retry-After": "1"}))
    limited = asyncio.create_task(use(first))
    await asyncio.sleep(0.3)  # the 429 is back
    assert "POST /api/sandbox" in api.requests
    assert await use(second) == b"hi\n"
    assert await limited == b"hi\n"
    asked = zip(api.requests, api.times, strict=True)
    turned_away, *admitted = [at for request, at in asked if request == "POST /api/sandbox"]
    assert len(admitted) == 2 and min(admitted) >= turned_away + 1, "one creation came before Retry-After was over"
    await asyncio.gather(first.close(), second.close())


async def test_a_rate_limit_that_does_not_end_is_a_quota_error(api: DaytonaApi) -> None:
    provider = make(api, retry_s=0.3)
    api.faults.append(Fault(on=CREATE, status=429, message="Too many requests", times=99))
    with pytest.raises(SandboxQuota, match=r"lower creation\.per_s") as caught:
        await use(provider)
    assert caught.value.outcome is Outcome.SANDBOX_ERROR
    await provider.close()


async def test_a_rate_limit_longer_than_the_deadline_fails_at_once(api: DaytonaApi, provider: DaytonaProvider) -> None:
    await provider.provenance()
    api.faults.append(Fault(on=CREATE, status=429, headers={"Retry-After": "3600"}))
    async with asyncio.timeout(5):
        with pytest.raises(SandboxQuota):
            await use(provider)


async def test_a_full_account_is_waited_for(api: DaytonaApi, provider: DaytonaProvider) -> None:
    api.max_sandboxes = 1

    async def short() -> bytes:
        return await use(provider, "sleep 0.5; echo first")

    async def later() -> bytes:
        await asyncio.sleep(0.2)
        return await use(provider, "echo second")

    assert await asyncio.gather(short(), later()) == [b"first\n", b"second\n"]


async def test_a_server_error_is_tried_again_and_an_answer_that_was_lost_leaves_nothing(
    api: DaytonaApi, provider: DaytonaProvider
) -> None:
    api.faults += [Fault(on=CREATE, status=503), Fault(on=CREATE, status=502, after=True)]
    assert await use(provider) == b"hi\n"
    assert api.remotes == {}, "the sandbox whose answer was lost is still there"


async def test_a_command_whose_answer_was_lost_runs_once(api: DaytonaApi, provider: DaytonaProvider) -> None:
    async with provider.start(TASK, owner="g.0") as sandbox:
        api.faults.append(Fault(on="process/execute", status=502, after=True, times=2))
        result = await sandbox.exec("echo x >>/app/ran; wc -l </app/ran", timeout_s=20)
        assert result.stdout.strip() == b"1"
        api.faults.append(Fault(on="bulk-upload", status=503, times=1))
        api.faults.append(Fault(on="bulk-download", status=503, times=1))
        await sandbox.write_file("/app/file", b"\0data")
        assert await sandbox.read_file("/app/file") == b"\0data"


async def test_a_slow_start_is_waited_for_and_one_that_is_too_slow_leaves_nothing(api: DaytonaApi) -> None:
    api.start_delay_s = 1.0
    patient = make(api)
    assert await use(patient) == b"hi\n"
    await patient.close()
    api.start_delay_s = 60.0
    hasty = make(api, create_timeout_s=1.5)
    with pytest.raises(SandboxError, match="too slow"):
        await use(hasty)
    assert api.remotes == {}
    await hasty.close()


async def test_a_cancelled_creation_leaves_nothing(api: DaytonaApi, provider: DaytonaProvider) -> None:
    await provider.provenance()
    api.faults.append(Fault(on=CREATE, status=200, delay_s=0.5))
    starting = asyncio.create_task(use(provider))
    await asyncio.sleep(0.2)
    starting.cancel()
    await asyncio.gather(starting, return_exceptions=True)
    assert starting.cancelled() and api.remotes == {}
    assert "POST /api/sandbox" in api.requests


async def test_a_vanished_sandbox_is_infrastructure(api: DaytonaApi, provider: DaytonaProvider) -> None:
    async with provider.start(TASK, owner="g.0") as sandbox:
        running = asyncio.create_task(sandbox.exec("sleep 30", timeout_s=60))
        await asyncio.sleep(0.5)
        await api.vanish(next(iter(api.remotes)))
        for call in (running, sandbox.exec("true", timeout_s=5), sandbox.write_file("/app/x", b"")):
            with pytest.raises(SandboxVanished) as caught:
                await call
            assert caught.value.outcome is Outcome.SANDBOX_ERROR


async def test_a_broken_build_is_not_tried_again(api: DaytonaApi, provider: DaytonaProvider) -> None:
    api.is_build_broken = True
    with pytest.raises(SandboxError, match="create daytona sandbox"):
        await use(provider)
    assert api.requests.count("POST /api/sandbox") == 1 and api.remotes == {}


async def test_a_wrong_key_is_refused_at_once(api: DaytonaApi, provider: DaytonaProvider) -> None:
    api.key = "another"
    began = time.monotonic()
    with pytest.raises(SandboxRefused, match="check that the key is set and valid"):
        await provider.provenance()
    assert time.monotonic() - began < 4


async def test_a_missing_key_is_refused_by_the_name_of_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DAYTONA_API_KEY", raising=False)
    with pytest.raises(SandboxRefused, match="DAYTONA_API_KEY is not set"):
        await DaytonaProvider().provenance()


async def test_a_sweep_removes_what_a_dead_driver_left_over_several_pages(api: DaytonaApi) -> None:
    dead, alive = make(api, run="dead"), make(api, run="alive")
    lost = [dead._create(TASK, dead._params(TASK, f"g.{k}")) for k in range(5)]  # pyright: ignore[reportPrivateUsage]
    await asyncio.gather(*lost)
    async with alive.start(TASK, owner="g.9"):
        assert len(await alive.list_leases()) == 6
        assert await sweep(alive) == [], "their holder, this process, is alive"
        assert len(await sweep(alive, run="dead")) == 5
        assert [s.lease.run for s in await alive.list_leases()] == ["alive"]
    await asyncio.gather(dead.close(), alive.close())


def test_retry_after_is_read_in_both_forms() -> None:
    from daytona import DaytonaError

    def asked(value: str) -> float | None:
        return retry_after_s(DaytonaError("m", headers={"retry-after": value}), now=784111777.0 - 30)

    assert asked("7") == 7
    assert asked("Sun, 06 Nov 1994 08:49:37 GMT") == 30
    assert asked("soon") is None


def test_each_answer_has_its_kind_and_a_full_disk_alone_is_the_policys() -> None:
    from daytona.common.errors import create_daytona_error

    kinds = {
        401: SandboxRefused, 403: SandboxRefused, 404: SandboxVanished, 429: SandboxQuota,
        408: SandboxError, 500: SandboxError, 502: SandboxError, 503: SandboxError, 504: SandboxError,
    }  # fmt: skip
    for status, kind in kinds.items():
        error = sandbox_error(create_daytona_error("m", status_code=status), "create")
        assert type(error) is kind and error.outcome is Outcome.SANDBOX_ERROR, status
    quota = create_daytona_error("Total CPU limit exceeded", status_code=403)
    assert type(sandbox_error(quota, "create")) is SandboxQuota
    full = create_daytona_error("write /app/x: no space left on device", status_code=500)
    assert type(sandbox_error(full, "upload")) is SandboxDied
