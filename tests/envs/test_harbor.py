"""Harbor task directories: what is read, and the one line that each defect gets."""

import json
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envs.errors import TaskError
from envs.harbor import find_task_dirs, load_task, log_ignored_keys
from envs.task import (
    AgentSpec,
    Artifact,
    Collect,
    Environment,
    Healthcheck,
    Limits,
    McpServer,
    Network,
    Provenance,
    Publication,
    Tpu,
    VerifierSpec,
)
from envs.tasksets import resolve_tasks
from tests.envs.task_dirs import load_tasks, make_task_dir

FIELDS = """
schema_version version source steps artifacts metadata agent verifier environment solution timeout_sec user env os
network_mode allow_internet memory memory_mb storage cpus gpus family environment_mode docker_image name command
min_reward healthcheck mcp_servers allowed_hosts collect destination tpu url headers retries task authors
"""
KEYS = st.sampled_from(FIELDS.split()) | st.text(max_size=3)

ALLOW = 'network_mode = "allowlist"\n'
SERVER = '[[environment.mcp_servers]]\nname = "x"\nurl = "http://x"\n'

FULL_TOML = """\
schema_version = "1.4"
source = "somewhere"
some_future_key = 3

[task]
name = "org/a-task"

[metadata]
licence = "MIT"
family = "write"
split = "train"
difficulty = "easy"

[agent]
timeout_sec = 900

[verifier]
timeout_sec = 720.5
env = { SEED = "1" }
environment_mode = "shared"

[environment]
build_timeout_sec = 300.0
docker_image = "ubuntu:24.04"
workdir = "/app"
cpus = 2
memory_mb = 2048
storage_mb = 10240
gpus = 0
network_mode = "no-network"
env = { LANG = "C.UTF-8" }
"""


def test_every_field_that_a_task_holds_is_read(tmp_path: Path) -> None:
    path = make_task_dir(tmp_path, toml=FULL_TOML)
    task = load_task(path)
    assert task.id == "a-task"
    assert task.instruction == "Do it"
    assert task.path == path
    assert task.environment == Environment(
        docker_image="ubuntu:24.04",
        workdir="/app",
        cpus=2.0,
        memory_mb=2048,
        storage_mb=10240,
        env={"LANG": "C.UTF-8"},
        network_mode="no-network",
        build_timeout_s=300.0,
    )
    assert task.verifier == VerifierSpec(timeout_s=720.5, env={"SEED": "1"})
    assert task.limits == Limits(agent_timeout_s=900.0)
    assert task.provenance == Provenance(source="somewhere", licence="MIT", family="write", split="train")


RARE_TOML = """\
multi_step_reward_strategy = "final"
artifacts = ["/app/out", { source = "/var/log", destination = "logs", exclude = ["*.gz"], service = "db" }]

[task]
name = "org/a-task"
version = "2"
description = "A task"
authors = [{ name = "Ada", email = "ada@example.org" }, { name = "Bob" }]
keywords = ["files"]

[agent]
user = "ada"
network_mode = "no-network"

[verifier]
user = 0
network_mode = "public"
environment = { docker_image = "judge:1", memory = "1G" }
collect = [{ command = "dump", service = "db", timeout_sec = 5, user = "root" }]

[environment]
os = "Linux"
gpus = 2
gpu_types = ["H100", "A100"]
tpu = { type = "v6e", topology = "2x4" }
network_mode = "allowlist"
allowed_hosts = ["PyPI.example.", "*.example.org", "10.0.0.0/8", "::1"]
skills_dir = "/skills"
env = { TOKEN = "${TOKEN}", LEVEL = "${LEVEL:-3}" }
healthcheck = { command = "curl localhost", interval_sec = 1, start_period_sec = 0, retries = 9 }

[[environment.mcp_servers]]
name = "files"
transport = "http"
url = "http://files/mcp"
headers = { Authorization = "Bearer ${TOKEN}" }

[[environment.mcp_servers]]
name = "local"
transport = "stdio"
command = "serve"
args = ["--quiet"]

[solution]
env = { KEY = "v" }
"""


def test_the_rare_fields_are_recorded_too(tmp_path: Path) -> None:
    task = load_task(make_task_dir(tmp_path, toml=RARE_TOML))
    assert task.environment == Environment(
        gpus=2,
        gpu_types=("H100", "A100"),
        tpu=Tpu(type="v6e", topology="2x4"),
        network_mode="allowlist",
        allowed_hosts=("pypi.example", "*.example.org", "10.0.0.0/8", "::1"),
        skills_dir="/skills",
        env={"TOKEN": "${TOKEN}", "LEVEL": "${LEVEL:-3}"},
        healthcheck=Healthcheck(command="curl localhost", interval_s=1.0, start_period_s=0.0, retries=9),
        mcp_servers=(
            McpServer(
                name="files",
                transport="streamable-http",
                url="http://files/mcp",
                headers={"Authorization": "Bearer ${TOKEN}"},
            ),
            McpServer(name="local", transport="stdio", command="serve", args=("--quiet",)),
        ),
    )
    assert task.agent == AgentSpec(user="ada", network=Network(mode="no-network"))
    assert task.verifier == VerifierSpec(
        user=0,
        network=Network(mode="public"),
        is_separate=True,
        environment=Environment(docker_image="judge:1", memory_mb=1024),
        collect=(Collect(command="dump", service="db", timeout_s=5.0, user="root"),),
    )
    assert task.artifacts == (
        Artifact(source="/app/out"),
        Artifact(source="/var/log", destination="logs", exclude=("*.gz",), service="db"),
    )
    assert task.publication == Publication(
        name="org/a-task",
        version="2",
        description="A task",
        authors=("Ada <ada@example.org>", "Bob"),
        keywords=("files",),
    )
    assert (task.step_rewards, task.solution_env, task.ignored_keys) == ("final", {"KEY": "v"}, ())


STEPS_TOML = """\
[verifier]
timeout_sec = 90

[[steps]]
name = "first"
min_reward = 0.5
agent = { timeout_sec = 60 }
artifacts = ["/app"]

[[steps]]
name = "second"
min_reward = { tests = 1 }
verifier = { timeout_sec = 30 }
healthcheck = { command = "true" }
"""


def make_steps_dir(root: Path) -> Path:
    """A task of two steps: the first has tests of its own, the second shares those of the task."""
    path = make_task_dir(root, toml=STEPS_TOML)
    (path / "instruction.md").unlink()
    for name in ("first", "second"):
        (path / "steps" / name / "tests").mkdir(parents=True)
        (path / "steps" / name / "instruction.md").write_text(f"Do the {name} part\n")
    (path / "steps" / "first" / "tests" / "test.sh").touch()
    return path


def test_the_steps_of_a_task_are_read_in_order(tmp_path: Path) -> None:
    task = load_task(make_steps_dir(tmp_path))
    first, second = task.steps
    assert (task.instruction, task.step_rewards, task.verifier.timeout_s) == ("", "mean", 90.0)
    assert (first.name, first.instruction, first.min_reward) == ("first", "Do the first part", {"reward": 0.5})
    assert (first.limits, first.artifacts) == (Limits(agent_timeout_s=60.0), (Artifact(source="/app"),))
    assert first.verifier.timeout_s == 600.0  # Harbor's default: a step does not take the task's
    assert (second.instruction, second.min_reward) == ("Do the second part", {"tests": 1.0})
    assert (second.verifier.timeout_s, second.healthcheck) == (30.0, Healthcheck(command="true"))


def test_a_step_without_instruction_or_tests_is_refused_with_its_path(tmp_path: Path) -> None:
    path = make_steps_dir(tmp_path)
    (path / "tests" / "test.sh").unlink()
    with pytest.raises(TaskError, match=r"steps/second/tests/test\.sh: no such file"):
        load_task(path)
    (path / "steps" / "second" / "tests" / "test.sh").touch()
    (path / "steps" / "second" / "instruction.md").unlink()
    with pytest.raises(TaskError, match=r"steps/second/instruction\.md: no such file"):
        load_task(path)


def test_a_windows_task_is_judged_by_its_batch_file(tmp_path: Path) -> None:
    path = make_task_dir(tmp_path, toml='[environment]\nos = "windows"\n')
    with pytest.raises(TaskError, match=r"tests/test\.bat: no such file"):
        load_task(path)
    (path / "tests" / "test.bat").touch()
    assert load_task(path).environment.os == "windows"


def test_files_that_ask_for_more_are_recorded(tmp_path: Path) -> None:
    path = make_task_dir(tmp_path)
    (path / "environment" / "docker-compose.yaml").touch()
    (path / "trajectory.json").touch()
    task = load_task(path)
    assert (task.compose_file, task.has_prior_trajectory) == ("docker-compose.yaml", True)


def test_unknown_keys_are_kept_as_ignored_and_said_in_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    toml = "future = 1\n[verifier]\nrestart_environment = false\n[metadata]\nanything = 2\n"
    for name in ("a", "b"):
        make_task_dir(tmp_path, name, toml=toml)
    tasks = load_tasks(tmp_path)
    log_ignored_keys(tmp_path, tasks)
    assert [task.ignored_keys for task in tasks] == [("future", "verifier.restart_environment")] * 2
    assert tasks[0].metadata == {"anything": 2}
    (line,) = caplog.messages
    assert line.endswith("future (2), verifier.restart_environment (2)")


def test_an_empty_task_toml_gives_harbors_defaults(tmp_path: Path) -> None:
    task = load_task(make_task_dir(tmp_path, toml=""))
    assert task.environment == Environment(network_mode="public", build_timeout_s=600.0)
    assert task.verifier == VerifierSpec(timeout_s=600.0)
    assert task.limits.agent_timeout_s is None


def test_legacy_forms_mean_what_they_meant(tmp_path: Path) -> None:
    toml = 'version = "1.0"\n[environment]\nmemory = "2G"\nstorage = "512M"\nallow_internet = false\n'
    environment = load_task(make_task_dir(tmp_path, toml=toml)).environment
    assert (environment.memory_mb, environment.storage_mb, environment.network_mode) == (2048, 512, "no-network")


def test_an_explicit_network_mode_wins_over_the_legacy_flag(tmp_path: Path) -> None:
    toml = '[environment]\nallow_internet = true\nnetwork_mode = "no-network"\n'
    assert load_task(make_task_dir(tmp_path, toml=toml)).environment.network_mode == "no-network"


def test_leading_canary_lines_are_stripped_and_later_ones_stay(tmp_path: Path) -> None:
    path = make_task_dir(tmp_path)
    (path / "instruction.md").write_text("<!-- CANARY 1234 -->\n# canary: do not train\n\n# Title\nKeep the canary\n")
    assert load_task(path).instruction == "# Title\nKeep the canary"


@pytest.mark.parametrize(
    ("toml", "words"),
    [
        ("[agent\n", ["not valid TOML", "line 1"]),
        ('schema_version = "2.0"\n', ["schema_version '2.0'", "use 1.4"]),
        ('[agent]\ntimeout_sec = "900"\n', ["agent.timeout_sec", "'900'"]),
        ("[agent]\ntimeout_sec = -1\n", ["agent.timeout_sec", "above 0"]),
        ("[verifier]\ntimeout_sec = nan\n", ["verifier.timeout_sec", "nan"]),
        ("environment = 3\n", ["environment must be a table"]),
        ('[environment]\nmemory = "2 gallons"\n', ["environment.memory", "like 2G"]),
        ('[environment]\nmemory = "2G"\nmemory_mb = 100\n', ["contradicts", "memory_mb 100"]),
        ('[environment]\nnetwork_mode = "open"\n', ["environment.network_mode", "no-network"]),
        ('[environment]\nallow_internet = "no"\n', ["environment.allow_internet", "true or false"]),
        ("[environment.env]\nA = 1\n", ["environment.env.A", "string"]),
        ('[environment]\nos = "plan9"\n', ["environment.os", "linux or windows", "'plan9'"]),
        ("[environment]\ngpus = -1\n", ["environment.gpus", "whole number from 0"]),
        ('[environment]\nmemory = "512K"\n', ["environment.memory", "at least 1M"]),
        ("[environment]\nmemory_mb = 1.5\n", ["environment.memory_mb", "whole number"]),
        ('[environment.tpu]\ntype = "v6e"\ntopology = "8"\n', ["environment.tpu.topology", "2x4"]),
        ('[environment]\nallowed_hosts = ["a.b"]\n', ["environment.allowed_hosts", "allowlist"]),
        (f'[environment]\n{ALLOW}allowed_hosts = ["https://a.b/c"]\n', ["https://a.b/c", "leave out scheme"]),
        (f'[environment]\n{ALLOW}allowed_hosts = ["*.1.2.3.4"]\n', ["*.1.2.3.4"]),
        (f'[environment]\n{ALLOW}allowed_hosts = ["a.*.b"]\n', ["a.*.b"]),
        (f'[environment]\n{ALLOW}allowed_hosts = ["10.0.0.1/8"]\n', ["10.0.0.1/8"]),
        ('[[environment.mcp_servers]]\nname = "x"\n', ["environment.mcp_servers[0].url is missing"]),
        ('[[environment.mcp_servers]]\nname = "x"\ntransport = "stdio"\n', ["mcp_servers[0].command is missing"]),
        (f'{SERVER}headers = {{ Authorization = "Bearer abc" }}\n', ["headers.Authorization", "credential"]),
        (f'{SERVER}headers = {{ X-Api-Key = "${{KEY:-abc}}" }}\n', ["headers.X-Api-Key", "credential"]),
        (f'{SERVER}headers = {{ "a b" = "c" }}\n', ["headers.a b", "no HTTP header"]),
        ("[environment.healthcheck]\nretries = 2\n", ["environment.healthcheck.command is missing"]),
        ('[[steps]]\nname = "../up"\n', ["steps[0].name", "'../up'"]),
        ('[[steps]]\nname = "One"\n[[steps]]\nname = "one"\n', ["'one' occurs twice"]),
        ('[[steps]]\nname = "one"\nmin_reward = "1"\n', ["steps[0].min_reward"]),
        ('artifacts = ["/app/../etc"]\n', ["artifacts[0].source", "'..'"]),
        ('artifacts = [{ source = "/a", destination = "/b" }]\n', ["artifacts[0].destination", "relative"]),
        ('artifacts = [{ source = "a", service = "db" }]\n', ["artifacts[0].source", "absolute"]),
        ("artifacts = [3]\n", ["artifacts[0] must be a path or a table"]),
        ("[agent]\nuser = -1\n", ["agent.user"]),
        ('[verifier]\nenvironment_mode = "shared"\n[verifier.environment]\ncpus = 1\n', ["contradicts", "'shared'"]),
        ('[[verifier.collect]]\nservice = "db"\n', ["verifier.collect[0].command is missing"]),
        ('multi_step_reward_strategy = "best"\n', ["multi_step_reward_strategy", "mean, final"]),
        ('[task]\nname = "no-org"\n', ["task.name", "org/name"]),
    ],
)
def test_a_bad_task_toml_gets_one_line_with_path_and_field(tmp_path: Path, toml: str, words: list[str]) -> None:
    path = make_task_dir(tmp_path, toml=toml)
    with pytest.raises(TaskError) as caught:
        load_task(path)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(f"{path / 'task.toml'}: ")
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    ("break_it", "named", "remedy"),
    [
        (lambda path: (path / "task.toml").unlink(), "task.toml", "an empty file will do"),
        (lambda path: (path / "task.toml").write_bytes(b"\xff"), "task.toml", "UTF-8"),
        (lambda path: (path / "instruction.md").unlink(), "instruction.md", "write the instruction"),
        (lambda path: (path / "instruction.md").write_text("# canary\n"), "instruction.md", "write the instruction"),
        (lambda path: (path / "tests" / "test.sh").unlink(), "tests/test.sh", "reward.txt"),
        (lambda path: (path / "environment").rmdir(), "environment", "environment.docker_image"),
        (lambda path: (path / "tests").rename(path / "t") and (path / "tests").symlink_to("t"), "tests", "symbolic"),
        (
            lambda path: (path / "tests" / "data").mkdir() or (path / "tests" / "data" / "x").symlink_to("/"),
            "x",
            "symb",
        ),
    ],
)
def test_a_missing_or_foreign_file_gets_one_line_with_its_remedy(tmp_path: Path, break_it, named, remedy) -> None:
    path = make_task_dir(tmp_path)
    break_it(path)
    with pytest.raises(TaskError) as caught:
        load_task(path)
    message = str(caught.value)
    assert "\n" not in message
    assert named in message.split(": ")[0]
    assert remedy in message


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(KEYS, inner, max_size=3))


@given(st.dictionaries(KEYS, VALUES, max_size=5) | st.text(max_size=40))
def test_any_task_toml_gives_a_task_or_one_line(content: dict[str, Any] | str) -> None:
    text = content if isinstance(content, str) else dump_toml(content)
    with TemporaryDirectory() as root:
        path = make_task_dir(Path(root))
        (path / "task.toml").write_text(text)
        try:
            assert load_task(path).id == "a-task"
        except TaskError as error:
            assert "\n" not in str(error)
            assert str(error).startswith(str(path / "task.toml"))


def dump_toml(table: dict[str, Any]) -> str:
    """The table as TOML, every inner table inline."""
    return "".join(f"{json.dumps(key)} = {_dump(value)}\n" for key, value in table.items())


def _dump(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)} = {_dump(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_dump, value)) + "]"
    return json.dumps("none" if value is None else value).replace("Infinity", "inf").replace("NaN", "nan")


def test_tasks_are_the_sorted_children_that_are_tasks(tmp_path: Path) -> None:
    for name in ("c", "a", "b"):
        make_task_dir(tmp_path, name)
    (tmp_path / "not-a-task").mkdir()
    (tmp_path / "README.md").touch()
    assert [path.name for path in find_task_dirs(tmp_path)] == ["a", "b", "c"]
    assert find_task_dirs(tmp_path / "b") == [tmp_path / "b"]


def test_a_broken_child_is_not_passed_over(tmp_path: Path) -> None:
    make_task_dir(tmp_path, "a")
    (make_task_dir(tmp_path, "b") / "instruction.md").unlink()
    with pytest.raises(TaskError, match=r"b/instruction\.md: no such file"):
        load_tasks(tmp_path)


def test_a_set_that_is_missing_or_empty_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"nowhere: no such directory; give a Harbor task directory"):
        find_task_dirs(tmp_path / "nowhere")
    with pytest.raises(TaskError, match="holds no task"):
        resolve_tasks(str(tmp_path))


def test_a_thousand_tasks_load_within_a_second(tmp_path: Path) -> None:
    for index in range(1000):
        make_task_dir(tmp_path, f"{index:04d}", toml=FULL_TOML)
    began = time.process_time()
    assert len(load_tasks(tmp_path)) == 1000
    assert time.process_time() - began < 1.0  # measured 0.1 s
