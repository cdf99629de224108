"""The Task record: what to do, where, how it is judged, within which limits.

Invariant: frozen and checked; whoever holds a Task may run it.
Made by envs/harbor.py from Harbor task directories; read by sandboxes, harnesses, verifiers and episodes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """What the Sandbox offers. None leaves a resource at the provider's default."""

    docker_image: str | None = None
    workdir: str | None = None
    cpus: float | None = None
    memory_mb: int | None = None
    storage_mb: int | None = None
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    network_mode: str = "public"
    """"public", "no-network" or "allowlist"; a provider that cannot grant it refuses or says what it gives instead."""
    build_timeout_s: float = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifierSpec:
    """How the Task is judged."""

    timeout_s: float = 600.0
    env: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a rollout may spend; the harness's own limits (turns, tokens) are its config."""

    agent_timeout_s: float | None = None
    """None: the episode's config decides."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """Where the Task came from."""

    source: str = ""
    licence: str = ""
    parent: str = ""
    family: str = ""
    split: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One thing to do, with its judge."""

    id: str
    """Unique in its set; the directory's name."""
    instruction: str
    environment: Environment
    verifier: VerifierSpec
    limits: Limits
    provenance: Provenance
    path: Path
    """The Harbor task directory on the host: environment/, tests/ and solution/ are read from it when needed."""
