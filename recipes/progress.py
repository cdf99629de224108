"""Progress of a run: bars with rate and ETA on a terminal, a log line every few seconds elsewhere.

Invariant: what is shown never decides anything; standard output stays free for results.
Called through `Run.progress` and `Run.steps`.
"""

import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
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
        if live is not None:
            if not live.task_ids:
                live.start()
            self._task = live.add_task(description, total=total, completed=completed, note="")

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
        self.hide()
        logger.info("%s", self.line())

    def hide(self) -> None:
        """Takes the bar off the terminal, which is given back with the last one; safe to call twice."""
        if self._live is not None:
            self._live.remove_task(self._task)
            if not self._live.task_ids:
                self._live.stop()
            self._live = None


class ProgressDisplay:
    """The bars of one run, drawn on standard error; runs in one process share the terminal."""

    def __init__(self, *, line_every_s: float = LINE_EVERY_S) -> None:
        self._line_every_s = line_every_s
        self._bars: list[Bar] = []

    @contextmanager
    def bar(self, description: str, total: int | None, *, completed: int = 0) -> Iterator[Bar]:
        """A bar for the length of the block."""
        live = _rich_progress() if sys.stderr.isatty() else None
        bar = Bar(description, total, completed, live, self._line_every_s)
        self._bars.append(bar)
        try:
            yield bar
        finally:
            bar.close()
            self._bars.remove(bar)

    def stop(self) -> None:
        """Gives the terminal back, whatever block was left open; safe to call twice."""
        for bar in self._bars:
            bar.hide()


@cache
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
