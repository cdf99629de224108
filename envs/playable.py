"""Which Tasks an episode can play: what is asked for and not done yet is refused by name, never passed over.

Invariant: a Task that passes loses none of its meaning to the episode. What depends on the Sandbox (network, image,
GPUs) is its provider's to refuse. Called by envs/tasksets before any work starts, and by envs/episode.py.
"""

from collections.abc import Iterator, Mapping

from envs.errors import TaskError
from envs.task import Network, Task
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
        "steps (a multi-step task)": bool(task.steps),
        "artifacts": bool(task.artifacts),
        "environment.mcp_servers": bool(environment.mcp_servers),
        "environment.skills_dir": environment.skills_dir is not None,
        "environment.healthcheck": environment.healthcheck is not None,
        "agent.user": task.agent.user is not None,
        "verifier.user": task.verifier.user is not None,
        "verifier.environment_mode separate": task.verifier.is_separate,
        "verifier.collect": bool(task.verifier.collect),
        "trajectory.json (a prior trajectory)": task.has_prior_trajectory,
    }
    yield from (f"{name} is not played yet" for name, is_asked in asked.items() if is_asked)
    for name, network in (("agent", task.agent.network), ("verifier", task.verifier.network)):
        if network is not None and network != _baseline(task):
            yield f"{name}.network_mode differs from that of the environment, which is not played yet"
    for env in (task.environment.env, task.verifier.env):
        try:
            resolve_variables(env, host=host)
        except TaskError as error:
            yield str(error)


def _baseline(task: Task) -> Network:
    return Network(mode=task.environment.network_mode, allowed_hosts=task.environment.allowed_hosts)
