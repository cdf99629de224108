"""A Harness that a function plays."""

from collections.abc import Awaitable, Callable

from envs.harness import Conversation
from envs.sandbox import Sandbox
from envs.task import Task


class FunctionHarness:
    """Plays a Task by calling `play(task, sandbox, conversation)`."""

    name = "function"

    def __init__(self, play: Callable[[Task, Sandbox, Conversation], Awaitable[object]]) -> None:
        self._play = play

    async def run(self, task: Task, sandbox: Sandbox, conversation: Conversation) -> None:
        await self._play(task, sandbox, conversation)
