"""The Harness Protocol: what turns model replies into actions in a Sandbox.

Invariant: a harness ends by returning or by raising an EpisodeError; it never judges.
Called by envs/episode.py; implemented by envs/terminus2, bash_tools, answer, oracle and nop of envs/.
"""

from collections.abc import Sequence
from typing import Protocol

from envs.sandbox import Sandbox
from envs.task import Task
from trajectories.schema import Turn


class Conversation(Protocol):
    """The policy as a harness sees it: say something, get a reply. It records every Turn.

    `ask` raises TurnLimit, ContextLimit or SamplerError; the Turns recorded until then stay readable.
    """

    @property
    def prompt(self) -> str:
        """The first user message; "" before the first `ask`."""
        ...

    @property
    def turns(self) -> Sequence[Turn]:
        """The Turns so far, oldest first."""
        ...

    async def ask(self, message: str) -> str:
        """The reply to `message`, which is also the observation that answers the previous reply."""
        ...

    @property
    def was_cut(self) -> bool:
        """Whether the last reply was cut at its token limit (finish reason "length")."""
        ...


class Harness(Protocol):
    """What turns replies into actions."""

    @property
    def name(self) -> str:
        """Appears in provenance."""
        ...

    async def run(self, task: Task, sandbox: Sandbox, conversation: Conversation) -> None:
        """Plays the Task until it is completed; every other ending is an EpisodeError."""
        ...
