"""Running a recipe's coroutine to its end: signals become cancellation, failures become exit codes.

Invariant: the first Ctrl-C or SIGTERM lets every `finally` run, the second ends the process at once; an error that a
user can mend is one line, a bug is a traceback. Called by recipes/launch.py.
"""

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Awaitable
from types import FrameType
from typing import Any, TypeVar

from actors.errors import ClusterError
from envs.errors import EpisodeError
from recipes.watchdog import STALLED, Stalled
from trajectories.buffer import EndOfTasks
from trajectories.frames import StoreError
from trajectories.ledger import LedgerError

T = TypeVar("T")

EXPECTED = (ValueError, OSError, EpisodeError, StoreError, LedgerError, ClusterError, EndOfTasks, Stalled)
"""What a user can mend: a wrong value, a full disk, a machine that cannot isolate, a wait that came to its end."""

INTERRUPTED = 130

_FAILED = 2
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_PACKAGES = ("__main__", "trajectories", "envs", "learners", "curation", "actors", "recipes", "benchmarks")

logger = logging.getLogger(__name__)


def run_until_interrupted(main: Awaitable[Any]) -> int:
    """The exit code: 0 done, 2 after an expected error (one line on stderr), 3 stalled, 130 interrupted.

    Bugs propagate.
    """
    configure_logging()
    interruption = _Interruption()
    try:
        asyncio.run(interruption.guard(main))
    except asyncio.CancelledError:
        if not interruption.happened:
            raise
    except SystemExit as stop:  # Ray replaces the SIGTERM handler by one that exits with the signal's number
        if stop.code != signal.SIGTERM:
            raise
        interruption.happened = True
    except (*EXPECTED, BaseExceptionGroup) as error:
        _print_expected(error)
        if isinstance(error, Stalled):
            return STALLED
        return INTERRUPTED if interruption.happened else _FAILED
    return INTERRUPTED if interruption.happened else 0


async def finish(work: Awaitable[T], grace_s: float | None = None) -> T:
    """The result of `work`, which runs to its end even if the caller is cancelled meanwhile; then that takes effect.

    An error of `work` goes before the cancellation. After `grace_s` seconds `work` is given up and cancelled too.
    """
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task}, timeout=grace_s)
        if not task.done():
            task.cancel()
        elif not task.cancelled() and (error := task.exception()) is not None:
            raise error from None
        raise


def configure_logging() -> None:
    """Lines of this project from INFO, of libraries from WARNING, on standard error; does nothing if set up before."""
    root = logging.getLogger()
    if root.handlers:
        return
    handler = _StderrHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s", "%H:%M:%S"))
    root.addHandler(handler)
    for package in _PACKAGES:
        logging.getLogger(package).setLevel(logging.INFO)


class _StderrHandler(logging.StreamHandler[Any]):
    """Looks standard error up at each line, because progress bars replace it while they are drawn."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> Any:
        return sys.stderr


class _Interruption:
    """The signals of one run."""

    def __init__(self) -> None:
        self.happened = False

    async def guard(self, main: Awaitable[Any]) -> None:
        """Awaits `main`; the first signal cancels it, the second kills the process."""
        loop = asyncio.get_running_loop()
        task = asyncio.ensure_future(main)

        # Not loop.add_signal_handler: the second signal must also end a process whose loop is stuck.
        def interrupt(number: int, _: FrameType | None) -> None:
            if self.happened:
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
            self.happened = True
            os.write(2, b"stopping: saving what is done; once more quits at once\n")
            loop.call_soon_threadsafe(task.cancel)

        before = {number: signal.signal(number, interrupt) for number in _SIGNALS}
        try:
            await task
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _print_expected(error: BaseException) -> None:
    """One line for each distinct failure; raises `error` when one of them is a bug."""
    leaves = list(_leaves(error))
    if not all(isinstance(leaf, EXPECTED) for leaf in leaves):
        raise error
    for line in dict.fromkeys(" ".join(str(leaf).split()) or type(leaf).__name__ for leaf in leaves):
        print(f"error: {line}", file=sys.stderr)
    logger.debug("traceback", exc_info=error)


def _leaves(error: BaseException) -> list[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return [leaf for each in error.exceptions for leaf in _leaves(each)]
    return [error]
