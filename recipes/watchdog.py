"""The watchdog: ends a run that makes no progress, and says who is stuck.

Invariant: every wait inside the run has a deadline of its own; this is the backstop for one that was forgotten, and for
an event loop that is stuck itself. Called by recipes/rloo_parts.py.
"""

import asyncio
import faulthandler
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Hashable
from types import TracebackType
from typing import Self

logger = logging.getLogger(__name__)

STALLED = 3
"""Exit code of a run that the watchdog ended."""


class Stalled(Exception):
    """The run made no progress; the message says what it was at and who is stuck."""


class Watchdog:
    """Watches the task that enters it; `async with` it around what may get stuck.

    When nothing moved for `limit_s` it cancels that task, whose handlers may save what there is, and leaving the block
    raises Stalled. A loop that does not even take the cancellation within `grace_s` is ended with its stacks printed.
    """

    def __init__(
        self, limit_s: float, *, progress: Callable[[], Hashable], describe: Callable[[], str], grace_s: float = 60.0
    ) -> None:
        """`progress` gives something that changes whenever anything moves; `describe` names who has not come."""
        self.doing = "starting"
        """What the run is at, for the message; a change of it is progress."""
        self._limit_s = limit_s
        self._progress = progress
        self._describe = describe
        self._grace_s = grace_s
        self._heard = 0.0
        self._message = ""
        self._stop = threading.Event()

    async def __aenter__(self) -> Self:
        task = asyncio.current_task()
        assert task is not None
        self._watched = task
        self._heard = time.monotonic()
        self._watching = asyncio.create_task(self._watch())
        loop_thread = threading.Thread(target=self._watch_loop, name="watchdog", daemon=True)
        loop_thread.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._watching.cancel()
        await asyncio.wait([self._watching])
        if self._message and isinstance(error, asyncio.CancelledError):
            self._watched.uncancel()
            raise Stalled(self._message) from None

    async def _watch(self) -> None:
        seen, since = (self.doing, self._progress()), time.monotonic()
        while True:
            await asyncio.sleep(min(1.0, self._limit_s / 10))
            self._heard = time.monotonic()
            if (now := (self.doing, self._progress())) != seen:
                seen, since = now, self._heard
            elif self._heard - since >= self._limit_s:
                break
        self._message = (
            f"no progress for {self._limit_s:g} s while at: {self.doing}; {self._describe()}. "
            "The same command goes on from the last checkpoint"
        )
        logger.error("%s", self._message)
        self._watched.cancel()

    def _watch_loop(self) -> None:
        """A thread, for an event loop that is stuck."""
        while not self._stop.wait(min(1.0, self._limit_s / 10)):
            if time.monotonic() - self._heard > self._limit_s + self._grace_s and not self._message:
                print(f"error: the event loop is stuck at: {self.doing}; its stacks follow", file=sys.stderr)
                faulthandler.dump_traceback(file=sys.stderr)
                os._exit(STALLED)
