"""History: what a session has sent and sampled, as branches of exact ids, and where a request goes on from.

Invariant: a branch only grows at its end; ids once in it are never made again from text. Called by
envs/gateway/session.py.

A request is matched against what is known: the longest known dialogue that it starts with keeps its ids, and only what
follows is rendered. Where it goes on from the end of a branch, the branch grows; a rewritten history, another set of
tools or a second dialogue beside the first starts a branch of its own (one Sample each, a break in between).
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from envs.gateway.dialogue import Said, Tool
from envs.gateway.prompts import ChatPrompts
from envs.sampler import Completion
from trajectories.schema import Turn, TurnTokens


@dataclass(slots=True, kw_only=True, eq=False)
class Reply:
    """One reply, where it stands."""

    asked: str
    """What was said since the reply before, as text."""
    text: str
    prompt_len: int
    num_said: int
    """Messages of the dialogue, this reply included."""
    completion: Completion
    began: float
    ended: float = field(default_factory=time.monotonic)

    @property
    def end(self) -> int:
        """Ids of the branch, this reply included."""
        return self.prompt_len + len(self.completion.ids)

    def turn(self, prefix_len: int, prompt_ids: Sequence[int], following: "Reply | None") -> Turn:
        """As a Turn, answered by what the following reply was asked."""
        tokens = TurnTokens(
            prefix_len=prefix_len,
            new_ids=tuple(prompt_ids[prefix_len:]),
            sampled_ids=self.completion.ids,
            logprobs=self.completion.logprobs,
            spans=self.completion.spans,
        )
        return Turn(
            reply=self.text,
            observation=following.asked if following else "",
            finish_reason=self.completion.finish_reason,
            tokens=tokens,
            sample_s=self.ended - self.began,
            execute_s=max(0.0, following.began - self.ended) if following else 0.0,
        )


@dataclass(slots=True, kw_only=True, eq=False)
class Branch:
    """A dialogue that has only grown."""

    tools: tuple[Tool, ...] | None
    """None: prompts that their sender has templated."""
    ids: list[int] = field(default_factory=list[int])
    said: list[Said] = field(default_factory=list[Said])
    replies: list[Reply] = field(default_factory=list[Reply])


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """A start of a prompt that was sent and sampled before."""

    branch: Branch
    reply: Reply
    ids: list[int]
    """What is known to stand at the start of the prompt."""


class History:
    """All branches of a session."""

    def __init__(self, prompts: ChatPrompts) -> None:
        self._prompts = prompts
        self._branches: list[Branch] = []

    @property
    def prompt(self) -> str:
        """What was said before the first reply, as text."""
        return self._branches[0].replies[0].asked if self._branches else ""

    @property
    def was_cut(self) -> bool:
        """Whether the last reply was cut at its token limit."""
        return bool(self._branches) and self._branches[-1].replies[-1].completion.finish_reason == "length"

    @property
    def num_breaks(self) -> int:
        """How many branches were begun after the first."""
        return max(0, len(self._branches) - 1)

    @property
    def num_replies(self) -> int:
        """Over all branches."""
        return sum(len(branch.replies) for branch in self._branches)

    def turns(self) -> list[Turn]:
        """All Turns, branch after branch, each branch in the order of time."""
        replies = [(branch, reply) for branch in self._branches for reply in branch.replies]
        turns: list[Turn] = []
        context: list[int] = []
        for k, (branch, reply) in enumerate(replies):
            prompt_ids = branch.ids[: reply.prompt_len]
            following = replies[k + 1][1] if k + 1 < len(replies) else None
            turns.append(reply.turn(_common_length(context, prompt_ids), prompt_ids, following))
            context = branch.ids[: reply.end]
        return turns

    def find(self, said: Sequence[Said], tools: Sequence[Tool]) -> "Known | None":
        """The longest known start of the dialogue that ends with a reply."""
        found: Known | None = None
        for branch in self._branches:
            if branch.tools != tuple(tools):
                continue
            num_shared = _common_length(branch.said, said)
            for reply in branch.replies:
                is_longer = found is None or reply.num_said > found.reply.num_said
                if reply.num_said <= num_shared and reply.num_said < len(said) and is_longer:
                    found = Known(branch=branch, reply=reply, ids=branch.ids[: reply.end])
        return found

    def find_raw(self, prompt: str | Sequence[int]) -> "tuple[Known | None, list[int]]":
        """As `find`, of a prompt that its sender has templated, and the ids of that prompt.

        A sender may have left the stop token away; then all before it is known, and the prefix breaks there.
        """
        found: Known | None = None
        rest = prompt
        for known in self._raw_starts():
            start = self._prompts.spell(known.ids) if isinstance(prompt, str) else known.ids
            if prompt[: len(start)] == start and len(known.ids) > _length(found):
                found, rest = known, prompt[len(start) :]
        rest_ids = self._prompts.raw(rest) if isinstance(rest, str) else list(rest)
        return found, (found.ids if found else []) + rest_ids

    def _raw_starts(self) -> "Iterator[Known]":
        for branch in self._branches:
            for reply in branch.replies if branch.tools is None else ():
                ids = branch.ids[: reply.end]
                yield Known(branch=branch, reply=reply, ids=ids)
                if ids[-1] in self._prompts.renderer.stop_ids:
                    yield Known(branch=branch, reply=reply, ids=ids[:-1])

    def record(
        self,
        known: "Known | None",
        reply: "Reply",
        prompt_ids: list[int],
        said: list[Said],
        tools: tuple[Tool, ...] | None,
    ) -> None:
        """Adds the reply to the branch that it goes on from the very end of, else to a new one."""
        if known and known.branch.replies[-1] is known.reply and len(known.ids) == known.reply.end:
            branch = known.branch
        else:
            branch = Branch(tools=tools)
            self._branches.append(branch)
        branch.ids[:] = [*prompt_ids, *reply.completion.ids]
        branch.said[:] = said
        branch.replies.append(reply)


def _length(known: Known | None) -> int:
    return len(known.ids) if known else 0


def _common_length(one: Sequence[object], other: Sequence[object]) -> int:
    """How long a start the two share."""
    for k, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return k
    return min(len(one), len(other))
