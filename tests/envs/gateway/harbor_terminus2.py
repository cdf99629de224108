"""Harbor's own terminus-2 as a Harness: it plays in our Sandbox, and its model calls come to our gateway.

Invariant: the agent runs under Harbor's Python, in a process that ends with the rollout; what it does to the machine
passes through `Sandbox.exec`, what it asks the policy through HTTP on 127.0.0.1. Used by
tests/envs/test_harbor_agent.py.
"""

import asyncio
import json
import os
from asyncio.subprocess import PIPE
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from envs.errors import AgentFailed
from envs.gateway.session import Session
from envs.harness import Conversation
from envs.sandbox import Sandbox
from envs.task import Task

_AGENT = Path(__file__).with_name("harbor_agent.py")
_EXEC_LIMIT_S = 120.0
"""Of a command to which Harbor gives no limit."""


@dataclass(frozen=True, kw_only=True)
class HarborTerminus2:
    """The Harness. Its Conversation must be a gateway Session."""

    python: Path
    """Of Harbor's environment."""
    port: int
    """Where the gateway listens, on 127.0.0.1."""
    model: str
    directory: Path
    """For the agent's logs and facts.json, what Harbor itself recorded; must not exist."""
    name: str = field(default="harbor-terminus-2", init=False)

    async def run(self, task: Task, sandbox: Sandbox, conversation: Conversation) -> None:
        """Plays to the agent's end; AgentFailed when its process fails."""
        assert isinstance(conversation, Session), "Harbor's agent speaks through a gateway session"
        self.directory.mkdir(parents=True)
        shell = self.directory / "box.sock"
        server = await asyncio.start_unix_server(_shell_of(sandbox), shell, limit=1 << 24)
        env = {**os.environ, "HOSTED_VLLM_API_KEY": conversation.token, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
        arguments = (self.python, _AGENT, shell, f"http://127.0.0.1:{self.port}/v1", self.model, self.directory / "out")
        agent = await asyncio.create_subprocess_exec(
            *map(str, arguments), stdin=PIPE, stdout=PIPE, stderr=PIPE, env=env | {"NO_PROXY": "*"}
        )
        try:
            _, complaint = await agent.communicate(task.instruction.encode())
        finally:
            if agent.returncode is None:
                agent.kill()
                await agent.wait()
            server.close()
        if failed := conversation.bug or conversation.failure:
            raise failed
        if agent.returncode:
            raise AgentFailed(f"Harbor's agent ended with status {agent.returncode}: {complaint.decode()[-3000:]}")

    @property
    def facts(self) -> dict[str, Any]:
        """What Harbor recorded: rollout details, number of episodes and its own trajectory."""
        return json.loads((self.directory / "out" / "facts.json").read_text())


def _shell_of(sandbox: Sandbox) -> Any:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async for line in reader:
            asked = json.loads(line)
            result = await sandbox.exec(
                asked["command"],
                timeout_s=asked["timeout_s"] or _EXEC_LIMIT_S,
                env=asked["env"],
                cwd=asked["cwd"],
            )
            answer = {
                "stdout": result.stdout.decode(errors="replace"),
                "stderr": result.stderr.decode(errors="replace"),
                "return_code": result.exit_code,
            }
            writer.write(json.dumps(answer).encode() + b"\n")
            await writer.drain()
        writer.close()

    return serve
