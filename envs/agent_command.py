"""AgentCommand: any program that speaks OpenAI's or Anthropic's protocol, run inside a Sandbox as the Harness.

Invariant: the program reaches the gateway's door and nothing else, with a token that is void as soon as it ended; its
Turns are what the gateway's session recorded. Made by envs/build.py; called by envs/episode.py.

The program finds in its environment:
    OPENAI_BASE_URL, OPENAI_API_BASE, OPENAI_API_KEY     http://127.0.0.1:PORT/v1 and the session's token
    ANTHROPIC_BASE_URL, ANTHROPIC_API_KEY                the same door, without /v1
    THRESHER_MODEL, THRESHER_INSTRUCTION                 the model's name and the Task's instruction
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from envs.errors import AgentCommandError, AgentFailed, SandboxError
from envs.gateway.door import BOX_DIRECTORY, SOCKET_NAME
from envs.gateway.session import Session
from envs.harness import Conversation
from envs.local.staging import Staged
from envs.sandbox import ExecResult, Sandbox
from envs.task import Task

logger = logging.getLogger(__name__)

DOOR_PORT = 27182
"""On the Sandbox's own loopback."""
_RELAY = "/tmp/.thresher-relay"
_NO_LIMIT_S = 7 * 86400.0
"""The episode's own limit ends the program long before."""
_QUOTED_CHARS = 1500


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentCommandConfig:
    """A third-party agent."""

    command: str = ""
    """Run with bash in the Task's working directory; see envs/agent_command.py for its environment. What it needs must
    be in the sandbox: sandbox.mounts shows it directories of this machine."""
    env: tuple[str, ...] = ()
    """Further variables, NAME=VALUE each."""
    model: str = "policy"
    """The name that requests must ask for."""

    def __post_init__(self) -> None:
        for item in self.env:
            if not item.partition("=")[0].isidentifier() or "=" not in item:
                raise ValueError(f"agent env must be NAME=VALUE, got {item!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentCommand:
    """The Harness. Its Conversation must be a gateway Session."""

    config: AgentCommandConfig
    stage: Callable[[], Staged]
    """Compiles the relay, or finds it compiled."""
    name: str = field(default="agent-command", init=False)

    async def run(self, task: Task, sandbox: Sandbox, conversation: Conversation) -> None:
        """Runs the program to its end.

        Raises what kept its last request from a reply, AgentFailed, and AgentCommandError when it never asked.
        """
        assert isinstance(conversation, Session), "agent-command speaks through a gateway session"
        conversation.open()
        try:
            await self._open_relay(sandbox)
            env = self._environment(task, conversation)
            result = await sandbox.exec(self.config.command, timeout_s=_NO_LIMIT_S, env=env)
        finally:
            conversation.close()
        logger.debug("key=%s agent exit_code=%d stdout=%r", conversation.key, result.exit_code, result.stdout[-2000:])
        _check(result, conversation)

    async def _open_relay(self, sandbox: Sandbox) -> None:
        await sandbox.write_file(_RELAY, await asyncio.to_thread(self._read_relay), mode=0o755)
        result = await sandbox.exec(f"{_RELAY} {DOOR_PORT} {BOX_DIRECTORY}/{SOCKET_NAME}", timeout_s=30)
        if result.exit_code != 0:
            raise SandboxError(f"open the relay inside: {result.stderr.decode(errors='replace').strip()}")

    def _read_relay(self) -> bytes:
        return self.stage().relay.read_bytes()

    def _environment(self, task: Task, session: Session) -> dict[str, str]:
        door = f"http://127.0.0.1:{DOOR_PORT}"
        return {
            "OPENAI_BASE_URL": f"{door}/v1",
            "OPENAI_API_BASE": f"{door}/v1",
            "OPENAI_API_KEY": session.token,
            "ANTHROPIC_BASE_URL": door,
            "ANTHROPIC_API_KEY": session.token,
            "NO_PROXY": "*",
            "THRESHER_MODEL": self.config.model,
            "THRESHER_INSTRUCTION": task.instruction,
            **dict(item.split("=", 1) for item in self.config.env),
        }


def _check(result: ExecResult, session: Session) -> None:
    """Raises what the rollout ended with, unless the program ended well."""
    if session.bug is not None:
        raise session.bug
    if session.failure is not None:
        raise session.failure
    if result.exit_code == 0:
        return
    said = (result.stderr or result.stdout).decode(errors="replace").strip()[-_QUOTED_CHARS:]
    problem = f"the agent's command ended with exit status {result.exit_code}: {said or 'it printed nothing'}"
    if not session.turns:
        raise AgentCommandError(f"{problem}\n(before its first request; check the command and sandbox.mounts)")
    raise AgentFailed(problem)
