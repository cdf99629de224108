"""The Sandbox contract, kept by the real provider and by the directory that unit tests use in its place."""

from pathlib import Path

import pytest

from envs.local.provider import LocalProvider
from tests.contracts.sandbox import CHECKS, SandboxCheck
from tests.envs.local.boxes import make_task
from tests.fakes.directory_sandbox import DirectoryProvider

every_check = pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)


@pytest.mark.sandbox
@every_check
async def test_local_sandbox(check: SandboxCheck, provider: LocalProvider, tmp_path: Path) -> None:
    await check(provider, make_task(), tmp_path)


@every_check
async def test_directory_sandbox(check: SandboxCheck, tmp_path: Path) -> None:
    await check(DirectoryProvider(tmp_path / "boxes"), make_task(), tmp_path)
