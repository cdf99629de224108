"""What the Daytona client raises, as the SandboxErrors of this project, and what of it is worth trying again.

Invariant: every failure of the service is infrastructure: it becomes a SandboxError and so is excluded, never a reward
and never the agent's fault. Only a full disk, which the inside alone can cause, is SandboxDied.
Called by the other files of envs/daytona/. Status codes and headers: Daytona SDK 0.226.
"""

import asyncio
import email.utils
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from daytona import DaytonaError
from daytona.common.errors import DaytonaConnectionError, DaytonaTimeoutError
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception, stop_before_delay, wait_exponential_jitter

from envs.creation import CreationGate
from envs.errors import EpisodeError, SandboxDied, SandboxError, SandboxRefused

logger = logging.getLogger(__name__)
T = TypeVar("T")

_CAPACITY = ("limit exceeded", "too many requests", "quota", "capacity", "rate limit", "no available runners")
_BUILD = ("build_failed", "failed to build", "build failed")
_FULL = ("no space left on device", "disk quota exceeded")
_AGAIN = (408, 429, 500, 502, 503, 504)


class SandboxVanished(SandboxError):
    """The service no longer knows the sandbox: removed, expired or preempted."""


class SandboxQuota(SandboxError):
    """The account or the service has no room for another sandbox now."""


def is_capacity(error: BaseException) -> bool:
    """Whether room may come by waiting: a rate limit, a quota, no free runner."""
    if not isinstance(error, DaytonaError):
        return False
    text = str(error).lower()
    return _status(error) == 429 or any(words in text for words in _CAPACITY)


def is_transient(error: BaseException) -> bool:
    """Whether the same request may succeed a moment later."""
    if not isinstance(error, DaytonaError) or any(words in str(error).lower() for words in (*_BUILD, *_FULL)):
        return False
    return is_capacity(error) or _status(error) in _AGAIN or isinstance(error, DaytonaConnectionError)


def _status(error: BaseException | None) -> int | None:
    """The HTTP status. Of some file requests the client keeps it on a cause alone, or under a class of no status."""
    while error is not None:
        status = getattr(error, "status_code", None) or getattr(error, "status", None)
        if isinstance(status, int):
            return status
        error = error.__cause__
    return None


def retry_after_s(error: BaseException, *, now: float | None = None) -> float | None:
    """Seconds that the service asked to wait, from Retry-After in either form; None when it did not ask."""
    headers: Mapping[str, Any] = getattr(error, "headers", None) or {}
    text = next((str(value) for name, value in headers.items() if name.lower() == "retry-after"), "").strip()
    if text.isdigit():
        return float(text)
    try:
        at = email.utils.parsedate_to_datetime(text).timestamp()
    except ValueError:
        return None
    return max(0.0, at - (time.time() if now is None else now))


def sandbox_error(error: BaseException, what: str) -> EpisodeError:
    """The typed error, with its remedy."""
    text = f"{what}: {error}"
    lowered = str(error).lower()
    if any(words in lowered for words in _FULL):
        return SandboxDied(text)
    status = _status(error)
    if status == 401:
        return SandboxRefused(f"{text}; check that the key is set and valid (daytona.key_variable)")
    if status == 403 and not is_capacity(error):
        return SandboxRefused(f"{text}; the key lacks the permission or the organization is suspended")
    if is_capacity(error):
        return SandboxQuota(f"{text}; lower creation.per_s or max_rollouts, or raise the account's limits")
    if status == 404:
        return SandboxVanished(f"{text}; it was removed from outside, expired or was preempted")
    if isinstance(error, DaytonaTimeoutError | TimeoutError):
        return SandboxError(f"{text or 'timed out'}; the service was too slow, raise the daytona timeouts")
    return SandboxError(text)


@asynccontextmanager
async def typed(what: str) -> AsyncGenerator[None]:
    """Turns whatever the client raises inside into this project's errors."""
    try:
        yield
    except (DaytonaError, TimeoutError) as error:
        raise sandbox_error(error, what) from error


async def retried(
    call: Callable[[], Awaitable[T]], what: str, *, deadline_s: float, gate: CreationGate | None = None
) -> T:
    """The result of `call`, tried again while that may help and the deadline allows; typed when it does not.

    A Retry-After is waited for in full, or not at all when it lies past the deadline. With a `gate`
    it holds back every other creation too.
    """

    async def before_sleep(state: RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome is not None else None
        sleep_s = state.next_action.sleep if state.next_action is not None else 0.0
        logger.info("%s: %s; again in %.1f s", what, error, sleep_s)
        if gate is not None and error is not None and is_capacity(error):
            await gate.pause(sleep_s)

    async with typed(what):
        async for attempt in AsyncRetrying(
            retry=retry_if_exception(is_transient),
            wait=_wait_s,
            stop=stop_before_delay(deadline_s),
            sleep=asyncio.sleep,
            before_sleep=before_sleep,
            reraise=True,
        ):
            with attempt:
                return await call()
    raise AssertionError("a retried call returns or raises")


_backoff = wait_exponential_jitter(initial=0.2, max=30.0, jitter=0.2)


def _wait_s(state: RetryCallState) -> float:
    error = state.outcome.exception() if state.outcome is not None else None
    asked_s = retry_after_s(error) if error is not None else None
    return _backoff(state) if asked_s is None else asked_s
