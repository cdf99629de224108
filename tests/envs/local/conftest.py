"""A provider for each test, closed afterwards."""

from collections.abc import AsyncGenerator

import pytest

from envs.local.provider import LocalProvider
from envs.sandbox import Sandbox
from tests.envs.local.boxes import SMALL, make_provider, make_task


@pytest.fixture
async def provider() -> AsyncGenerator[LocalProvider]:
    provider = make_provider()
    yield provider
    await provider.close()


@pytest.fixture
async def box(provider: LocalProvider) -> AsyncGenerator[Sandbox]:
    """A small box: 256 MB of memory and 64 MB of files."""
    async with provider.start(make_task(**SMALL), owner="attacker") as sandbox:
        yield sandbox
