"""Summaries: how terminus-2 goes on when its context is nearly full, in three tries of falling cost.

Invariant: after a summary the policy starts a new context, which opens with the Task and holds what was handed over as
the user's words; every reply on the way is a Turn of the same record, exact tokens included. Called by
envs/terminus2/harness.py.

The order is that of terminus-2 (Harbor 0.25): a summary of everything, questions from a reader who saw the summary
alone, and answers from the one who saw everything; where those do not fit, a short summary of the screen; where that
does not fit, the Task and the screen. The words are this project's.
"""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from envs.errors import ContextLimit
from envs.harness import Conversation

_SCREEN_CHARS = 1000  # of the screen, in the short summary

_SUMMARIZE = """\
Your context is nearly full, so another agent will go on from here, and it will know only what you write now. \
Do not send commands. Write for it:
1. What has been done so far, and with which outcome.
2. What you learned about the machine: paths, contents of files, versions, outputs, error messages. Quote them exactly.
3. Where the work stands at this moment, and what you were about to do.
4. What is still missing, and what might go wrong.

The task, for reference:
{instruction}
"""
_QUESTIONS = """\
You take over a task from another agent, who wrote a summary for you. Do not send commands. Before you go on, ask it \
what you need to know and the summary does not say: at least five questions.

The task:
{instruction}

The summary:
{summary}

The terminal now:
{screen}
"""
_ANSWERS = """\
The agent that takes over asks the following. Do not send commands; answer each question, in detail.

{questions}
"""
_SHORT = """\
You are about to go on with a task whose history is lost. Do not send commands. Say in a few sentences what seems to \
be done and what comes next.

The task:
{instruction}

The end of the terminal:
{screen}
"""
_HANDOVER = """\
{first}
You go on with work that another agent began. It wrote this summary:
{summary}

You asked it:
{questions}

It answered:
{answers}

Go on from here, in the reply format above.
"""
_SHORT_HANDOVER = """\
{first}
Work on this task has begun; its history is lost. What seems to be the case:
{summary}

Go on from here, in the reply format above.
"""


@runtime_checkable
class LongConversation(Conversation, Protocol):
    """A Conversation whose context may be given up while its record goes on."""

    @property
    def free_tokens(self) -> int:
        """Tokens that the context still has room for."""
        ...

    def unwind(self, free_tokens: int) -> None:
        """Takes the last exchanges out of the context, until so many tokens are free or only the first is left."""
        ...

    def forget(self) -> None:
        """Starts a new context: the next `ask` sees nothing of what was said."""
        ...

    async def ask_aside(self, message: str) -> str:
        """The reply to `message` alone, in a context that nobody else sees."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SummaryConfig:
    """When the context is summed up."""

    below_tokens: int = 8000
    """As soon as fewer tokens than these are free; 0: only when a prompt does not fit."""
    unwind_tokens: int = 4000
    """When a prompt did not fit, so many tokens are freed for the summary by dropping the last exchanges."""

    def __post_init__(self) -> None:
        if self.below_tokens < 0 or self.unwind_tokens < 1:
            raise ValueError(f"need below_tokens >= 0 and unwind_tokens >= 1, got {self}")


async def ask_within_context(
    conversation: LongConversation, message: str, *, config: SummaryConfig, instruction: str, first: str, screen: str
) -> str:
    """The reply to `message`, or, after a summary, to a message that opens with `first` and hands over.

    Raises ContextLimit when not even `first` fits.
    """
    if conversation.turns and conversation.free_tokens < config.below_tokens:
        return await conversation.ask(await _hand_over(conversation, instruction, first, screen))
    try:
        return await conversation.ask(message)
    except ContextLimit:
        if not conversation.turns:
            raise
    conversation.unwind(config.unwind_tokens)
    return await conversation.ask(await _hand_over(conversation, instruction, first, screen))


async def _hand_over(conversation: LongConversation, instruction: str, first: str, screen: str) -> str:
    """The first message of a new context, which has then begun."""
    try:
        summary = await conversation.ask(_SUMMARIZE.format(instruction=instruction))
        asked = _QUESTIONS.format(instruction=instruction, summary=summary, screen=screen)
        questions = await conversation.ask_aside(asked)
        answers = await conversation.ask(_ANSWERS.format(questions=questions))
    except ContextLimit:
        return await _hand_over_shortly(conversation, instruction, first, screen)
    conversation.forget()
    return _HANDOVER.format(first=first, summary=summary, questions=questions, answers=answers)


async def _hand_over_shortly(conversation: LongConversation, instruction: str, first: str, screen: str) -> str:
    conversation.forget()
    try:
        summary = await conversation.ask_aside(_SHORT.format(instruction=instruction, screen=screen[-_SCREEN_CHARS:]))
    except ContextLimit:
        return first
    return _SHORT_HANDOVER.format(first=first, summary=summary)
