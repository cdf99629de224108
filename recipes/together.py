"""Entering two contexts at once. Called by recipes whose parts take long to start and do not wait for each other.

Invariant: either both are entered and end with the stack, or neither is left running.
"""

import asyncio
import logging
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import TypeVar

logger = logging.getLogger(__name__)

First = TypeVar("First")
Second = TypeVar("Second")


async def enter_both(
    stack: AsyncExitStack, first: AbstractAsyncContextManager[First], second: AbstractAsyncContextManager[Second]
) -> tuple[First, Second]:
    """What both contexts give. The error of the one that fails first is raised, once the other has been called off;
    one of the other's own is logged.
    """
    try:
        async with asyncio.TaskGroup() as group:
            entering = group.create_task(stack.enter_async_context(first))
            other = group.create_task(stack.enter_async_context(second))
    except BaseExceptionGroup as errors:
        error, *others = errors.exceptions
        for other_error in others:
            logger.warning("this failed too: %s", other_error, exc_info=other_error)
        raise error from error.__cause__
    return entering.result(), other.result()
