"""The Task record: what to do, where, how it is judged, within which limits.

Invariant: frozen and checked; whoever holds a Task may rely on its values. Whether it can be played here is for
envs/playable.py and the Sandbox's provider to say. Host variables in `env` stay templates ("${NAME}") until
envs/templating.py resolves them at the moment of use, so that no secret travels in a record.
Made by envs/harbor.py from Harbor task directories; read by sandboxes, harnesses, verifiers and episodes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

NetworkMode = Literal["public", "no-network", "allowlist"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """What may be reached."""

    mode: NetworkMode = "public"
    allowed_hosts: tuple[str, ...] = ()
    """With "allowlist" only: host names, "*." wildcards, addresses and CIDR ranges, lower case."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tpu:
    """A TPU slice."""

    type: str
    topology: str
    """Like "2x4"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class McpServer:
    """A tool server that the Task offers to the harness. Headers may hold host variables."""

    name: str
    transport: Literal["sse", "stdio", "streamable-http"] = "sse"
    url: str = ""
    """Of sse and streamable-http."""
    command: str = ""
    """Of stdio."""
    args: tuple[str, ...] = ()
    headers: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True, slots=True, kw_only=True)
class Healthcheck:
    """A command that must exit 0 before the agent starts; the semantics are Docker's."""

    command: str
    interval_s: float = 5.0
    timeout_s: float = 30.0
    start_period_s: float = 0.0
    """Failures in this time after the start do not count."""
    start_interval_s: float = 5.0
    """Between checks within the start period."""
    retries: int = 3
    """So many failures in a row are fatal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Artifact:
    """A file or directory of the Sandbox to keep after the rollout."""

    source: str
    destination: str | None = None
    """Relative; None mirrors the source."""
    exclude: tuple[str, ...] = ()
    service: str | None = None
    """A compose service; None is the agent's own Sandbox."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """What the Sandbox offers. None leaves a resource at the provider's default."""

    docker_image: str | None = None
    """Goes before environment/Dockerfile."""
    workdir: str | None = None
    """Goes before the WORKDIR of the image or Dockerfile."""
    os: Literal["linux", "windows"] = "linux"
    cpus: float | None = None
    memory_mb: int | None = None
    storage_mb: int | None = None
    gpus: int = 0
    gpu_types: tuple[str, ...] = ()
    """Acceptable types; empty accepts any."""
    tpu: Tpu | None = None
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    network_mode: NetworkMode = "public"
    """A provider that cannot grant it refuses or says what it gives instead."""
    allowed_hosts: tuple[str, ...] = ()
    """See Network."""
    build_timeout_s: float = 600.0
    mcp_servers: tuple[McpServer, ...] = ()
    skills_dir: str | None = None
    """Absolute path inside, offered to harnesses that know skills."""
    healthcheck: Healthcheck | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSpec:
    """As whom and with which network the harness acts."""

    user: str | int | None = None
    """None: the image's own user."""
    network: Network | None = None
    """None: that of the environment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Collect:
    """A command run after the agent and before the artifacts are kept."""

    command: str
    service: str = "main"
    timeout_s: float = 60.0
    user: str | int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifierSpec:
    """How the Task is judged."""

    timeout_s: float = 600.0
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    user: str | int | None = None
    network: Network | None = None
    """None: that of the environment."""
    is_separate: bool = False
    """The tests run in a Sandbox of their own, which sees the agent's artifacts only."""
    environment: Environment | None = None
    """Of a separate verifier; None: a fresh copy of the Task's."""
    collect: tuple[Collect, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a rollout may spend; the harness's own limits (turns, tokens) are its config."""

    agent_timeout_s: float | None = None
    """None: the episode's config decides."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One part of a multi-step Task, played in the same Sandbox after the one before; files in steps/NAME.

    A user or network of None is that of the Task. tests/ of the step lie over tests/ of the Task.
    """

    name: str
    instruction: str
    agent: AgentSpec = field(default_factory=AgentSpec)
    verifier: VerifierSpec = field(default_factory=VerifierSpec)
    limits: Limits = field(default_factory=Limits)
    min_reward: Mapping[str, float] = field(default_factory=dict[str, float])
    """By reward key; the steps after this one are not played when one is below. A plain number is that of "reward"."""
    healthcheck: Healthcheck | None = None
    artifacts: tuple[Artifact, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """Where the Task came from."""

    source: str = ""
    licence: str = ""
    parent: str = ""
    family: str = ""
    split: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Publication:
    """Under which name the Task is published: [task] of task.toml."""

    name: str
    """"org/name"."""
    version: str = ""
    description: str = ""
    authors: tuple[str, ...] = ()
    """"Name <email>", or the name alone."""
    keywords: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One thing to do, with its judge."""

    id: str
    """Unique in its set; the directory's name."""
    instruction: str
    """"" in a multi-step Task without one of its own: each Step has its instruction."""
    environment: Environment
    verifier: VerifierSpec
    limits: Limits
    provenance: Provenance
    path: Path
    """The Harbor task directory on the host: environment/, tests/ and solution/ are read from it when needed."""
    agent: AgentSpec = field(default_factory=AgentSpec)
    solution_env: Mapping[str, str] = field(default_factory=dict[str, str])
    """For solution/solve.sh; may hold host variables."""
    steps: tuple[Step, ...] = ()
    """Empty: the Task is one step, and the fields above are all of it."""
    step_rewards: Literal["mean", "final"] = "mean"
    """How the rewards of the steps become that of the Task."""
    artifacts: tuple[Artifact, ...] = ()
    publication: Publication | None = None
    compose_file: str | None = None
    """Name of the file in environment/ that asks for several containers."""
    has_prior_trajectory: bool = False
    """trajectory.json (ATIF) holds a conversation that the harness is to go on from."""
    metadata: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """[metadata] of task.toml, as it stands."""
    ignored_keys: tuple[str, ...] = ()
    """Keys of task.toml that mean nothing, here or to Harbor."""
