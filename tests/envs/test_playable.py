"""What an episode does not play is refused by name, and host variables are resolved where they are used."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from envs.errors import SandboxRefused, TaskError
from envs.harbor import load_task
from envs.local.provider import LocalProvider
from envs.playable import refuse_unplayable, unplayable
from envs.task import (
    AgentSpec,
    Artifact,
    Collect,
    Environment,
    Healthcheck,
    McpServer,
    Network,
    Step,
    Task,
    Tpu,
    VerifierSpec,
)
from envs.templating import resolve_variables
from tests.envs.task_dirs import make_task_dir


@pytest.fixture
def task(tmp_path: Path) -> Task:
    return load_task(make_task_dir(tmp_path))


def _step(**fields: Any) -> Step:
    return Step(name="one", instruction="Do it", **fields)


def test_a_plain_task_is_played(task: Task) -> None:
    refuse_unplayable(task)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"environment": Environment(skills_dir="/skills")}, "environment.skills_dir"),
        ({"environment": Environment(mcp_servers=(McpServer(name="x", url="http://x"),))}, "environment.mcp_servers"),
        ({"agent": AgentSpec(network=Network(mode="allowlist"))}, "agent.network_mode"),
        ({"verifier": VerifierSpec(network=Network(mode="public"))}, "verifier.network_mode"),
        ({"steps": (_step(agent=AgentSpec(network=Network(mode="allowlist"))),)}, "agent.network_mode"),
        ({"artifacts": (Artifact(source="/a", service="db"),)}, "service db of a compose file"),
        ({"steps": (_step(verifier=VerifierSpec(collect=(Collect(command="x", service="db"),))),)}, "service db"),
        ({"has_prior_trajectory": True}, "trajectory.json"),
    ],
)
def test_what_no_episode_does_is_refused_by_name(task: Task, change: dict[str, Any], name: str) -> None:
    with pytest.raises(TaskError) as caught:
        refuse_unplayable(replace(task, **change))
    message = str(caught.value)
    assert message.startswith("task a-task: ")
    assert name in message
    assert "\n" not in message


def test_steps_artifacts_health_checks_users_and_separate_verifiers_are_played(task: Task) -> None:
    verifier = VerifierSpec(is_separate=True, user="root", collect=(Collect(command="true", service="main"),))
    environment = Environment(network_mode="no-network", healthcheck=Healthcheck(command="true"))
    asks = replace(task, environment=environment, agent=AgentSpec(user="ada"), verifier=verifier)
    refuse_unplayable(replace(asks, steps=(_step(),), artifacts=(Artifact(source="/app"),)))


def test_a_phase_that_names_the_network_of_the_environment_is_played(task: Task) -> None:
    refuse_unplayable(replace(task, agent=AgentSpec(network=Network(mode="no-network"))))


def test_a_host_variable_that_is_missing_is_refused_by_name(task: Task) -> None:
    wants = replace(task, verifier=VerifierSpec(env={"KEY": "${JUDGE_KEY}"}))
    assert list(unplayable(wants, host={"JUDGE_KEY": "k"})) == []
    with pytest.raises(TaskError, match="the host has no variable JUDGE_KEY; export it"):
        refuse_unplayable(wants, host={})


def test_a_template_takes_the_host_variable_or_else_its_default() -> None:
    env = {"A": "${X}", "B": "${Y:-two words}", "C": "${X:-other}", "D": "${Z:-}", "E": "a${X}b", "F": "$X"}
    assert resolve_variables(env, host={"X": "", "Q": "q"}) == {
        "A": "",
        "B": "two words",
        "C": "",
        "D": "",
        "E": "a${X}b",
        "F": "$X",
    }


@pytest.mark.parametrize(
    ("environment", "name"),
    [
        ({"network_mode": "public"}, "public network"),
        ({"network_mode": "allowlist"}, "allowlist"),
        ({"gpus": 1}, "gpus"),
        ({"tpu": Tpu(type="v6e", topology="2x4")}, "tpu"),
        ({"os": "windows"}, "os windows"),
    ],
)
def test_the_local_provider_refuses_by_name_what_no_box_has(task: Task, environment: dict[str, Any], name: str) -> None:
    options: dict[str, Any] = {"network_mode": "no-network"} | environment
    with pytest.raises(SandboxRefused, match=name):
        LocalProvider().check(replace(task, environment=Environment(**options)))
    with pytest.raises(SandboxRefused, match="compose"):
        LocalProvider().check(replace(task, compose_file="docker-compose.yaml"))
    for change in ({"agent": AgentSpec(user="ada")}, {"steps": (_step(verifier=VerifierSpec(user=1000)),)}):
        with pytest.raises(SandboxRefused, match="a user beside root"):
            LocalProvider().check(replace(task, **change))
    asks = Environment(network_mode="no-network", gpus=1)
    for verifier in (VerifierSpec(user="ada", is_separate=True), VerifierSpec(is_separate=True, environment=asks)):
        with pytest.raises(SandboxRefused, match=r"a user beside root|gpus"):
            LocalProvider().check(replace(task, verifier=verifier))
    LocalProvider().check(replace(task, agent=AgentSpec(user=0), verifier=VerifierSpec(user="root")))
