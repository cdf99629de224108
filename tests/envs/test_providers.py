"""One config chooses the provider."""

import sys

import pytest

from envs.containers.provider import ContainerProvider
from envs.creation import CreationConfig
from envs.errors import SandboxRefused
from envs.local.provider import LocalProvider
from envs.providers import ProviderName, SandboxConfig, build_provider


async def test_the_config_names_the_provider() -> None:
    assert isinstance(build_provider(SandboxConfig()), LocalProvider)
    podman = build_provider(SandboxConfig(provider=ProviderName.PODMAN))
    assert isinstance(podman, ContainerProvider) and podman.name == "podman"


def test_workers_share_a_gate_where_a_service_may_ask_for_a_pause_or_a_limit_is_set() -> None:
    assert not SandboxConfig().is_gated
    assert SandboxConfig(provider=ProviderName.DAYTONA).is_gated
    assert SandboxConfig(creation=CreationConfig(per_s=2)).is_gated
    assert SandboxConfig(creation=CreationConfig(max_at_once=2)).is_gated


def test_a_lease_must_have_a_time() -> None:
    with pytest.raises(ValueError, match="lease_s must be > 0, got 0"):
        SandboxConfig(lease_s=0)


def test_a_client_that_is_not_installed_is_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "envs.daytona.provider", raising=False)
    monkeypatch.setitem(sys.modules, "daytona", None)
    with pytest.raises(SandboxRefused, match="no module daytona; install the daytona extra"):
        build_provider(SandboxConfig(provider=ProviderName.DAYTONA))
