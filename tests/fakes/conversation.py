"""A Conversation with replies that are known beforehand, and a Harness that a function plays."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from envs.errors import TurnLimit
from envs.harness import Conversation
from envs.sandbox import Sandbox
from envs.task import Task
from trajectories.schema import Turn


class ScriptedConversation:
    """Gives its replies in order, then raises TurnLimit."""

    def __init__(self, replies: Sequence[str] = ()) -> None:
        self._replies = list(replies)
        self._turns: list[Turn] = []
        self.prompt = ""
        self.was_cut = False

    @property
    def turns(self) -> Sequence[Turn]:
        return self._turns

    async def ask(self, message: str) -> str:
        if self._turns:
            self._turns[-1] = replace(self._turns[-1], observation=message)
        else:
            self.prompt = message
        if len(self._turns) == len(self._replies):
            raise TurnLimit(f"{len(self._turns)} turns")
        self._turns.append(
            Turn(reply=self._replies[len(self._turns)], observation="", finish_reason="stop", tokens=None)
        )
        return self._turns[-1].reply


class FunctionHarness:
    """Plays a Task by calling `play(task, sandbox, conversation)`."""

    name = "function"

    def __init__(self, play: Callable[[Task, Sandbox, Conversation], Awaitable[object]]) -> None:
        self._play = play

    async def run(self, task: Task, sandbox: Sandbox, conversation: Conversation) -> None:
        await self._play(task, sandbox, conversation)
