"""A Harbor job directory made of Trajectories: what `harbor view` shows and `harbor traces export` reads (Harbor 0.25).

    JOB/config.json, result.json            the job: its agent, data set, counts and rewards
    JOB/TRIAL/config.json, result.json      one Trajectory: reward or exception, token counts
    JOB/TRIAL/agent/trajectory.json         ATIF (trajectories/atif.py)
    JOB/TRIAL/verifier/reward.txt, test-stdout.txt

Invariant: the directory appears whole or not at all. Trajectories keep durations and no clock times, so every time in
it is that of the job. Called by recipes/export and recipes/evaluate.
"""

import base64
import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from trajectories.atif import AGENT_VERSION, harness_of, model_of, num_tokens, to_atif
from trajectories.schema import DEFAULT_TREATMENTS, Outcome, Trajectory, Treatment
from trajectories.validity import member_reward

_EXCEPTIONS = {
    Outcome.AGENT_TIMEOUT: "AgentTimeoutError",
    Outcome.CONTEXT_LIMIT: "ContextLengthExceededError",
    Outcome.CANCELLED: "CancelledError",
}
"""Harbor's names for what it knows; other errors keep ours. A turn limit is no exception there either."""
_NO_EXCEPTION = (Outcome.COMPLETED, Outcome.TURN_LIMIT)


@dataclass(frozen=True, slots=True, kw_only=True)
class HarborJob:
    """What the job says of itself."""

    tasks: str
    """The task set; its last part names the data set."""
    began: datetime
    ended: datetime
    """Both with a time zone."""
    num_attempts: int = 1

    @property
    def source(self) -> str:
        """The data set's name."""
        return Path(self.tasks).name or self.tasks


def write_harbor_job(
    trajectories: Iterable[Trajectory],
    directory: Path,
    job: HarborJob,
    *,
    treatments: Mapping[Outcome, Treatment] = DEFAULT_TREATMENTS,
) -> int:
    """Writes the job; how many trials. Its own earlier directory is replaced, ValueError for any other that exists."""
    directory = directory.absolute()
    job_id = str(uuid.uuid5(uuid.NAMESPACE_URL, f"thresher:{directory}"))
    if directory.exists() and not _is_job(directory, job_id):
        raise ValueError(f"{directory} exists and is no job directory that this wrote; give another or remove it")
    draft = directory.with_name(f".{directory.name}.{os.getpid()}.partial")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    try:
        trials = [_write_trial(each, draft, directory, job_id, job, treatments) for each in trajectories]
        _write_json(draft / "config.json", _job_config(directory, job, trials))
        _write_json(draft / "result.json", _job_result(job_id, job, trials))
        if directory.exists():
            shutil.rmtree(directory)
        os.rename(draft, directory)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return len(trials)


def _is_job(directory: Path, job_id: str) -> bool:
    result = directory / "result.json"
    return result.is_file() and json.loads(result.read_text()).get("id") == job_id


def _write_trial(
    trajectory: Trajectory,
    draft: Path,
    directory: Path,
    job_id: str,
    job: HarborJob,
    treatments: Mapping[Outcome, Treatment],
) -> dict[str, Any]:
    name = _trial_name(trajectory)
    reward = member_reward(trajectory, treatments)
    trial = _trial_result(trajectory, name, directory, job_id, job, reward)
    folder = draft / name
    folder.mkdir()
    _write_json(folder / "config.json", trial["config"])
    _write_json(folder / "result.json", trial)
    _write_json(folder / "agent" / "trajectory.json", to_atif(trajectory))
    _write_text(folder / "verifier" / "test-stdout.txt", trajectory.evidence)
    if trajectory.reward is not None:
        _write_text(folder / "verifier" / "reward.txt", f"{trajectory.reward:g}\n")
    if trajectory.error:
        _write_text(folder / "exception.txt", trajectory.error + "\n")
    return trial


def _trial_name(trajectory: Trajectory) -> str:
    """Like Harbor's, the task's first 32 characters and a suffix, here ten characters that the id gives."""
    task = "".join(char if char.isalnum() or char in "-_." else "-" for char in trajectory.task_id)[:32]
    digest = hashlib.sha256(trajectory.id.encode("utf-8", "replace")).digest()
    return f"{task}__{base64.b32encode(digest).decode().lower()[:10]}"


def _trial_result(
    trajectory: Trajectory, name: str, directory: Path, job_id: str, job: HarborJob, reward: float | None
) -> dict[str, Any]:
    counts, model = num_tokens(trajectory), model_of(trajectory)
    agent = {"name": harness_of(trajectory), "model_name": model or None}
    task = {"path": str(Path(job.tasks) / trajectory.task_id), "source": job.source}
    return {
        "id": str(uuid.uuid5(uuid.NAMESPACE_URL, f"thresher:{job_id}:{trajectory.id}")),
        "task_name": trajectory.task_id,
        "trial_name": name,
        "trial_uri": (directory / name).as_uri(),
        "task_id": {"path": task["path"]},
        "source": job.source,
        "task_checksum": "",
        "config": {
            "task": task,
            "trial_name": name,
            "trials_dir": str(directory),
            "agent": agent,
            "job_id": job_id,
        },
        "agent_info": {
            "name": agent["name"],
            "version": AGENT_VERSION,
            "model_info": {"name": model} if model else None,
        },
        "agent_result": {
            "n_input_tokens": counts[0] if counts else None,
            "n_output_tokens": counts[1] if counts else None,
            "metadata": {"outcome": trajectory.outcome.value, "timings_s": dict(trajectory.timings_s)},
        },
        "verifier_result": None if reward is None else {"rewards": {"reward": reward}},
        "exception_info": _exception(trajectory, job),
        "started_at": job.began.isoformat(),
        "finished_at": job.ended.isoformat(),
    }


def _exception(trajectory: Trajectory, job: HarborJob) -> dict[str, str] | None:
    if trajectory.outcome in _NO_EXCEPTION:
        return None
    ours = trajectory.error.partition(":")[0] or trajectory.outcome.value
    return {
        "exception_type": _EXCEPTIONS.get(trajectory.outcome, ours),
        "exception_message": trajectory.error,
        "exception_traceback": "",
        "occurred_at": job.ended.isoformat(),
    }


def _job_config(directory: Path, job: HarborJob, trials: list[dict[str, Any]]) -> dict[str, Any]:
    agents = {json.dumps(trial["config"]["agent"], sort_keys=True) for trial in trials}
    return {
        "job_name": directory.name,
        "jobs_dir": str(directory.parent),
        "n_attempts": job.num_attempts,
        "agents": [json.loads(agent) for agent in sorted(agents)],
        "datasets": [{"path": job.tasks}],
    }


def _job_result(job_id: str, job: HarborJob, trials: list[dict[str, Any]]) -> dict[str, Any]:
    by_player: dict[str, list[dict[str, Any]]] = {}
    for trial in trials:
        agent = trial["config"]["agent"]
        player = "__".join(filter(None, (agent["name"], agent["model_name"], job.source)))
        by_player.setdefault(player, []).append(trial)
    return {
        "id": job_id,
        "started_at": job.began.isoformat(),
        "updated_at": job.ended.isoformat(),
        "finished_at": job.ended.isoformat(),
        "n_total_trials": len(trials),
        "stats": {
            "n_completed_trials": len(trials),
            "n_errored_trials": sum(trial["exception_info"] is not None for trial in trials),
            "evals": {player: _evaluation(trials) for player, trials in by_player.items()},
            "n_input_tokens": _total(trials, "n_input_tokens"),
            "n_output_tokens": _total(trials, "n_output_tokens"),
        },
    }


def _total(trials: list[dict[str, Any]], key: str) -> int | None:
    known = [trial["agent_result"][key] for trial in trials if trial["agent_result"][key] is not None]
    return sum(known) if known else None


def _evaluation(trials: list[dict[str, Any]]) -> dict[str, Any]:
    """Rewards and exceptions by trial name; the mean is over trials that have a reward (the valid ones)."""
    rewards: dict[float, list[str]] = {}
    exceptions: dict[str, list[str]] = {}
    for trial in trials:
        if trial["verifier_result"] is not None:
            rewards.setdefault(trial["verifier_result"]["rewards"]["reward"], []).append(trial["trial_name"])
        if trial["exception_info"] is not None:
            exceptions.setdefault(trial["exception_info"]["exception_type"], []).append(trial["trial_name"])
    num_valid = sum(map(len, rewards.values()))
    total = sum(reward * len(names) for reward, names in rewards.items())
    return {
        "n_trials": num_valid,
        "n_errors": sum(map(len, exceptions.values())),
        "metrics": [{"mean": total / num_valid}] if num_valid else [],
        "reward_stats": {"reward": {str(reward): names for reward, names in rewards.items()}},
        "exception_stats": exceptions,
    }


def _write_json(path: Path, value: Any) -> None:
    _write_text(path, json.dumps(value, ensure_ascii=False, allow_nan=False))


def _write_text(path: Path, text: str) -> None:
    """Lone surrogates (bytes of a terminal that are no UTF-8) have no place in JSON: other readers refuse them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode("utf-8", "replace"))
