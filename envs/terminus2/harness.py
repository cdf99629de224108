"""Terminus2: the harness in which a policy drives a terminal by JSON or XML replies.

Invariant: nothing of a reply with an error is done, and only a claim of completion, confirmed unless configured
otherwise, ends a rollout as completed (but see Malformed.END). Called by envs/episode.py.
"""

from dataclasses import dataclass
from enum import StrEnum

from envs.errors import MalformedReply
from envs.harness import Conversation
from envs.sandbox import Sandbox
from envs.task import Task
from envs.terminus2.parser import ParsedReply
from envs.terminus2.prompts import FULL, Prompts
from envs.terminus2.summary import LongConversation, SummaryConfig, ask_within_context
from envs.terminus2.terminal import View, start_terminal


class Malformed(StrEnum):
    """What a reply that is cut or cannot be parsed leads to."""

    REASK = "reask"
    """The error is told and the policy tries again: terminus-2 to the letter."""
    END = "end"
    """The rollout ends as if completed, unconfirmed; the Verifier judges. Stops a policy that is paid by the Verifier
    alone from learning to babble once its work is done, without costing it what it has done."""
    FAIL = "fail"
    """The rollout ends with agent_error, reward 0 by default: the policy also learns to end well."""


@dataclass(frozen=True, slots=True)
class Terminus2:
    """The Harness. `Terminus2(FULL)` is terminus-2; `Terminus2(COMPACT)` the same for a tiny policy."""

    prompts: Prompts = FULL
    """What is said, and the terminal that it is about."""
    confirm: bool = True
    """Whether completion must be claimed in two replies running."""
    malformed: Malformed = Malformed.REASK
    summary: SummaryConfig | None = None
    """When a full context is summed up; None: never, and the rollout ends with context_limit."""

    @property
    def name(self) -> str:
        """As Harbor calls it."""
        return "terminus-2"

    async def run(self, task: Task, sandbox: Sandbox, conversation: Conversation) -> None:
        """Plays until completion; raises what the conversation and the Sandbox raise, and MalformedReply if so set."""
        terminal, view = await start_terminal(sandbox, self.prompts.terminal)
        message = self.prompts.first_message(task.instruction, view)
        is_claimed = False
        while True:
            reply = await self._ask(conversation, message, task, view)
            parsed = self.prompts.read(reply, was_cut=conversation.was_cut)
            if parsed is None or parsed.error:
                if self.malformed is Malformed.END:
                    return
                message = self._complain(parsed)
                continue
            is_over = parsed.is_complete and (is_claimed or not self.confirm)
            if parsed.commands or not is_over:
                view = await terminal.type(parsed.commands)
            if is_over:
                return
            is_claimed = parsed.is_complete
            message = self.prompts.next_message(parsed, view)

    async def _ask(self, conversation: Conversation, message: str, task: Task, view: View) -> str:
        if self.summary is None:
            return await conversation.ask(message)
        if not isinstance(conversation, LongConversation):
            raise TypeError(f"{type(conversation).__name__} keeps no context of its own; play without summaries")
        return await ask_within_context(
            conversation,
            message,
            config=self.summary,
            instruction=task.instruction,
            first=self.prompts.first_message(task.instruction, view),
            screen=view.screen,
        )

    def _complain(self, parsed: ParsedReply | None) -> str:
        """The message about a bad reply, None being a cut one; it leaves an earlier claim of completion standing."""
        if self.malformed is Malformed.FAIL:
            raise MalformedReply("the reply was cut at its token limit" if parsed is None else parsed.error)
        return self.prompts.cut_message() if parsed is None else self.prompts.error_message(parsed)
