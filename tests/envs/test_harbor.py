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
from envs.harbor import load_task, load_tasks
from envs.task import Environment, Limits, Provenance, VerifierSpec
from tests.envs.task_dirs import make_task_dir

FIELDS = """
schema_version version source steps artifacts metadata agent verifier environment solution timeout_sec user env os
network_mode allow_internet memory memory_mb storage cpus gpus family environment_mode docker_image
"""
KEYS = st.sampled_from(FIELDS.split()) | st.text(max_size=3)

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


def test_an_empty_task_toml_gives_harbors_defaults(tmp_path: Path) -> None:
    task = load_task(make_task_dir(tmp_path))
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
        ('[environment.env]\nA = "${HOME}"\n', ["environment.env.A", "not supported"]),
        ('[environment]\nos = "windows"\n', ["environment.os 'windows'"]),
        ("[environment]\ngpus = 1\n", ["environment.gpus"]),
        ('[environment]\nallowed_hosts = ["a.b"]\n', ["environment.allowed_hosts"]),
        ('[[environment.mcp_servers]]\nname = "x"\n', ["environment.mcp_servers"]),
        ('[environment.healthcheck]\ncommand = "true"\n', ["environment.healthcheck"]),
        ('[[steps]]\nname = "one"\n', ["steps is not supported"]),
        ('artifacts = ["/app/out"]\n', ["artifacts is not supported"]),
        ('[agent]\nuser = "bob"\n', ["agent.user"]),
        ('[agent]\nnetwork_mode = "no-network"\n', ["agent.network_mode"]),
        ('[verifier]\nenvironment_mode = "separate"\n', ["verifier.environment_mode 'separate'"]),
        ('[solution.env]\nA = "b"\n', ["solution.env"]),
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
        (lambda path: (path / "environment" / "docker-compose.yaml").touch(), "docker-compose.yaml", "Dockerfile"),
        (lambda path: (path / "trajectory.json").touch(), "trajectory.json", "remove the file"),
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
        load_tasks(path)
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
    assert [task.id for task in load_tasks(tmp_path)] == ["a", "b", "c"]
    assert [task.id for task in load_tasks(tmp_path, limit=2)] == ["a", "b"]
    assert [task.id for task in load_tasks(tmp_path, names=["c", "a"])] == ["a", "c"]
    assert [task.id for task in load_tasks(tmp_path / "b")] == ["b"]


def test_a_broken_child_is_not_passed_over(tmp_path: Path) -> None:
    make_task_dir(tmp_path, "a")
    (make_task_dir(tmp_path, "b") / "instruction.md").unlink()
    with pytest.raises(TaskError, match=r"b/instruction\.md: no such file"):
        load_tasks(tmp_path)


def test_a_set_that_is_missing_empty_or_lacks_a_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"nowhere: no such directory; give a Harbor task directory"):
        load_tasks(tmp_path / "nowhere")
    with pytest.raises(TaskError, match="holds no task"):
        load_tasks(tmp_path)
    make_task_dir(tmp_path, "a")
    with pytest.raises(TaskError, match="no task named x, y"):
        load_tasks(tmp_path, names=["y", "a", "x"])


def test_a_thousand_tasks_load_within_a_second(tmp_path: Path) -> None:
    for index in range(1000):
        make_task_dir(tmp_path, f"{index:04d}", toml=FULL_TOML)
    began = time.process_time()
    assert len(load_tasks(tmp_path)) == 1000
    assert time.process_time() - began < 1.0  # measured 0.1 s
