"""Awaiting a remote call: every wait has a deadline and an error that names what did not come.

Invariant: the only place that waits for a Ray reference; a dead actor and a missed deadline are typed.
Called by every shell in actors/.
"""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import ray
import ray.exceptions

from actors.errors import ActorDied, DeadlineMissed


async def call(method: Any, *args: Any, deadline_s: float, what: str, **kwargs: Any) -> Any:
    """The result of an actor's method.

    Raises DeadlineMissed after `deadline_s` seconds and ActorDied when its process is gone, both naming `what`.
    An exception of the method itself comes through as it was raised there.
    """
    reference = method.remote(*args, **kwargs)
    with _typed(what, deadline_s):
        return await asyncio.wait_for(reference, deadline_s)


def call_all(
    actors: Sequence[Any], method: str, arguments: Sequence[tuple[Any, ...]], *, deadline_s: float
) -> list[Any]:
    """The results of one method on every actor at once, with arguments for each; for callers without a loop.

    Raises as `call` does, as soon as one fails.
    """
    references = [getattr(actor, method).remote(*args) for actor, args in zip(actors, arguments, strict=True)]
    with _typed(f"{method} on {len(references)} actors", deadline_s):
        return ray.get(references, timeout=deadline_s)


@contextmanager
def _typed(what: str, deadline_s: float) -> Iterator[None]:
    try:
        yield
    except TimeoutError as error:  # ray.exceptions.GetTimeoutError is one
        raise DeadlineMissed(f"{what}: no answer within {deadline_s:.0f} s") from error
    except ray.exceptions.RayTaskError as error:
        raise error.as_instanceof_cause() from error
    except ray.exceptions.ActorDiedError as error:
        raise ActorDied(f"{what}: its process died ({error})") from error
    except ray.exceptions.ObjectLostError as error:
        raise ActorDied(f"{what}: its answer was lost with its node ({error})") from error
    except ray.exceptions.ActorUnavailableError as error:
        raise ActorDied(f"{what}: its process cannot be reached ({error})") from error
