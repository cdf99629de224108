"""The Sandbox contract, kept through the real client against a service on this machine."""

from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from envs.daytona.config import DaytonaConfig
from envs.daytona.provider import DaytonaProvider
from tests.contracts.sandbox import CHECKS, SandboxCheck
from tests.envs.local.boxes import make_provider, make_task
from tests.fakes.daytona_api import serve_daytona

pytestmark = pytest.mark.sandbox


@pytest.fixture
async def provider(monkeypatch: pytest.MonkeyPatch) -> AsyncGenerator[DaytonaProvider]:
    monkeypatch.setenv("DAYTONA_API_KEY", "key")
    boxes = make_provider()
    async with serve_daytona(boxes) as api:
        provider = DaytonaProvider(DaytonaConfig(api_url=api.url, poll_s=2))
        yield provider
        await provider.close()
    await boxes.close()


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_daytona_sandbox(check: SandboxCheck, provider: DaytonaProvider, tmp_path: Path) -> None:
    await check(provider, make_task(workdir="/app"), tmp_path)
