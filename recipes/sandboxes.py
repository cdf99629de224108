"""Sandboxes: what is running in any provider under a lease, and the removal of what nobody holds any more.

    python -m recipes.sandboxes list
    python -m recipes.sandboxes sweep                    # expired, or held by a process that is gone
    python -m recipes.sandboxes sweep --of-run rloo-1    # all of one run, alive or not
    python -m recipes.sandboxes list --providers daytona podman

A provider that this machine cannot reach is passed over, with a line that says why, unless it was asked for by name.
"""

import time
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Annotated, Any

import tyro

from envs.errors import SandboxError
from envs.lease import LeasedSandbox, sweep
from envs.local.provider import LocalProvider
from envs.providers import LeasingProvider, ProviderName, SandboxConfig, build_provider
from recipes.launch import launch


class Action(StrEnum):
    """What to do."""

    LIST = "list"
    SWEEP = "sweep"


@dataclass(frozen=True, kw_only=True)
class Config:
    """List or sweep sandboxes."""

    action: Annotated[Action, tyro.conf.Positional]
    providers: tuple[ProviderName, ...] = ()
    """Which to ask; none named: every one that can be reached from here."""
    of_run: str | None = None
    """Only sandboxes of this run; a sweep then removes them all."""
    sandbox: SandboxConfig = field(default_factory=SandboxConfig)
    """How to reach the providers."""


async def main(config: Config) -> dict[str, Any]:
    """Prints one line a sandbox; returns how many were found (list) or removed (sweep)."""
    counts = dict[str, Any]()
    for name in config.providers or tuple(ProviderName):
        try:
            found = await _act(name, config)
        except SandboxError as error:
            if config.providers:
                raise SystemExit(f"error: {name}: {error}") from None
            print(f"{name}: passed over ({error})")
            continue
        for sandbox in found:
            print(describe(sandbox, time.time()))
        counts[str(name)] = len(found)
    done = "removed" if config.action is Action.SWEEP else "found"
    print(f"{done}: {', '.join(f'{name} {count}' for name, count in counts.items()) or 'no provider could be reached'}")
    return counts


def describe(sandbox: LeasedSandbox, now: float) -> str:
    """One line: where, what, whose, and for how long."""
    lease = sandbox.lease
    left = "abandoned" if lease.is_abandoned(now) else f"{(lease.expires_at - now) / 60:.0f} min left"
    return f"{sandbox.provider} {sandbox.id[:40]} run={lease.run} owner={lease.owner} {left} ({sandbox.state})"


async def _act(name: ProviderName, config: Config) -> list[LeasedSandbox]:
    provider = build_provider(replace(config.sandbox, provider=name))
    try:
        if config.action is Action.SWEEP:
            return await _sweep(provider, config)
        return [s for s in await provider.list_leases() if config.of_run in (None, s.lease.run)]
    finally:
        await provider.close()


async def _sweep(provider: LeasingProvider, config: Config) -> list[LeasedSandbox]:
    removed = await sweep(provider, run=config.of_run)
    if isinstance(provider, LocalProvider):
        await provider.sweep_machine()  # also what a killed driver left without a lease
    return removed


if __name__ == "__main__":
    launch(Config, main)
