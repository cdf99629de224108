"""Conversations: what a harness talks to, and where every Turn is recorded.

Invariant: a Turn's tokens are the Completion's own, so every prompt is the last context plus new ids; `turns` is whole
at any moment, the last Turn included. Made by envs/build.py for run_episode; `ask` is called by harnesses.
"""

import hashlib
import time
from collections.abc import Sequence
from dataclasses import replace

from envs.errors import ContextLimit, TurnLimit
from envs.renderer import Renderer
from envs.sampler import Completion, Sampler, SamplingParams
from trajectories.schema import Turn, TurnTokens, Usage


class RecordedConversation:
    """What Conversations have in common: their Turns as they happen."""

    def __init__(self) -> None:
        self._prompt = ""
        self._turns: list[Turn] = []
        self._replied = 0.0

    @property
    def prompt(self) -> str:
        """The first user message; "" before the first `ask`."""
        return self._prompt

    @property
    def turns(self) -> Sequence[Turn]:
        """All Turns; the last one's observation is "" until the next reply came."""
        return self._turns

    @property
    def was_cut(self) -> bool:
        """Whether the last reply was cut at its token limit."""
        return bool(self._turns) and self._turns[-1].finish_reason == "length"

    def record(
        self,
        message: str,
        asked: float,
        reply: str,
        finish_reason: str,
        *,
        tokens: TurnTokens | None = None,
        usage: Usage | None = None,
    ) -> None:
        """Completes the last Turn with its observation and adds the new one; `asked` is a time.monotonic()."""
        if self._turns:
            self._turns[-1] = replace(self._turns[-1], observation=message, execute_s=asked - self._replied)
        else:
            self._prompt = message
        self._replied = time.monotonic()
        self._turns.append(
            Turn(
                reply=reply,
                observation="",
                finish_reason=finish_reason,
                tokens=tokens,
                sample_s=self._replied - asked,
                usage=usage,
            )
        )


class SampledConversation(RecordedConversation):
    """A Conversation whose replies a Sampler samples, token by token exact."""

    def __init__(
        self,
        renderer: Renderer,
        sampler: Sampler,
        params: SamplingParams,
        *,
        max_turns: int,
        context_tokens: int,
        key: str,
    ) -> None:
        """At most `max_turns` replies and `context_tokens` ids, prompt and reply together; `key` is for routing."""
        if max_turns < 1 or context_tokens < 2:
            raise ValueError(f"need max_turns >= 1 and context_tokens >= 2, got {max_turns} and {context_tokens}")
        super().__init__()
        self._renderer = renderer
        self._sampler = sampler
        self._params = params
        self._max_turns = max_turns
        self._context_tokens = context_tokens
        self._key = key
        self._context = list[_Exchange]()
        self._last: _Exchange = ((), ())

    async def ask(self, message: str) -> str:
        """The sampled reply. Raises TurnLimit or ContextLimit before asking, SamplerError when no reply came."""
        return await self._ask(message, self._context)

    async def ask_aside(self, message: str) -> str:
        """The sampled reply to `message` alone, in a context that is used once; raises as `ask` does."""
        return await self._ask(message, [])

    @property
    def free_tokens(self) -> int:
        """Tokens that the context still has room for."""
        return self._context_tokens - (sum(map(len, self._context[-1])) if self._context else 0)

    def unwind(self, free_tokens: int) -> None:
        """Takes the last exchanges out of the context, until so many tokens are free or only the first is left."""
        while len(self._context) > 1 and self.free_tokens < free_tokens:
            self._context.pop()

    def forget(self) -> None:
        """Starts a new context; the Turns stay."""
        self._context.clear()

    async def _ask(self, message: str, context: list["_Exchange"]) -> str:
        """Asks in a context, and adds the exchange to it."""
        if len(self._turns) >= self._max_turns:
            raise TurnLimit(f"{self._max_turns} turns are played")
        prompt_ids, prefix_len = self._render(message, context)
        free = self._context_tokens - len(prompt_ids)
        if free < 1:
            raise ContextLimit(f"a prompt of {len(prompt_ids)} tokens leaves no room in {self._context_tokens}")
        params = replace(self._params, max_tokens=min(self._params.max_tokens, free), seed=self._seed())
        asked = time.monotonic()
        completion = await self._sampler.sample(prompt_ids, params, stop_ids=self._renderer.stop_ids, key=self._key)
        self._last = (prompt_ids, completion.ids)
        context.append(self._last)
        reply = self._renderer.decode(completion.ids)
        tokens = _tokens(prefix_len, prompt_ids[prefix_len:], completion)
        self.record(message, asked, reply, completion.finish_reason, tokens=tokens)
        return reply

    def _seed(self) -> int | None:
        """A seed of its own for each reply of each rollout, so that a seeded run still explores."""
        if self._params.seed is None:
            return None
        text = f"{self._params.seed}/{self._key}/{len(self._turns)}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest())

    def _render(self, message: str, context: Sequence["_Exchange"]) -> tuple[tuple[int, ...], int]:
        """The prompt, and how many of its first ids the last Turn's context begins with."""
        last = self._last[0] + self._last[1]
        if not context:
            prompt_ids = self._renderer.first(message)
            return prompt_ids, _common_len(last, prompt_ids)
        ids, sampled = context[-1]
        prefix_len, new_ids = self._renderer.next(ids, sampled, message)
        prompt_ids = (ids + sampled)[:prefix_len] + new_ids
        return prompt_ids, prefix_len if context[-1] is self._last else _common_len(last, prompt_ids)


_Exchange = tuple[tuple[int, ...], tuple[int, ...]]
"""The ids of a prompt, and those of its reply."""


class ScriptedConversation(RecordedConversation):
    """A Conversation whose replies were written before; its Turns hold no tokens."""

    def __init__(self, replies: Sequence[str]) -> None:
        """TurnLimit when asked for more than these."""
        super().__init__()
        self._replies = tuple(replies)

    async def ask(self, message: str) -> str:
        """The next written reply, whatever the message."""
        num_told = len(self._turns)
        if num_told == len(self._replies):
            raise TurnLimit(f"all {num_told} written replies are told")
        reply = self._replies[num_told]
        self.record(message, time.monotonic(), reply, "stop")
        return reply


def _tokens(prefix_len: int, new_ids: tuple[int, ...], completion: Completion) -> TurnTokens:
    return TurnTokens(
        prefix_len=prefix_len,
        new_ids=new_ids,
        sampled_ids=completion.ids,
        logprobs=completion.logprobs,
        spans=completion.spans,
    )


def _common_len(a: Sequence[int], b: Sequence[int]) -> int:
    """How many first ids two contexts share."""
    return next((k for k, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
