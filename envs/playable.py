"""Which Tasks an episode can play: what is asked for and not done yet is refused by name, never passed over.

Invariant: a Task that passes loses none of its meaning to the episode. What depends on the Sandbox (network, image,
GPUs) is its provider's to refuse. Called by envs/tasksets before any work starts, and by envs/episode.py.
"""

from collections.abc import Iterator, Mapping

from envs.errors import TaskError
from envs.task import Environment, Network, Task
from envs.templating import resolve_variables


def refuse_unplayable(task: Task, *, host: Mapping[str, str] | None = None) -> None:
    """Raises TaskError, one line, for the first thing that the Task asks for and no episode does.

    A host variable that an env needs and `host` (None: this process's environment) lacks is refused too.
    """
    reason = next(unplayable(task, host=host), None)
    if reason is not None:
        raise TaskError(f"task {task.id}: {reason}; leave this task out, or drop that from {task.path / 'task.toml'}")


def unplayable(task: Task, *, host: Mapping[str, str] | None = None) -> Iterator[str]:
    """What the Task asks for and no episode does, one phrase each."""
    environment = task.environment
    asked = {
        "environment.mcp_servers": bool(environment.mcp_servers),
        "environment.skills_dir": environment.skills_dir is not None,
        "trajectory.json (a prior trajectory)": task.has_prior_trajectory,
    }
    yield from (f"{name} is not played yet" for name, is_asked in asked.items() if is_asked)
    for phase in (task, *task.steps):
        verifier_baseline = _baseline(phase.verifier.environment or environment)
        networks = (("agent", phase.agent.network, _baseline(environment)),)
        for name, network, baseline in (*networks, ("verifier", phase.verifier.network, verifier_baseline)):
            if network is not None and network != baseline:
                yield f"{name}.network_mode differs from that of the environment, which is not played yet"
    yield from (f"service {name} of a compose file is not played yet" for name in sorted(_services(task)))
    for env in (environment.env, *(phase.verifier.env for phase in (task, *task.steps))):
        try:
            resolve_variables(env, host=host)
        except TaskError as error:
            yield str(error)


def _baseline(environment: Environment) -> Network:
    return Network(mode=environment.network_mode, allowed_hosts=environment.allowed_hosts)


def _services(task: Task) -> set[str]:
    """Of artifacts and collect commands, those that are not the agent's own Sandbox."""
    phases = (task, *task.steps)
    named = [artifact.service or "main" for phase in phases for artifact in phase.artifacts]
    return {*named, *(collect.service for phase in phases for collect in phase.verifier.collect)} - {"main"}
