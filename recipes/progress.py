"""Progress of a run: bars with rate and ETA on a terminal, a log line every few seconds elsewhere.

Invariant: what is shown never decides anything; standard output stays free for results.
Called through `Run.progress` and `Run.steps`.
"""

import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

logger = logging.getLogger(__name__)

LINE_EVERY_S = 10.0


class Bar:
    """One thing that is counted."""

    def __init__(self, description: str, total: int | None, completed: int, live: Any, line_every_s: float) -> None:
        self.completed = completed
        self._description = description
        self._total = total
        self._first = completed
        self._began = self._line_at = time.monotonic()
        self._line_every_s = line_every_s
        self._live = live
        self._task = None if live is None else live.add_task(description, total=total, completed=completed, note="")

    def advance(self, count: int = 1, *, note: str = "") -> None:
        """Counts `count` more; `note` is shown behind the rate."""
        self.completed += count
        if self._live is not None:
            fields = {"note": note} if note else {}
            self._live.update(self._task, advance=count, **fields)
        elif time.monotonic() - self._line_at >= self._line_every_s:
            self._line_at = time.monotonic()
            logger.info("%s", self.line(note))

    def line(self, note: str = "") -> str:
        """The state in one line: "harvesting 120/400 (30%), 4.0/s, 70 s left"."""
        elapsed = max(time.monotonic() - self._began, 1e-9)
        rate = (self.completed - self._first) / elapsed
        parts = [f"{rate:.3g}/s" if rate >= 1 or rate == 0 else f"{1 / rate:.3g} s each"]
        count = f"{self.completed}"
        if self._total is not None:
            count += f"/{self._total}" + (f" ({self.completed / self._total:.0%})" if self._total else "")
            if rate:
                parts.append(f"{max(0, self._total - self.completed) / rate:.0f} s left")
        return ", ".join([f"{self._description} {count}", *parts, *([note] if note else [])])

    def close(self) -> None:
        """Takes the bar off the terminal and leaves its last line in the log."""
        if self._live is not None:
            self._live.remove_task(self._task)
        logger.info("%s", self.line())


class ProgressDisplay:
    """The bars of one run, drawn on standard error."""

    def __init__(self, *, line_every_s: float = LINE_EVERY_S) -> None:
        self._line_every_s = line_every_s
        self._live: Any = None
        self._num_bars = 0

    @contextmanager
    def bar(self, description: str, total: int | None, *, completed: int = 0) -> Iterator[Bar]:
        """A bar for the length of the block."""
        if self._live is None and sys.stderr.isatty():
            self._live = _rich_progress()
        if self._num_bars == 0 and self._live is not None:
            self._live.start()
        self._num_bars += 1
        bar = Bar(description, total, completed, self._live, self._line_every_s)
        try:
            yield bar
        finally:
            bar.close()
            self._num_bars -= 1
            if self._num_bars == 0:
                self.stop()

    def stop(self) -> None:
        """Gives the terminal back; safe to call twice."""
        if self._live is not None:
            self._live.stop()


def _rich_progress() -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn
    from rich.text import Text

    class RateColumn(ProgressColumn):
        """How many a second, or seconds for each."""

        def render(self, task: Any) -> Text:
            if not task.speed:
                return Text("")
            return Text(f"{task.speed:.3g}/s" if task.speed >= 1 else f"{1 / task.speed:.3g} s each")

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        RateColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
        console=Console(stderr=True),
        transient=True,
    )
