"""Harbor's own terminus-2 on a machine of ours: runs under Harbor's Python 3.12, imports Harbor alone.

    harbor_agent.py BOX_SOCKET API_BASE MODEL OUT_DIR < instruction

Invariant: the agent is Harbor's class, untouched; only its environment is ours, and all of that is one command after
the other, sent to BOX_SOCKET as a line of JSON and answered by one. Prints what Harbor recorded, as JSON.
Started by tests/envs/gateway/harbor_terminus2.py.
"""

# pyright: reportMissingImports=false

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from harbor.agents.terminus_2 import Terminus2
from harbor.environments.base import BaseEnvironment, ExecResult
from harbor.models.agent.context import AgentContext
from harbor.models.task.config import EnvironmentConfig
from harbor.models.trial.paths import TrialPaths

LIMITS = {"max_input_tokens": 100_000, "max_output_tokens": 2048}
FREE = {"input_cost_per_token": 0.0, "output_cost_per_token": 0.0}


class Box(BaseEnvironment):
    """Harbor's interface to a machine whose shell another process holds."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, directory: Path) -> None:
        self._reader, self._writer, self._turn = reader, writer, asyncio.Lock()
        super().__init__(
            environment_dir=directory,
            environment_name="box",
            session_id="box",
            trial_paths=TrialPaths(trial_dir=directory),
            task_env_config=EnvironmentConfig(),
        )

    @staticmethod
    def type() -> str:
        return "box"

    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        asked = {"command": command, "cwd": cwd, "env": env, "timeout_s": timeout_sec}
        async with self._turn:
            self._writer.write(json.dumps(asked).encode() + b"\n")
            await self._writer.drain()
            return ExecResult.model_validate_json(await self._reader.readline())

    def _validate_definition(self) -> None: ...

    async def start(self, force_build: bool) -> None: ...

    async def stop(self, delete: bool) -> None: ...

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        raise NotImplementedError("terminus-2 without a recording uploads nothing")

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        raise NotImplementedError("terminus-2 uploads no directory")

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        raise NotImplementedError("terminus-2 without a recording downloads nothing")

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        raise NotImplementedError("terminus-2 downloads no directory")


async def play(box_socket: str, api_base: str, model: str, directory: Path, instruction: str) -> dict[str, Any]:
    """Plays to the end; Harbor's rollout details, metadata and ATIF trajectory."""
    box = Box(*await asyncio.open_unix_connection(box_socket, limit=1 << 24), directory)
    agent = Terminus2(
        logs_dir=directory / "agent",
        model_name=f"hosted_vllm/{model}",
        model_info=LIMITS | FREE,
        api_base=api_base,
        collect_rollout_details=True,
        record_terminal_session=False,
    )
    context = AgentContext()
    await agent.setup(box)
    await agent.run(instruction, box, context)
    return {
        "details": context.rollout_details,
        "n_episodes": context.metadata["n_episodes"],
        "trajectory": json.loads((directory / "agent" / "trajectory.json").read_text()),
    }


if __name__ == "__main__":
    out = Path(sys.argv[4])
    (out / "agent").mkdir(parents=True)
    facts = asyncio.run(play(sys.argv[1], sys.argv[2], sys.argv[3], out, sys.stdin.read()))
    (out / "facts.json").write_text(json.dumps(facts))
