"""Totals of a run over all processes that it had, kept in its metrics.

Invariant: each line of metrics.jsonl holds the totals up to it, so a killed process loses only what came after its last
line. Called by recipes/rloo_parts.py.
"""

import time
from collections.abc import Mapping

PREFIX = "total/"


class Totals:
    """Adds this process's counts to those of the processes before it."""

    def __init__(self, last_metrics: Mapping[str, float | None]) -> None:
        """`last_metrics` is the newest line of metrics.jsonl."""
        self._before = {name: value for name, value in last_metrics.items() if name.startswith(PREFIX) and value}
        self._began = time.monotonic()
        self.reported: dict[str, float] = {}
        """Recoveries of this process that are events already."""

    def __call__(self, counts: Mapping[str, float], *, max_staleness: int) -> dict[str, float]:
        """`counts` of this process -> metrics "total/...", with the seconds and largest staleness of all processes."""
        seconds = time.monotonic() - self._began
        now = {f"{PREFIX}{name}": value for name, value in {**counts, "seconds": seconds}.items()}
        sums = {name: self._before.get(name, 0.0) + value for name, value in now.items()}
        name = f"{PREFIX}max_staleness"
        return sums | {name: max(self._before.get(name, 0.0), float(max_staleness))}
