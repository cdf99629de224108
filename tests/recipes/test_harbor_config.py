"""Harbor job files: what an evaluation takes over, and what it refuses by name."""

from pathlib import Path

import pytest
import yaml

from envs.build import HarnessName, PromptStyle
from envs.terminus2.prompts import ReplyFormat
from recipes.evaluate import config_of_harbor_job
from recipes.launch import _split_config

JOB = """\
job_name: nightly
jobs_dir: out
n_attempts: 3
timeout_multiplier: 2.0
n_concurrent_trials: 16
quiet: true
retry: {max_retries: 0, min_wait_sec: 5}
environment: {type: docker, force_build: false, delete: true, override_cpus: null}
verifier: {max_timeout_sec: 240}
agents:
  - name: terminus-2
    model_name: models/policy
    override_timeout_sec: 600
    max_timeout_sec: 7200
    kwargs:
      parser_name: xml
      enable_summarize: true
      proactive_summarization_threshold: 2048
      temperature: 0.7
      max_episodes: 40
      collect_rollout_details: true
      model_info: {max_input_tokens: 30000, max_output_tokens: 2768, input_cost_per_token: 0}
datasets:
  - {path: tasks/core, n_tasks: 20}
"""
MINIMAL = {"agents": [{"name": "nop"}], "datasets": [{"path": "tasks"}]}


def write(tmp_path: Path, content: object) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    return path


def test_a_whole_job_is_taken_over(tmp_path: Path) -> None:
    config = config_of_harbor_job(write(tmp_path, JOB))
    assert (config.run, config.harbor_job) == (Path("runs/nightly"), Path("out/nightly"))
    assert (config.tasks, config.limit, config.attempts) == ("tasks/core", 20, 3)
    assert (config.policy.model, config.rollouts.max_rollouts) == ("models/policy", 16)
    episode = config.episode
    assert (episode.harness, episode.prompts, episode.max_turns) == (HarnessName.TERMINUS_2, PromptStyle.FULL, 40)
    assert (episode.context_tokens, episode.sampling.max_tokens, episode.sampling.temperature) == (32768, 2768, 0.7)
    assert (episode.reply_format, episode.summarize, episode.summary.below_tokens) == (ReplyFormat.XML, True, 2048)
    assert (episode.agent_timeout_s, episode.max_agent_timeout_s) == (600.0, 7200.0)
    assert (episode.max_verifier_timeout_s, episode.timeout_multiplier) == (240.0, 2.0)


def test_what_a_job_leaves_open_is_harbors_or_our_default(tmp_path: Path) -> None:
    config = config_of_harbor_job(write(tmp_path, MINIMAL))
    assert (config.harbor_job, config.attempts, config.limit) == (Path("jobs/job"), 1, None)
    assert (config.rollouts.max_rollouts, config.episode.max_turns) == (4, 1_000_000)
    assert (config.policy.model, config.episode.context_tokens) == ("tiny", 2048)


def test_an_entry_of_a_local_registry_is_the_task_set(tmp_path: Path) -> None:
    dataset = {"registry_path": "lists/registry.json", "name": "core", "version": "1.0"}
    assert (
        config_of_harbor_job(write(tmp_path, MINIMAL | {"datasets": [dataset]})).tasks == "lists/registry.json:core@1.0"
    )


def test_the_older_orchestrator_table_is_read(tmp_path: Path) -> None:
    orchestrator = {"orchestrator": {"n_concurrent_trials": 9, "quiet": True, "retry": {"max_retries": 0}}}
    assert config_of_harbor_job(write(tmp_path, MINIMAL | orchestrator)).rollouts.max_rollouts == 9


def test_unknown_keys_are_said_in_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config_of_harbor_job(write(tmp_path, MINIMAL | {"future": 1}))
    assert caplog.messages == [f"config={tmp_path / 'job.yaml'} unknown keys ignored: future"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"agents": []}, "agents lists 0"),
        ({"agents": [{"name": "codex"}]}, "agents[0].name must be one of terminus-2"),
        (
            {"agents": [{"name": "terminus-2", "kwargs": {"parser_name": "yaml"}}]},
            "agents[0].kwargs.parser_name must be one of",
        ),
        (
            {"agents": [{"name": "terminus-2", "kwargs": {"strict_json_parser": True}}]},
            "kwargs.strict_json_parser True",
        ),
        ({"agents": [{"name": "nop", "env": {"A": "b"}}]}, "agents[0].env"),
        ({"datasets": []}, "datasets and tasks name 0 sources"),
        ({"tasks": [{"path": "x"}]}, "datasets and tasks name 2 sources"),
        ({"datasets": [{"name": "org/set"}]}, "datasets[0] lies on another machine"),
        ({"datasets": [{"path": "x", "task_names": ["a*"]}]}, "datasets[0].task_names"),
        ({"n_attempts": 0}, "n_attempts must be a whole number from 1"),
        ({"retry": {"max_retries": 3}}, "retry.max_retries 3"),
        ({"orchestrator": {"retry": {"max_retries": 3}}}, "orchestrator.retry.max_retries 3"),
        ({"agent_timeout_multiplier": 2.0}, "agent_timeout_multiplier 2.0"),
        ({"environment": {"override_cpus": 4}}, "environment.override_cpus 4"),
        ({"verifier": {"disable": True}}, "verifier.disable True"),
        ({"artifacts": ["/app"]}, "artifacts ['/app']"),
    ],
)
def test_what_would_change_a_result_is_refused_by_name(tmp_path: Path, change: dict[str, object], words: str) -> None:
    path = write(tmp_path, MINIMAL | change)
    with pytest.raises(ValueError) as caught:
        config_of_harbor_job(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_no_job_is_refused(tmp_path: Path) -> None:
    for content, words in (("a: [", "not valid YAML"), ("- a", "must be a table")):
        with pytest.raises(ValueError, match=words):
            config_of_harbor_job(write(tmp_path, content))
    with pytest.raises(ValueError, match="no such file"):
        config_of_harbor_job(tmp_path / "none.yaml")


def test_the_config_file_is_taken_out_of_the_arguments() -> None:
    assert _split_config(["--run", "x", "--config", "job.yaml", "--limit", "2"]) == (
        ["--run", "x", "--limit", "2"],
        Path("job.yaml"),
    )
    assert _split_config(["--config=job.yaml"]) == ([], Path("job.yaml"))
    assert _split_config(["--limit", "2"]) == (["--limit", "2"], None)
    with pytest.raises(ValueError, match="--config needs a file"):
        _split_config(["--config"])
