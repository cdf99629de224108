"""Session: one trajectory as the gateway records it, whatever program speaks.

Invariant: a prompt that goes on from a sampled reply holds exactly the ids that were sent and sampled before it; what
was sampled is recorded before the client hears of it. Opened by envs/gateway/door.py; protocols call `reply` and
`complete`, a Harness reads `turns` and `failure`.
"""

import asyncio
import hashlib
import hmac
import secrets
import time
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, replace
from weakref import WeakValueDictionary

from envs.errors import ContextLimit, EpisodeError, TurnLimit
from envs.gateway.dialogue import Said, Tool, parse_reply
from envs.gateway.history import History, Reply
from envs.gateway.prompts import ChatPrompts
from envs.sampler import Completion, Sampler, SamplingParams
from trajectories.schema import Turn


class SessionClosed(Exception):
    """The rollout is over; its token opens nothing any more."""


class TooManyRequests(Exception):
    """More requests at once than a session may have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionConfig:
    """What a session may do."""

    sampling: SamplingParams
    """Of every reply. A request may ask for fewer tokens, and for more only if `follows_client`."""
    follows_client: bool = False
    """Whether requests set temperature, top_p and seed. False in rollouts: a learner needs the one it divides by."""
    max_turns: int = 1_000_000
    context_tokens: int = 32_768
    """Prompt and reply together."""
    max_at_once: int = 16
    """Requests in flight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What one request asks for; None leaves it to the session."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A reply, as protocols need it."""

    said: Said
    completion: Completion
    prompt_ids: tuple[int, ...]
    num_known: int
    """Prompt ids that were sent or sampled before."""
    text: str
    """The reply without its stop token, calls unparsed."""


class Session:
    """A Conversation that programs hold over HTTP; `ask` serves harnesses that run on the host."""

    def __init__(self, prompts: ChatPrompts, sampler: Sampler, config: SessionConfig, *, key: str) -> None:
        """`key` is the trajectory id, for routing."""
        self.id = secrets.token_hex(8)
        self._secret = secrets.token_urlsafe(32)
        self.config = config
        self.key = key
        self.failure: EpisodeError | None = None
        """Why the last request got no reply; None once a later one did."""
        self.bug: Exception | None = None
        """What went wrong in the gateway itself; whoever owns the session raises it."""
        self.kept: dict[str, list[Said]] = {}
        """Dialogues by the id under which a protocol lets a client go on from them."""
        self._prompts = prompts
        self._sampler = sampler
        self._history = History(prompts)
        self._running: set[asyncio.Task[Completion]] = set()
        self._num_asked = 0
        self._is_closed = False
        self._asked: list[Said] = []

    @property
    def token(self) -> str:
        """What a client authenticates with; new for each session, and void once it is closed."""
        return f"thresher.{self.id}.{self._secret}"

    def accepts(self, token: str) -> bool:
        """Whether this is the token of this session, and the session is open."""
        return hmac.compare_digest(self.token.encode(), token.encode()) and not self._is_closed

    # -- as a Conversation --------------------------------------------------------------------------------------------

    @property
    def prompt(self) -> str:
        """What was said before the first reply, as text."""
        return self._history.prompt

    @property
    def turns(self) -> Sequence[Turn]:
        """All Turns, branch after branch, each branch in the order of time."""
        return self._history.turns()

    @property
    def was_cut(self) -> bool:
        """Whether the last reply was cut at its token limit."""
        return self._history.was_cut

    async def ask(self, message: str) -> str:
        """The reply to one more user message. Raises what `reply` raises."""
        answer = await self.reply([*self._asked, Said(role="user", content=message)], (), Wanted(), parse=False)
        self._asked += [Said(role="user", content=message), answer.said]
        return answer.text

    # -- for protocols ------------------------------------------------------------------------------------------------

    @property
    def num_breaks(self) -> int:
        """How many branches were begun after the first."""
        return self._history.num_breaks

    async def reply(self, said: Sequence[Said], tools: Sequence[Tool], wanted: Wanted, *, parse: bool = True) -> Answer:
        """The policy's reply to a dialogue; `parse` reads tool calls out of it.

        Raises TurnLimit, ContextLimit or SamplerError (kept as `failure`), TooManyRequests, SessionClosed, and
        TemplateRefused when the policy's template has no form for the dialogue.
        """
        known = self._history.find(said, tools)
        asked = said[known.reply.num_said :] if known else said
        if known:
            prompt_ids = known.ids + self._prompts.following(asked, tools, known.reply.completion.ids)
        else:
            prompt_ids = self._prompts.first(said, tools)
        text = "\n\n".join(each.text for each in asked)
        num_known = len(known.ids) if known else 0
        completion, began = await self._sample(prompt_ids, wanted)
        words = self._prompts.renderer.decode(completion.ids)
        answered = parse_reply(words) if parse else Said(role="assistant", content=words)
        reply = Reply(
            asked=text,
            text=words,
            prompt_len=len(prompt_ids),
            num_said=len(said) + 1,
            completion=completion,
            began=began,
        )
        self._history.record(known, reply, prompt_ids, [*said, answered], tuple(tools))
        return Answer(
            said=answered, completion=completion, prompt_ids=tuple(prompt_ids), num_known=num_known, text=words
        )

    async def complete(self, prompt: str | Sequence[int], wanted: Wanted) -> Answer:
        """The continuation of a prompt that its sender has templated. Raises as `reply`, TemplateRefused apart."""
        known, prompt_ids = self._history.find_raw(prompt)
        num_known = len(known.ids) if known else 0
        completion, began = await self._sample(prompt_ids, wanted)
        words = self._prompts.renderer.decode(completion.ids)
        reply = Reply(
            asked=self._prompts.spell(prompt_ids[num_known:]),
            text=words,
            prompt_len=len(prompt_ids),
            num_said=0,
            completion=completion,
            began=began,
        )
        self._history.record(known, reply, prompt_ids, [], None)
        answered = Said(role="assistant", content=words)
        return Answer(
            said=answered, completion=completion, prompt_ids=tuple(prompt_ids), num_known=num_known, text=words
        )

    def count_tokens(self, said: Sequence[Said], tools: Sequence[Tool]) -> int:
        """Tokens of the prompt that a dialogue makes, if it were new."""
        return len(self._prompts.first(said, tools))

    def open(self) -> None:
        """Takes requests again: the next step of a Task goes on in the same session."""
        self._is_closed = False

    def close(self) -> None:
        """Ends what is in flight and refuses everything after; what was recorded stays readable."""
        self._is_closed = True
        for task in self._running:
            task.cancel()

    # -- sampling -----------------------------------------------------------------------------------------------------

    async def _sample(self, prompt_ids: list[int], wanted: Wanted) -> tuple[Completion, float]:
        """A Completion and when it was asked for, a time.monotonic()."""
        if self._is_closed:
            raise SessionClosed("this session is over")
        if len(self._running) >= self.config.max_at_once:
            raise TooManyRequests(f"{self.config.max_at_once} requests of this session are in flight")
        try:
            params = self._params(len(prompt_ids), wanted)
            began = time.monotonic()
            sampling = self._sampler.sample(prompt_ids, params, stop_ids=self._prompts.renderer.stop_ids, key=self.key)
            completion = await self._run(sampling)
        except EpisodeError as error:
            self.failure = error
            raise
        self.failure = None
        return completion, began

    async def _run(self, sampling: Awaitable[Completion]) -> Completion:
        """The sampling as a task of its own, so that `close` can end it."""
        task = asyncio.ensure_future(sampling)
        self._running.add(task)
        try:
            return await task
        except asyncio.CancelledError:
            if self._is_closed and not _is_cancelled():
                raise SessionClosed("this session is over") from None
            raise
        finally:
            task.cancel()
            self._running.discard(task)

    def _params(self, num_prompt: int, wanted: Wanted) -> SamplingParams:
        if self._history.num_replies + len(self._running) >= self.config.max_turns:
            raise TurnLimit(f"{self.config.max_turns} turns are played")
        free = self.config.context_tokens - num_prompt
        if free < 1:
            raise ContextLimit(f"a prompt of {num_prompt} tokens leaves no room in {self.config.context_tokens}")
        params = self.config.sampling
        if self.config.follows_client:
            chosen = {"temperature": wanted.temperature, "top_p": wanted.top_p, "seed": wanted.seed}
            params = replace(params, **{name: value for name, value in chosen.items() if value is not None})
            limit = wanted.max_tokens or params.max_tokens
        else:
            params = replace(params, seed=self._seed())
            limit = min(params.max_tokens, wanted.max_tokens or params.max_tokens)
        self._num_asked += 1
        return replace(params, max_tokens=min(limit, free))

    def _seed(self) -> int | None:
        """A seed of its own for each reply of each rollout, so that a seeded run still explores."""
        if self.config.sampling.seed is None:
            return None
        text = f"{self.config.sampling.seed}/{self.key}/{self._num_asked}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest())


class Sessions:
    """The open sessions, by token. A session that nobody holds any more is gone from here too."""

    def __init__(self) -> None:
        self._by_id: WeakValueDictionary[str, Session] = WeakValueDictionary()

    def add(self, session: Session) -> Session:
        """The same session, which its token opens from now on."""
        self._by_id[session.id] = session
        return session

    def find(self, token: str) -> Session | None:
        """The open session of a token."""
        _, _, rest = token.partition(".")
        session = self._by_id.get(rest.partition(".")[0])
        return session if session is not None and session.accepts(token) else None


def _is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
