"""Teachers behind an OpenAI-compatible endpoint: asked by text, at the rate that they bear, within a budget.

Invariant: a reply is either recorded with its usage or an error was raised; no key is ever held in a config, a log or a
Trajectory, only the name of the environment variable that holds it. Built by envs/build.py from a recipe's Teacher.

Failures: SamplerError when no reply came in time, ContextLimit when the endpoint says that the prompt is too long,
BudgetExceeded when the budget is spent, TeacherRefused when the endpoint will never answer such a request.
"""

import asyncio
import logging
import os
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

from envs.conversation import RecordedConversation
from envs.errors import BudgetExceeded, ContextLimit, SamplerError, TeacherRefused, TurnLimit
from envs.request_limiter import Limiter, retry_after_s
from envs.sampler import SamplingParams
from trajectories.schema import Usage

if TYPE_CHECKING:  # the client takes a second to import, which only they pay who ask a teacher
    import openai

logger = logging.getLogger(__name__)

_ENDINGS = ("stop", "length")
_FIRST_BACKOFF_S, _MAX_BACKOFF_S = 0.5, 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Teacher:
    """An OpenAI-compatible endpoint that plays instead of a served policy."""

    base_url: str = ""
    """As the `openai` client takes it: http://HOST/v1. Empty: no teacher."""
    model: str = ""
    api_key_env: str = ""
    """NAME of the environment variable that holds the key, on every node; empty when the endpoint wants none."""
    max_concurrency: int = 64
    """Requests at once; fewer while the endpoint answers 429."""
    max_attempts: int = 8
    """For one reply, those answered 429 apart."""
    request_timeout_s: float = 600.0
    reply_deadline_s: float = 3600.0
    """For one reply, every attempt and pause included."""
    max_tokens: int | None = None
    """Budget: prompt and completion tokens of the whole run."""
    max_cost_usd: float | None = None
    """Budget: needs the two prices."""
    prompt_usd_per_million: float = 0.0
    completion_usd_per_million: float = 0.0

    def __post_init__(self) -> None:
        if bool(self.base_url) != bool(self.model):
            raise ValueError("teacher.base_url and teacher.model go together; give both, or neither")
        for name in ("max_concurrency", "max_attempts", "request_timeout_s", "reply_deadline_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"teacher.{name} must be above 0, got {getattr(self, name)}")
        if self.max_cost_usd is not None and not (self.prompt_usd_per_million or self.completion_usd_per_million):
            raise ValueError("teacher.max_cost_usd needs prompt_usd_per_million and completion_usd_per_million")

    @property
    def is_asked(self) -> bool:
        """Whether there is a teacher at all."""
        return bool(self.base_url)

    def key(self) -> str:
        """The key itself. Raises ValueError when its variable is not set."""
        if not self.api_key_env:
            return "none"
        if not (key := os.environ.get(self.api_key_env)):
            raise ValueError(f"environment variable {self.api_key_env} (teacher.api_key_env) is not set; export it")
        return key

    def share(self, num_workers: int, spent: Usage) -> "Teacher":
        """What each of the workers may spend and ask at once, after what the run has spent before.

        Budgets are split evenly and kept by each worker on its own, so no request waits for another process.
        """
        tokens, cost = self.max_tokens, self.max_cost_usd
        return replace(
            self,
            max_tokens=None if tokens is None else (tokens - spent.num_tokens) // num_workers,
            max_cost_usd=None if cost is None else (cost - spent.cost_usd) / num_workers,
            max_concurrency=max(1, self.max_concurrency // num_workers),
        )


class RemoteConversation(RecordedConversation):
    """A Conversation whose replies come from a Teacher; its Turns hold text and usage, no tokens."""

    def __init__(self, endpoint: "Endpoint", params: SamplingParams, *, max_turns: int) -> None:
        super().__init__()
        self._endpoint = endpoint
        self._params = params
        self._max_turns = max_turns
        self._messages: list[dict[str, str]] = []

    async def ask(self, message: str) -> str:
        """The teacher's reply. Raises TurnLimit before asking, and what the module lists."""
        if len(self.turns) >= self._max_turns:
            raise TurnLimit(f"{self._max_turns} turns are played")
        asked = time.monotonic()
        messages = [*self._messages, {"role": "user", "content": message}]
        reply = await self._endpoint.ask(messages, self._params)
        self._messages = [*messages, {"role": "assistant", "content": reply.text}]
        self.record(message, asked, reply.text, reply.finish_reason, usage=reply.usage)
        return reply.text


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteReply:
    """What one request brought."""

    text: str
    finish_reason: str
    """"stop" or "length"."""
    usage: Usage


class Endpoint:
    """The one way of a process to its Teacher: every request passes one limiter and one budget."""

    def __init__(self, teacher: Teacher) -> None:
        """Raises ValueError when the key's variable is not set."""
        self._teacher = teacher
        self._key = teacher.key()
        self._client: openai.AsyncOpenAI | None = None
        self.limiter = Limiter(teacher.max_concurrency)
        self.budget = _Budget(teacher)

    async def ask(self, messages: Sequence[dict[str, str]], params: SamplingParams) -> RemoteReply:
        """The reply to a dialogue, after as many attempts as it takes. Raises what the module lists."""
        failures: list[str] = []
        try:
            async with asyncio.timeout(self._teacher.reply_deadline_s):
                while len(failures) < self._teacher.max_attempts:
                    reply = await self._attempt(messages, params, failures)
                    if reply is not None:
                        return reply
        except TimeoutError:
            failures.append(f"no reply within {self._teacher.reply_deadline_s:g} s")
        raise SamplerError(f"teacher {self._teacher.model}: {'; '.join(failures[-3:])}")

    async def close(self) -> None:
        """Ends the client's connections."""
        if self._client is not None:
            await self._client.close()

    async def _attempt(
        self, messages: Sequence[dict[str, str]], params: SamplingParams, failures: list[str]
    ) -> RemoteReply | None:
        """One request; None when it failed in a way that may pass, after the pause that this takes."""
        import openai

        async with self.limiter.slot() as began:
            self.budget.check()
            try:
                reply = self._read(await self._request(messages, params))
            except openai.RateLimitError as error:
                if error.code == "insufficient_quota":
                    raise BudgetExceeded(f"the account of teacher {self._teacher.model} is used up: {error}") from error
                self.limiter.throttle(began, retry_after_s(error.response.headers.get("retry-after")))
                return None
            except (openai.APIConnectionError, openai.InternalServerError, _NoCompletion) as error:
                failures.append(f"{type(error).__name__}: {error}")
                logger.warning("teacher=%s attempt=%d failed: %s", self._teacher.model, len(failures), error)
            except openai.APIStatusError as error:
                raise _refusal(error, self._teacher) from error
            else:
                self.limiter.succeed()
                return reply
        await asyncio.sleep(_backoff_s(len(failures)))
        return None

    async def _request(self, messages: Sequence[dict[str, str]], params: SamplingParams) -> Any:
        """Whatever was answered with status 200. Raises _NoCompletion for what cannot be decoded."""
        import openai

        if self._client is None:
            self._client = openai.AsyncOpenAI(
                base_url=self._teacher.base_url,
                api_key=self._key,
                max_retries=0,  # retries are ours: they must pass the limiter
                timeout=self._teacher.request_timeout_s,
            )
        try:
            return await self._client.chat.completions.create(
                model=self._teacher.model,
                messages=cast(Any, list(messages)),
                temperature=params.temperature,
                top_p=params.top_p,
                max_tokens=params.max_tokens,
            )
        except (ValueError, RecursionError) as error:  # no JSON, no UTF-8
            raise _NoCompletion(f"the answer is no JSON: {error}") from error

    def _read(self, response: Any) -> RemoteReply:
        """The reply, booked. The client checks no types: _NoCompletion for what is no chat completion."""
        usage, choices = getattr(response, "usage", None), getattr(response, "choices", None)
        choice: Any = cast(list[Any], choices)[0] if isinstance(choices, list) and choices else None
        reason = getattr(choice, "finish_reason", None)
        message = getattr(choice, "message", None)
        content: Any = getattr(message, "content", 0)
        is_reply = isinstance(reason, str) and (reason not in _ENDINGS or isinstance(content, str | None))
        if not is_reply or not _is_usage(usage):
            if usage is not None and _is_usage(usage):
                self.budget.add(usage)  # paid for all the same
            raise _NoCompletion(f"the answer is no chat completion: {str(response)[:200]}")
        booked = self.budget.add(usage)
        if reason not in _ENDINGS:
            raise SamplerError(f"teacher {self._teacher.model} gave no reply in words: {reason}")
        return RemoteReply(text=content or "", finish_reason=reason, usage=booked)


def _is_usage(reported: Any) -> bool:
    """Whether it is left out or says both counts."""
    counts = (getattr(reported, name, None) for name in ("prompt_tokens", "completion_tokens"))
    return reported is None or all(isinstance(count, int) for count in counts)


class _NoCompletion(Exception):
    """An answer of status 200 that is something else; it may pass, as an overloaded proxy does."""


class _Budget:
    """What is spent of what may be spent."""

    def __init__(self, teacher: Teacher) -> None:
        self._teacher = teacher
        self.spent = Usage(prompt_tokens=0, completion_tokens=0, cost_usd=0.0)

    def check(self) -> None:
        """Raises BudgetExceeded when nothing is left."""
        tokens, cost = self._teacher.max_tokens, self._teacher.max_cost_usd
        if tokens is not None and self.spent.num_tokens >= tokens:
            raise BudgetExceeded(f"teacher.max_tokens is spent ({self.spent.num_tokens} of {max(0, tokens)} here)")
        if cost is not None and self.spent.cost_usd >= cost:
            spent = f"{self.spent.cost_usd:.4f} of {max(0.0, cost):.4f} here"
            raise BudgetExceeded(f"teacher.max_cost_usd is spent ({spent})")

    def add(self, reported: Any) -> Usage:
        """Books what a response reports, and returns it. Raises TeacherRefused when a budget cannot be kept."""
        if reported is None and (self._teacher.max_tokens is not None or self._teacher.max_cost_usd is not None):
            raise TeacherRefused(f"{self._teacher.base_url} reports no usage, so no budget can be kept; leave it out")
        num_prompt = int(reported.prompt_tokens) if reported else 0
        num_sampled = int(reported.completion_tokens) if reported else 0
        prices = self._teacher.prompt_usd_per_million, self._teacher.completion_usd_per_million
        cost_usd = (num_prompt * prices[0] + num_sampled * prices[1]) / 1e6
        usage = Usage(prompt_tokens=num_prompt, completion_tokens=num_sampled, cost_usd=cost_usd)
        self.spent = self.spent + usage
        return usage


def _refusal(error: "openai.APIStatusError", teacher: Teacher) -> Exception:
    text = f"{error.code or ''} {error.message}".lower()
    if error.status_code == 400 and ("context_length" in text or "context length" in text or "too long" in text):
        return ContextLimit(f"teacher {teacher.model}: {error.message}")
    if error.status_code in (408, 409):
        return SamplerError(f"teacher {teacher.model}: {error.message}")
    problem = f"{teacher.base_url} refuses model {teacher.model}: {error.status_code} {error.message}"
    if error.status_code in (401, 403):
        problem += f"; teacher.api_key_env is {teacher.api_key_env!r}"
    return TeacherRefused(problem)


def _backoff_s(num_failures: int) -> float:
    """Doubles with each failure, with jitter, so that clients that failed together do not come back together."""
    return min(_MAX_BACKOFF_S, _FIRST_BACKOFF_S * 2 ** (num_failures - 1)) * random.uniform(0.5, 1.0)
