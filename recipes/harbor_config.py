"""A Harbor job file (YAML or JSON) as what an evaluation needs to know.

Invariant: what changes a result is taken over or refused by name; what does not (progress displays, credentials checks)
is passed over, and unknown keys are said in one line, as Harbor ignores them. Called by recipes/evaluate.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from envs.build import HarnessName
from envs.terminus2.prompts import ReplyFormat
from envs.toml_table import Fault, Table

logger = logging.getLogger(__name__)

_MAX_TURNS = 1_000_000  # Harbor's own default: none
_HARNESSES = tuple(str(name) for name in HarnessName)
_TURN_KEYS = ("max_turns", "max_episodes", "episodes")
# True or false of these changes what is kept of a rollout, not the rollout; our stores keep the tokens anyway.
_RECORDING_KEYS = (
    "record_terminal_session",
    "collect_rollout_details",
    "store_all_messages",
    "suppress_max_turns_warning",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class HarborJobFile:
    """A Harbor job with one agent and one set of tasks. None leaves a value at the recipe's default."""

    directory: Path
    """Where the job's results go: jobs_dir/job_name."""
    tasks: str
    """As `--tasks` takes it."""
    num_tasks: int | None
    num_attempts: int
    num_concurrent: int
    harness: HarnessName
    model: str | None
    reply_format: ReplyFormat
    summarize: bool
    summary_threshold: int | None
    """Free tokens below which a context is summed up."""
    max_turns: int
    temperature: float | None
    max_input_tokens: int | None
    max_output_tokens: int | None
    timeout_multiplier: float
    agent_timeout_s: float | None
    max_agent_timeout_s: float | None
    max_verifier_timeout_s: float | None


def read_harbor_job(path: Path) -> HarborJobFile:
    """The job of a file; ValueError, one line, with the key that cannot be taken over and the remedy."""
    try:
        content: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file; give a Harbor job file") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path}: must be a table of job settings, got {type(content).__name__}")
    root = Table("", content)
    try:
        job = _read_job(root, default_name=path.stem)
    except Fault as fault:
        raise ValueError(f"{path}: {fault}") from None
    if unread := root.unread():
        logger.warning("config=%s unknown keys ignored: %s", path, ", ".join(unread))
    return job


def _read_job(root: Table, *, default_name: str) -> HarborJobFile:
    legacy = root.table("orchestrator")  # of Harbor before its settings moved to the top
    for table in (root, legacy):
        _refuse_undone(table)
    _read_environment(root.table("environment"))
    verifier, agent = root.table("verifier"), _only(root, "agents")
    max_verifier_timeout_s = verifier.number("max_timeout_sec")
    _refuse(verifier, {"disable": False, "env": {}}, "tests run as their task says")
    concurrent = [table.count("n_concurrent_trials", at_least=1) for table in (root, legacy)]
    tasks, num_tasks = _read_tasks(root)
    return HarborJobFile(
        directory=Path(root.text("jobs_dir") or "jobs") / (root.text("job_name") or default_name),
        tasks=tasks,
        num_tasks=num_tasks,
        num_attempts=root.count("n_attempts", at_least=1) or 1,
        num_concurrent=concurrent[0] or concurrent[1] or 4,
        timeout_multiplier=root.number("timeout_multiplier") or 1.0,
        max_verifier_timeout_s=max_verifier_timeout_s,
        **_read_agent(agent),
    )


def _refuse_undone(table: Table) -> None:
    """Of the job's own settings, those that an evaluation does not know and that would change a result."""
    _pass_over(table, "quiet", "debug", "skip_credential_checks")
    retry = table.table("retry")
    _refuse(retry, {"max_retries": 0}, "an attempt that fails is excluded, not retried", rest=False)
    _pass_over(retry, *retry.values)
    phases = ("agent", "verifier", "agent_setup", "environment_build")
    undone: dict[str, Any] = {"install_only": False, "metrics": [], "artifacts": [], "user_agent": None}
    undone |= {"source_jobs": [], "extra_instructions": [], "extra_instruction_paths": []}
    undone |= {f"{phase}_timeout_multiplier": None for phase in phases}
    _refuse(table, undone, "an evaluation does not do that", rest=False)


def _read_agent(agent: Table) -> dict[str, Any]:
    """The fields of HarborJobFile that the agent's table decides."""
    kwargs = agent.table("kwargs")
    info = kwargs.table("model_info")
    fields = {
        "harness": HarnessName(agent.choice("name", _HARNESSES) or HarnessName.ORACLE),
        "model": agent.text("model_name"),
        "reply_format": ReplyFormat(
            kwargs.choice("parser_name", [str(name) for name in ReplyFormat]) or ReplyFormat.JSON
        ),
        "summarize": kwargs.flag("enable_summarize") or False,
        "summary_threshold": kwargs.count("proactive_summarization_threshold"),
        "max_turns": next((turns for key in _TURN_KEYS if (turns := kwargs.count(key, at_least=1))), _MAX_TURNS),
        "temperature": kwargs.number("temperature", at_least_zero=True),
        "max_input_tokens": info.count("max_input_tokens", at_least=1),
        "max_output_tokens": info.count("max_output_tokens", at_least=1),
        "agent_timeout_s": agent.number("override_timeout_sec"),
        "max_agent_timeout_s": agent.number("max_timeout_sec"),
    }
    if fields["harness"] is HarnessName.TERMINUS_2 and not kwargs.has("enable_summarize"):
        logger.warning(
            "agents[0].kwargs: Harbor summarizes a full context unless told otherwise; here the rollout ends with "
            "context_limit; enable_summarize says which you want"
        )
    _pass_over(info, "input_cost_per_token", "output_cost_per_token")
    for name in _RECORDING_KEYS:
        kwargs.flag(name)
    _refuse(kwargs, {}, "the harness here has no such setting")
    _refuse(agent, {"env": {}, "skills": [], "mcp_servers": []}, "an evaluation does not do that")
    return fields


def _read_environment(table: Table) -> None:
    kind = table.text("type")
    if kind is not None:
        logger.warning("environment.type %s is passed over: --episode.sandbox.provider says where tasks run", kind)
    known = {"delete": True, "force_build": False, "stream": False, "cpu_enforcement_policy": "auto"}
    known |= {"memory_enforcement_policy": "auto", "env": {}, "kwargs": {}}
    _refuse(table, known, "sandboxes are set up by --episode.sandbox.provider and its flags")


def _read_tasks(root: Table) -> tuple[str, int | None]:
    """What `--tasks` would say, and how many of them."""
    sources = [*root.tables("datasets"), *root.tables("tasks")]
    if len(sources) != 1:
        raise Fault(f"datasets and tasks name {len(sources)} sources; an evaluation has one, so run one for each")
    (source,) = sources
    path, registry, name = source.text("path"), source.text("registry_path"), source.text("name")
    version = source.text("version")
    num_tasks = source.count("n_tasks", at_least=1)
    _pass_over(source, "overwrite", "download_dir", "source")
    _refuse(source, {"task_names": None, "exclude_task_names": None}, "give a directory of the wanted tasks")
    if path is not None:
        return path, num_tasks
    if registry is None or name is None:
        raise Fault(f"{source.path} lies on another machine; download it and give its path, or registry_path and name")
    return f"{registry}:{name}@{version}" if version else f"{registry}:{name}", num_tasks


def _only(root: Table, name: str) -> Table:
    tables = root.tables(name)
    if len(tables) != 1:
        raise Fault(f"{name} lists {len(tables)}; an evaluation has one, so run one for each")
    return tables[0]


def _pass_over(table: Table, *names: str) -> None:
    for name in names:
        table.raw(name)


def _refuse(table: Table, defaults: Mapping[str, Any], why: str, *, rest: bool = True) -> None:
    """Refuses any of `defaults` that says something else, and with `rest` every other key that says anything."""
    for key, default in defaults.items():
        value = table.raw(key)
        if value is not None and value != default:
            raise Fault(f"{table.key(key)} {value!r}: {why}; remove it")
    for key, value in table.values.items() if rest else ():
        if table.key(key) in table.unread() and value not in (None, False, [], {}, ""):
            raise Fault(f"{table.key(key)} {value!r}: {why}; remove it")
        table.raw(key)
