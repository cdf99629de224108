"""ATIF objects and Harbor job directories, by example; tests/recipes/test_harbor_interop.py hands them to Harbor."""

import json
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from tests.trajectories.records import tokens, trajectory, turn
from trajectories.atif import to_atif
from trajectories.harbor_job import HarborJob, write_harbor_job
from trajectories.schema import Outcome, Trajectory

JOB = HarborJob(
    tasks="tasks/core",
    began=datetime(2026, 1, 2, 3, tzinfo=UTC),
    ended=datetime(2026, 1, 2, 4, tzinfo=UTC),
    num_attempts=2,
)
TWO_TURNS = trajectory(
    turn(tokens((1, 2), (3, 4)), reply="ls", observation="a.txt"),
    turn(tokens((5,), (6,), prefix_len=3, n=7), reply="done"),  # keeps 1 2 3, drops 4
)


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def test_each_turn_is_a_step_with_the_prompt_and_tokens_that_the_engine_saw() -> None:
    atif = to_atif(TWO_TURNS)
    assert [(step["step_id"], step["source"], step["message"]) for step in atif["steps"]] == [
        (1, "user", "List the files."),
        (2, "agent", "ls"),
        (3, "agent", "done"),
    ]
    assert atif["steps"][1]["observation"] == {"results": [{"content": "a.txt"}]}
    assert "observation" not in atif["steps"][2]
    assert atif["steps"][2]["metrics"] == {
        "prompt_tokens": 4,
        "completion_tokens": 1,
        "prompt_token_ids": [1, 2, 3, 5],
        "completion_token_ids": [6],
        "logprobs": [-0.5],
    }
    assert atif["steps"][2]["extra"]["versions"] == [{"lineage": 0, "n": 7, "num_tokens": 1}]
    assert atif["final_metrics"] == {"total_prompt_tokens": 6, "total_completion_tokens": 3, "total_steps": 3}


def test_a_reply_without_tokens_has_no_metrics() -> None:
    step = to_atif(trajectory(turn(reply="echo hi")))["steps"][1]
    assert "metrics" not in step and "llm_call_count" not in step


def test_an_infinite_logprob_is_left_out_and_said_so() -> None:
    broken = replace(tokens((1,), (2,)), logprobs=(float("-inf"),))
    step = to_atif(trajectory(turn(broken)))["steps"][1]
    assert "logprobs" not in step["metrics"]
    assert step["extra"]["logprobs"] == "left out: not finite"


FOUR = [
    TWO_TURNS,
    trajectory(turn(reply="no"), reward=0.0, member=1),
    replace(
        trajectory(turn(), outcome=Outcome.AGENT_TIMEOUT, reward=0.0, member=2),
        error="HarnessTimeout: harness did not end",
    ),
    replace(trajectory(outcome=Outcome.SANDBOX_ERROR, reward=None, member=3), error="SandboxError: no room"),
]


def test_a_job_counts_rewards_and_exceptions_by_trial(tmp_path: Path) -> None:
    assert write_harbor_job(FOUR, tmp_path / "jobs" / "nightly", JOB) == 4
    result = read(tmp_path / "jobs" / "nightly" / "result.json")
    assert (result["n_total_trials"], result["started_at"]) == (4, "2026-01-02T03:00:00+00:00")
    assert (result["stats"]["n_completed_trials"], result["stats"]["n_errored_trials"]) == (4, 2)
    ((player, evaluation),) = result["stats"]["evals"].items()
    assert player == "terminus-2__tiny__core"
    assert (evaluation["n_trials"], evaluation["n_errors"]) == (3, 2)
    assert evaluation["metrics"] == [{"mean": 1 / 3}]
    assert {reward: len(names) for reward, names in evaluation["reward_stats"]["reward"].items()} == {
        "1.0": 1,
        "0.0": 2,
    }
    assert {name: len(names) for name, names in evaluation["exception_stats"].items()} == {
        "AgentTimeoutError": 1,
        "SandboxError": 1,
    }


def test_a_trial_holds_reward_evidence_error_and_trajectory(tmp_path: Path) -> None:
    failed = replace(FOUR[3], evidence="no tests ran")
    write_harbor_job([TWO_TURNS, failed], tmp_path / "job", JOB)
    solved, excluded = sorted(
        (path for path in (tmp_path / "job").iterdir() if path.is_dir()),
        key=lambda path: (path / "exception.txt").exists(),
    )
    assert solved.name.startswith("t0__")
    assert read(solved / "result.json")["verifier_result"] == {"rewards": {"reward": 1.0}}
    assert read(solved / "result.json")["agent_result"]["n_input_tokens"] == 6
    assert (solved / "verifier" / "reward.txt").read_text() == "1\n"
    assert read(solved / "agent" / "trajectory.json") == to_atif(TWO_TURNS)
    assert read(excluded / "result.json")["verifier_result"] is None
    assert (excluded / "exception.txt").read_text() == "SandboxError: no room\n"
    assert (excluded / "verifier" / "test-stdout.txt").read_text() == "no tests ran"


def test_a_job_replaces_itself_and_nothing_else(tmp_path: Path) -> None:
    write_harbor_job(FOUR, tmp_path / "job", JOB)
    write_harbor_job([TWO_TURNS], tmp_path / "job", JOB)
    assert read(tmp_path / "job" / "result.json")["n_total_trials"] == 1
    (tmp_path / "other").mkdir()
    with pytest.raises(ValueError, match="other exists and is no job directory that this wrote"):
        write_harbor_job(FOUR, tmp_path / "other", JOB)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["job", "other"]


def test_a_failure_leaves_no_job(tmp_path: Path) -> None:
    def broken() -> Any:
        yield TWO_TURNS
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_harbor_job(broken(), tmp_path / "job", JOB)
    assert list(tmp_path.iterdir()) == []


def test_bytes_that_are_no_text_are_replaced(tmp_path: Path) -> None:
    odd: Trajectory = replace(trajectory(turn(reply="caf\udcc3")), task_id="a/b c\udcc3", evidence="\udcff")
    write_harbor_job([odd], tmp_path / "job", JOB)
    (trial,) = (path for path in (tmp_path / "job").iterdir() if path.is_dir())
    assert trial.name.startswith("a-b-c-__")
    assert read(trial / "agent" / "trajectory.json")["steps"][1]["message"] == "caf?"
