"""Which SandboxProvider a run uses, built from one config; and the registers of all of them, for sweeping.

Invariant: a client library is imported only when its provider is chosen.
Composed into envs/build.py; called by it, by actors/rollout_pool.py and by recipes/sandboxes.py.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from envs.containers.engine import EngineName
from envs.containers.provider import ContainerConfig, ContainerProvider
from envs.creation import CreationConfig, CreationGate
from envs.daytona.config import DaytonaConfig
from envs.errors import SandboxRefused
from envs.lease import LeaseRegister, LeaseTerms
from envs.local.provider import LocalConfig, LocalProvider
from envs.sandbox import SandboxProvider


class ProviderName(StrEnum):
    """Where Sandboxes run."""

    LOCAL = "local"
    """On this machine, isolated by bubblewrap."""
    DOCKER = "docker"
    PODMAN = "podman"
    DAYTONA = "daytona"
    """At a Daytona service."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxConfig:
    """The provider and what each needs; the configs of those that are not chosen have no effect."""

    provider: ProviderName = ProviderName.LOCAL
    lease_s: float = 4 * 3600.0
    """A sandbox older than this may be removed by anyone's sweep; must exceed the longest rollout."""
    creation: CreationConfig = field(default_factory=CreationConfig)
    local: LocalConfig = field(default_factory=LocalConfig)
    container: ContainerConfig = field(default_factory=ContainerConfig)
    """Of docker and of podman."""
    daytona: DaytonaConfig = field(default_factory=DaytonaConfig)

    def __post_init__(self) -> None:
        if self.lease_s <= 0:
            raise ValueError(f"lease_s must be > 0, got {self.lease_s}")

    @property
    def is_gated(self) -> bool:
        """Whether creations of all workers pass one gate: a service may ask for a pause, or there are limits."""
        limits = (self.creation.per_s, self.creation.max_at_once)
        return self.provider is ProviderName.DAYTONA or limits != (None, None)


class LeasingProvider(SandboxProvider, LeaseRegister, Protocol):
    """What every real provider is."""


def build_provider(config: SandboxConfig, *, run: str = "unnamed", gate: CreationGate | None = None) -> LeasingProvider:
    """The configured provider; its Sandboxes carry Leases of `run`. `gate` None: no limit that others share.

    Raises SandboxRefused when the provider's client is not installed.
    """
    terms = LeaseTerms(run=run, duration_s=config.lease_s)
    if config.provider is ProviderName.LOCAL:
        return LocalProvider(config.local, terms=terms, gate=gate)
    if config.provider is ProviderName.DAYTONA:
        try:
            from envs.daytona.provider import DaytonaProvider  # its client takes seconds to import
        except ModuleNotFoundError as error:
            raise SandboxRefused(
                f"daytona: no module {error.name}; install the daytona extra, or use another provider"
            ) from error
        return DaytonaProvider(config.daytona, terms=terms, gate=gate)
    engine = EngineName(config.provider.value)
    return ContainerProvider(engine, config.container, terms=terms, gate=gate, cache_dir=config.local.cache_dir)
