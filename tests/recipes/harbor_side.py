"""The other side of the interop test: runs under Harbor's Python 3.12, imports Harbor alone, prints JSON.

    harbor_side.py JOB_DIR JOB_FILE TOML_DIR TASK_DIR

Called by tests/recipes/test_harbor_interop.py.
"""

# pyright: reportMissingImports=false

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import httpx
import yaml
from harbor.cli.main import app
from harbor.models.job.config import JobConfig
from harbor.models.task.config import TaskConfig
from harbor.models.task.task import Task
from harbor.models.trajectories import Trajectory
from harbor.publisher.packager import Packager
from harbor.utils.env import resolve_env_vars
from harbor.utils.traces_utils import export_traces
from harbor.viewer.server import create_app
from typer.testing import CliRunner


def main(job: Path, job_file: Path, tomls: Path, task: Path) -> dict[str, Any]:
    """Everything that Harbor says of what we wrote."""
    paths = sorted(job.glob("*/agent/trajectory.json"))
    trajectories = [Trajectory.model_validate_json(path.read_text()) for path in paths]
    rows = export_traces(job, episodes="last", to_sharegpt=True, export_subagents=False, include_verifier_output=True)
    return {
        "atif_versions": [trajectory.schema_version for trajectory in trajectories],
        "atif_steps": {each.session_id: len(each.steps) for each in trajectories},
        "command": CliRunner().invoke(app, ["traces", "export", "-p", str(job), "--no-subagents"]).output,
        "view": asyncio.run(view(job)),
        "traces": sorted(rows.to_list(), key=lambda row: row["trial_name"]),
        "job_attempts": JobConfig.model_validate(yaml.safe_load(job_file.read_text())).n_attempts,
        "tomls": {path.name: parse(path.read_text()) for path in sorted(tomls.glob("*.toml"))},
        "is_valid_task": Task.is_valid_dir(task),
        "digest": f"sha256:{Packager.compute_content_hash(task)[0]}",
        "variables": resolve_env_vars(json.loads(os.environ["TEMPLATES"])),
    }


async def view(job: Path) -> dict[str, Any]:
    """What the pages of `harbor view` get from its server."""
    transport = httpx.ASGITransport(app=create_app(job.parent))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:

        async def get(path: str) -> Any:
            response = await client.get(f"/api/jobs{path}")
            response.raise_for_status()
            return response.json()

        trials = (await get(f"/{job.name}/trials"))["items"]
        name = next(trial["name"] for trial in trials if trial["reward"] == 1.0)
        return {
            "jobs": (await get(""))["items"],
            "job": await get(f"/{job.name}"),
            "config": await get(f"/{job.name}/config"),
            "tasks": (await get(f"/{job.name}/tasks"))["items"],
            "trials": trials,
            "trial": await get(f"/{job.name}/trials/{name}"),
            "trajectory": await get(f"/{job.name}/trials/{name}/trajectory"),
            "verifier": await get(f"/{job.name}/trials/{name}/verifier-output"),
        }


def parse(text: str) -> dict[str, Any] | None:
    """A task.toml as Harbor reads it; None where Harbor refuses it."""
    try:
        return TaskConfig.model_validate_toml(text).model_dump(mode="json")
    except ValueError:
        return None


if __name__ == "__main__":
    print(json.dumps(main(*map(Path, sys.argv[1:]))))
