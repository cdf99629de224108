"""What a task.toml says: every field of Harbor's schema 1.4, with its legacy forms.

Invariant: each known key is read or refused by name, and what is left is listed in `ignored_keys` (Harbor ignores
unknown keys too, so they are no error). Files beside task.toml are not looked at: envs/harbor.py does that.
"""

import re
import tomllib
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal, cast

from envs.environment_toml import read_environment, read_healthcheck, read_network
from envs.task import (
    AgentSpec,
    Artifact,
    Collect,
    Environment,
    Healthcheck,
    Limits,
    Provenance,
    Publication,
    VerifierSpec,
)
from envs.toml_table import Fault, Table

_PACKAGE_NAME = re.compile(r"[a-zA-Z0-9][\w.-]*/[a-zA-Z0-9][\w.-]*", re.ASCII)
_SERVICE_NAME = re.compile(r"[a-zA-Z0-9][\w.-]*", re.ASCII)
_NOT_IN_STEP_NAMES = re.compile(r'[<>:"/\\|?*\x00-\x1f\x7f]')


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSettings:
    """A [[steps]] entry: a Step without its instruction."""

    name: str
    agent: AgentSpec
    verifier: VerifierSpec
    limits: Limits
    min_reward: Mapping[str, float]
    healthcheck: Healthcheck | None
    artifacts: tuple[Artifact, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """A whole task.toml: a Task without its files."""

    environment: Environment
    verifier: VerifierSpec
    limits: Limits
    agent: AgentSpec
    solution_env: Mapping[str, str]
    steps: tuple[StepSettings, ...]
    step_rewards: Literal["mean", "final"]
    artifacts: tuple[Artifact, ...]
    provenance: Provenance
    publication: Publication | None
    metadata: Mapping[str, Any]
    ignored_keys: tuple[str, ...]


# Generated sets repeat a few files thousands of times, and tomllib is pure Python.
@lru_cache(maxsize=256)
def parse_settings(text: str) -> Settings:
    """The Settings in the text of a task.toml. Raises Fault."""
    try:
        root = Table("", tomllib.loads(text))
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise Fault(f"not valid TOML: {error}; correct that line") from None
    _check_version(root)
    metadata = root.table("metadata")
    agent, limits = _read_agent(root.table("agent"))
    settings = Settings(
        environment=read_environment(root.table("environment")),
        verifier=_read_verifier(root.table("verifier")),
        limits=limits,
        agent=agent,
        solution_env=root.table("solution").strings("env"),
        steps=(),
        step_rewards="final" if root.choice("multi_step_reward_strategy", ("mean", "final")) == "final" else "mean",
        artifacts=_read_artifacts(root),
        provenance=_read_provenance(root.text("source"), metadata.values),
        publication=_read_publication(root.optional_table("task")),
        metadata=metadata.values,
        ignored_keys=(),
    )
    return _complete(settings, root)


def _complete(settings: Settings, root: Table) -> Settings:
    """With the steps, and the keys that nobody read."""
    steps = tuple(_read_step(table) for table in root.tables("steps"))
    seen: set[str] = set()
    for step in steps:
        folded = unicodedata.normalize("NFC", step.name).casefold()  # some file systems fold case and accents
        if folded in seen:
            raise Fault(f"steps: the name {step.name!r} occurs twice; rename one")
        seen.add(folded)
    unread = tuple(key for key in root.unread() if not key.startswith("metadata."))
    return replace(settings, steps=steps, ignored_keys=unread)


def _check_version(root: Table) -> None:
    """`version` is the name of `schema_version` in schema 1.0."""
    current, legacy = root.text("schema_version"), root.text("version")
    version = current or legacy or "1.4"
    if version.split(".")[0] != "1":
        raise Fault(f"schema_version {version!r} is unknown; use 1.4")


def _read_agent(table: Table) -> tuple[AgentSpec, Limits]:
    agent = AgentSpec(user=_read_user(table), network=read_network(table))
    return agent, Limits(agent_timeout_s=table.number("timeout_sec"))


def _read_user(table: Table) -> str | int | None:
    value = table.raw("user")
    if value is None or (isinstance(value, str) and value.strip()):
        return value
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    raise Fault(f"{table.key('user')} must be a name or a number from 0, got {value!r}")


def _read_verifier(table: Table) -> VerifierSpec:
    timeout_s = table.number("timeout_sec")
    mode = table.choice("environment_mode", ("shared", "separate"))
    own = table.optional_table("environment")
    if mode == "shared" and own is not None:
        raise Fault(f"{table.key('environment')} contradicts environment_mode 'shared'; drop one of them")
    return VerifierSpec(
        timeout_s=VerifierSpec().timeout_s if timeout_s is None else timeout_s,
        env=table.strings("env"),
        user=_read_user(table),
        network=read_network(table),
        is_separate=mode == "separate" or own is not None,
        environment=None if own is None else read_environment(own),
        collect=tuple(_read_collect(entry) for entry in table.tables("collect")),
    )


def _read_collect(table: Table) -> Collect:
    return Collect(
        command=table.required_text("command"),
        service=_read_service(table) or "main",
        timeout_s=table.number("timeout_sec") or Collect(command="").timeout_s,
        user=_read_user(table),
    )


def _read_service(table: Table) -> str | None:
    name = table.text("service")
    if name is not None and not _SERVICE_NAME.fullmatch(name.strip()):
        raise Fault(f"{table.key('service')} must be letters, digits, '.', '_' and '-', got {name!r}")
    return None if name is None else name.strip()


def _read_step(table: Table) -> StepSettings:
    agent, limits = _read_agent(table.table("agent"))
    return StepSettings(
        name=_read_step_name(table),
        agent=agent,
        verifier=_read_verifier(table.table("verifier")),
        limits=limits,
        min_reward=_read_min_reward(table),
        healthcheck=read_healthcheck(table),
        artifacts=_read_artifacts(table),
    )


def _read_step_name(table: Table) -> str:
    """The name is a directory under steps/, so it must be one on every system."""
    name = table.required_text("name")
    if name in (".", "..") or name.endswith((".", " ")) or _NOT_IN_STEP_NAMES.search(name) or len(name.encode()) > 255:
        raise Fault(f"{table.key('name')} {name!r} is no portable directory name; use letters, digits, '-' and '_'")
    return name


def _read_min_reward(table: Table) -> dict[str, float]:
    value = table.raw("min_reward")
    if value is None:
        return {}
    floors = cast(dict[str, Any], value) if isinstance(value, dict) else {"reward": value}
    for floor in floors.values():
        if isinstance(floor, bool) or not isinstance(floor, int | float) or floor != floor:
            raise Fault(f"{table.key('min_reward')} must be a number or a table of numbers, got {value!r}")
    return {key: float(floor) for key, floor in floors.items()}


def _read_artifacts(table: Table) -> tuple[Artifact, ...]:
    entries = table.list_of("artifacts")
    name = table.key("artifacts")
    return tuple(_read_artifact(entry, f"{name}[{index}]") for index, entry in enumerate(entries))


def _read_artifact(entry: object, where: str) -> Artifact:
    """A path, or a table with one."""
    if not isinstance(entry, str | dict):
        raise Fault(f"{where} must be a path or a table, got {entry!r}")
    table = Table(where, {"source": entry} if isinstance(entry, str) else cast(dict[str, Any], entry))
    source, destination = table.required_text("source"), table.text("destination") or None
    artifact = Artifact(
        source=source, destination=destination, exclude=table.texts("exclude"), service=_read_service(table)
    )
    if ".." in source.split("/"):
        raise Fault(f"{where}.source {source!r} must not hold '..'; name the path itself")
    if destination is not None and not _is_inner_path(destination):
        raise Fault(f"{where}.destination {destination!r} must be a relative path without '..', not manifest.json")
    if artifact.service not in (None, "main") and not source.startswith("/"):
        raise Fault(f"{where}.source {source!r} of service {artifact.service} must be absolute")
    return artifact


def _is_inner_path(path: str) -> bool:
    parts = path.split("/")
    return not path.startswith("/") and "\\" not in path and ".." not in parts and path.rstrip("/") != "manifest.json"


def _read_provenance(source: str | None, metadata: Mapping[str, Any]) -> Provenance:
    """Where the Task came from; metadata is free in Harbor, so only strings of the names we know are taken."""
    words = {key: value for key, value in metadata.items() if isinstance(value, str)}
    return Provenance(
        source=source or words.get("source", ""),
        licence=words.get("licence", words.get("license", "")),
        parent=words.get("parent", ""),
        family=words.get("family", ""),
        split=words.get("split", ""),
    )


def _read_publication(table: Table | None) -> Publication | None:
    if table is None:
        return None
    name = table.required_text("name")
    if not _PACKAGE_NAME.fullmatch(name) or ".." in name:
        raise Fault(f'task.name must be "org/name" of letters, digits, ".", "_" and "-", got {name!r}')
    authors = [(author.required_text("name"), author.text("email")) for author in table.tables("authors")]
    return Publication(
        name=name,
        version=table.text("version") or "",
        description=table.text("description") or "",
        authors=tuple(f"{author} <{email}>" if email else author for author, email in authors),
        keywords=table.texts("keywords"),
    )
