"""A podman provider for each test; podman itself is installed on the first use."""

from collections.abc import AsyncGenerator

import pytest

from envs.containers.provider import ContainerProvider
from tests.envs.containers.podman import install_podman, make_podman


@pytest.fixture(scope="session")
def image() -> str:
    return install_podman()


@pytest.fixture
async def provider(image: str) -> AsyncGenerator[ContainerProvider]:
    provider = make_podman(image)
    yield provider
    await provider.close()
