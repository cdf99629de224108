"""The Sandbox contract, kept by podman containers."""

from pathlib import Path

import pytest

from envs.containers.provider import ContainerProvider
from tests.contracts.sandbox import CHECKS, SandboxCheck
from tests.envs.local.boxes import IS_ROOT, make_task

pytestmark = [pytest.mark.sandbox, pytest.mark.skipif(not IS_ROOT, reason="podman is set up for root here")]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_podman_sandbox(check: SandboxCheck, provider: ContainerProvider, tmp_path: Path) -> None:
    await check(provider, make_task(), tmp_path)
