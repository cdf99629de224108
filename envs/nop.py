"""NopHarness: does nothing, so that the Verifier judges an untouched Sandbox.

Invariant: no reply is asked for and no command is run. Called by envs/episode.py.
"""

from envs.harness import Conversation
from envs.sandbox import Sandbox
from envs.task import Task


class NopHarness:
    """A Task that it solves is not a Task."""

    name = "nop"

    async def run(self, task: Task, sandbox: Sandbox, conversation: Conversation) -> None:
        """Returns at once."""
