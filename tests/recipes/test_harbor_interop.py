"""Harbor itself reads what we write, and we read task files as Harbor does.

One run of the real package (harbor 0.25 under Python 3.12, scripts/harbor_env.sh) answers every test of this file.
"""

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from envs.registry import content_digest
from envs.task import Environment, Healthcheck
from envs.task_toml import parse_settings
from envs.templating import resolve_variables
from recipes.evaluate import config_of_harbor_job
from recipes.export import Config, ExportFormat, main
from tests.envs.task_dirs import make_task_dir
from tests.envs.test_harbor import FULL_TOML, RARE_TOML, STEPS_TOML
from tests.recipes.test_harbor_config import JOB
from tests.trajectories.records import group, tokens, trajectory, turn
from trajectories.schema import Outcome, Trajectory
from trajectories.store import StoreWriter

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

REPOSITORY = Path(__file__).resolve().parents[2]
LEGACY_TOML = 'version = "1.0"\n[environment]\nmemory = "2G"\nstorage = "512M"\nallow_internet = false\n'
# Harbor refuses each of these; test_harbor.py shows that we do, in one line.
MALFORMED = {
    "mode.toml": '[environment]\nnetwork_mode = "open"\n',
    "hosts.toml": '[environment]\nnetwork_mode = "allowlist"\nallowed_hosts = ["https://a.b/c"]\n',
    "wildcard.toml": '[environment]\nnetwork_mode = "allowlist"\nallowed_hosts = ["*.1.2.3.4"]\n',
    "server.toml": '[[environment.mcp_servers]]\nname = "x"\n',
    "step.toml": '[[steps]]\nname = "../up"\n',
    "twice.toml": '[[steps]]\nname = "One"\n[[steps]]\nname = "one"\n',
    "artifact.toml": 'artifacts = [{ source = "/a", destination = "/b" }]\n',
    "package.toml": '[task]\nname = "no-org"\n',
}
TEMPLATES = {"A": "${SET_HERE}", "B": "${NOT_SET:-two words}", "C": "a${SET_HERE}b", "D": "${NOT_SET:-}"}


def trajectories() -> list[Trajectory]:
    solved = trajectory(
        turn(tokens((1, 2), (3, 4)), reply="ls", observation="a.txt"),
        turn(tokens((5,), (6,), prefix_len=4), reply="done"),
    )
    failed = replace(trajectory(turn(reply="no"), reward=0.0, member=1), evidence="1 test failed")
    late = trajectory(turn(reply="sleep"), outcome=Outcome.AGENT_TIMEOUT, reward=0.0, member=2)
    lost = trajectory(outcome=Outcome.SANDBOX_ERROR, reward=None, member=3)
    return [
        replace(solved, evidence="all good"),
        failed,
        replace(late, error="HarnessTimeout: harness did not end within 5 s"),
        replace(lost, error="SandboxError: no room"),
    ]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("interop")


@pytest.fixture(scope="module")
async def harbor(root: Path) -> dict[str, Any]:
    """What Harbor says of a job directory, a job file, task files and a task directory."""
    with StoreWriter(root / "run" / "store", "w0") as store:
        store.append(group(*trajectories()))
    (root / "run" / "config.json").write_text(json.dumps({"config": {"tasks": "tasks/core"}, "time": 1.7e9}))
    await main(Config(data=(root / "run",), out=root / "jobs" / "nightly", format=ExportFormat.HARBOR))
    (root / "job.yaml").write_text(JOB)
    tomls = {"full.toml": FULL_TOML, "rare.toml": RARE_TOML, "steps.toml": STEPS_TOML, "legacy.toml": LEGACY_TOML}
    (root / "tomls").mkdir()
    for name, text in (tomls | MALFORMED).items():
        (root / "tomls" / name).write_text(text)
    make_task_dir(root, "task", toml=FULL_TOML)
    given = [root / "jobs" / "nightly", root / "job.yaml", root / "tomls", root / "task"]
    script = Path(__file__).with_name("harbor_side.py")
    return json.loads(_run(_environment() / "bin" / "python", script, *given).splitlines()[-1])


def _environment() -> Path:
    """Harbor's own virtual environment, built if it is not there."""
    return Path(_run("bash", REPOSITORY / "scripts" / "harbor_env.sh").strip())


def _run(*command: str | Path) -> str:
    settings = {"TEMPLATES": json.dumps(TEMPLATES), "SET_HERE": "yes", "HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=os.environ | settings)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_harbors_own_model_accepts_every_trajectory(harbor: dict[str, Any]) -> None:
    assert harbor["atif_versions"] == ["ATIF-v1.8"] * 4
    assert harbor["atif_steps"] == {"g0-0": 3, "g0-1": 2, "g0-2": 2, "g0-3": 1}


def test_harbor_view_shows_the_job_its_trials_and_their_trajectories(harbor: dict[str, Any]) -> None:
    view = harbor["view"]
    assert [job["name"] for job in view["jobs"]] == ["nightly"]
    assert view["job"]["stats"]["n_completed_trials"] == 4
    assert view["job"]["stats"]["n_errored_trials"] == 2
    assert view["config"]["job_name"] == "nightly"
    assert [(task["task_name"], task["n_trials"]) for task in view["tasks"]] == [("t0", 4)]
    rewards = sorted(trial["reward"] for trial in view["trials"] if trial["reward"] is not None)
    assert rewards == [0.0, 0.0, 1.0]
    errors = {trial["error_type"] for trial in view["trials"]}
    assert errors == {None, "AgentTimeoutError", "SandboxError"}
    assert view["trial"]["verifier_result"]["rewards"] == {"reward": 1.0}
    assert view["trajectory"]["steps"][1]["metrics"]["completion_token_ids"] == [3, 4]
    assert view["verifier"]["stdout"] == "all good"


def test_harbors_trace_export_gives_a_conversation_and_result_for_each_trial(harbor: dict[str, Any]) -> None:
    rows = {row["result"]: row for row in harbor["traces"]}
    assert set(rows) == {"1.0", "0.0", "AgentTimeoutError"}  # one without a reply is no conversation
    assert rows["1.0"]["conversations"] == [
        {"role": "user", "content": "List the files."},
        {"role": "assistant", "content": "ls"},
        {"role": "user", "content": "a.txt"},
        {"role": "assistant", "content": "done"},
    ]
    assert (rows["1.0"]["agent"], rows["1.0"]["model"], rows["1.0"]["task"]) == ("terminus-2", "tiny", "t0")
    assert rows["0.0"]["verifier_output"] == "1 test failed"


def test_the_command_exports_the_job_too(harbor: dict[str, Any]) -> None:
    assert "Exported 4 rows from" in harbor["command"]  # one for each reply


def test_a_job_file_that_harbor_accepts_is_an_evaluation(harbor: dict[str, Any], root: Path) -> None:
    assert harbor["job_attempts"] == config_of_harbor_job(root / "job.yaml").attempts == 3


def test_task_files_mean_here_what_they_mean_to_harbor(harbor: dict[str, Any]) -> None:
    texts = {"full.toml": FULL_TOML, "rare.toml": RARE_TOML, "steps.toml": STEPS_TOML, "legacy.toml": LEGACY_TOML}
    for name, text in texts.items():
        ours, theirs = parse_settings(text), harbor["tomls"][name]
        _assert_same_environment(ours.environment, theirs["environment"])
        assert (ours.limits.agent_timeout_s, ours.verifier.timeout_s) == (
            theirs["agent"]["timeout_sec"],
            theirs["verifier"]["timeout_sec"],
        )
        assert (ours.agent.user, ours.verifier.user) == (theirs["agent"]["user"], theirs["verifier"]["user"])
        assert (dict(ours.verifier.env), dict(ours.solution_env)) == (
            theirs["verifier"]["env"],
            theirs["solution"]["env"],
        )
        steps = [(step.name, step.verifier.timeout_s, step.limits.agent_timeout_s) for step in ours.steps]
        assert steps == [
            (step["name"], step["verifier"]["timeout_sec"], step["agent"]["timeout_sec"])
            for step in theirs["steps"] or []
        ]
        assert len(ours.artifacts) == len(theirs["artifacts"])


def _assert_same_environment(ours: Environment, theirs: dict[str, Any]) -> None:
    for name in ("docker_image", "workdir", "os", "cpus", "memory_mb", "storage_mb", "network_mode", "skills_dir"):
        assert getattr(ours, name) == theirs[name], name
    assert (ours.gpus, list(ours.gpu_types)) == (theirs["gpus"] or 0, theirs["gpu_types"] or [])
    assert (list(ours.allowed_hosts), dict(ours.env)) == (theirs["allowed_hosts"] or [], theirs["env"])
    assert ours.build_timeout_s == theirs["build_timeout_sec"]
    servers = [(server.name, server.transport, server.url or None) for server in ours.mcp_servers]
    assert servers == [(server["name"], server["transport"], server["url"]) for server in theirs["mcp_servers"]]
    check = theirs["healthcheck"]
    assert ours.healthcheck == (
        None
        if check is None
        else Healthcheck(
            command=check["command"],
            interval_s=check["interval_sec"],
            timeout_s=check["timeout_sec"],
            start_period_s=check["start_period_sec"],
            start_interval_s=check["start_interval_sec"],
            retries=check["retries"],
        )
    )


def test_harbor_refuses_the_task_files_that_we_refuse(harbor: dict[str, Any]) -> None:
    assert {name: harbor["tomls"][name] for name in MALFORMED} == dict.fromkeys(MALFORMED)


def test_directories_digests_and_templates_agree(harbor: dict[str, Any], root: Path) -> None:
    assert harbor["is_valid_task"]
    assert harbor["digest"] == content_digest(root / "task")
    assert harbor["variables"] == resolve_variables(TEMPLATES, host={"SET_HERE": "yes"})
