"""The run directory: what a recipe was asked, where it ran, what it measured and what came out.

    config.json     resolved config, git revision, package versions, hardware; one entry for each restart
    metrics.jsonl   one line a step       tb/   the same as TensorBoard events
    summary.json    results, merged as they come       error.txt   traceback of the error that ended it
    state.json      where to go on after a restart
    events.jsonl    one line for each thing that died and was made good
    ledger/         what became of every Group

Invariant: one process at a time uses a directory, and a directory holds one config. Called by every recipe.
"""

import asyncio
import fcntl
import itertools
import json
import logging
import os
import sys
import time
import traceback
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any, Self

from actors.gauges import Gauges
from recipes.event_log import EventLog
from recipes.progress import Bar, ProgressDisplay
from recipes.record import code_revision, differences, hardware, package_versions, to_json
from trajectories.durable import sync_directory, write_synced

logger = logging.getLogger(__name__)


class Run:
    """An open run directory; made by `Run.open`."""

    def __init__(self, directory: Path, events: EventLog, display: ProgressDisplay) -> None:
        self.directory = directory
        self.step = 0
        """Last step that was logged; 0 before the first."""
        self._events = events
        self._display = display
        self._gauges = Gauges()

    @classmethod
    @contextmanager
    def open(
        cls,
        directory: Path,
        config: Any,
        *,
        wandb: bool = False,
        resume: bool = True,
        may_differ: Collection[str] = (),
    ) -> Iterator[Self]:
        """The run directory for the length of the block; an interrupted block says what is saved where.

        ValueError when another process uses it, when it holds a run and `resume` is off, or when the config that it was
        made with differs in a field that `may_differ` (dotted names) does not list.
        """
        directory.mkdir(parents=True, exist_ok=True)
        resolved = to_json(config)
        with ExitStack() as stack:
            stack.enter_context(_locked(directory))
            _write_config(directory, resolved, resume=resume, may_differ=may_differ)
            (directory / "error.txt").unlink(missing_ok=True)
            _reopen(directory / "summary.json")
            events = EventLog(directory, resolved, wandb=wandb)
            stack.callback(events.close)
            display = ProgressDisplay()
            stack.callback(display.stop)
            with _reported(directory):
                yield cls(directory, events, display)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Records flat metrics of a step; at the cluster's Prometheus endpoint the directory's name is their tag."""
        self._events.log(step, metrics)
        self._gauges.set(metrics, run=self.directory.name)
        self.step = step

    def event(self, what: str, **facts: Any) -> None:
        """Appends a line to events.jsonl and says it in the log."""
        logger.warning("event=%s %s", what, " ".join(f"{name}={value}" for name, value in facts.items()))
        with open(self.directory / "events.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps({"time": time.time(), "event": what} | to_json(facts), allow_nan=False) + "\n")

    def last_metrics(self) -> dict[str, float]:
        """The metrics of the newest line of metrics.jsonl; {} in a new run."""
        lines = (self.directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        return json.loads(lines[-1]) if lines else {}

    def pin(self, name: str, facts: Mapping[str, Any]) -> None:
        """Keeps facts that a restart must find unchanged; ValueError saying what differs when it does not."""
        path = self.directory / "config.json"
        record = json.loads(path.read_text())
        before = record.setdefault("pinned", {}).setdefault(name, to_json(facts))
        if changed := list(differences(before, to_json(facts))):
            listed = "; ".join(f"{key} was {old!r}, is {new!r}" for key, old, new in changed)
            raise ValueError(
                f"{self.directory} was made with other {name}: {listed}. "
                f"Give another --run, or the {name} that it was made with"
            )
        _write_json(path, record)

    def summary(self, values: Mapping[str, Any]) -> None:
        """Merges `values` into summary.json; a name given again replaces its value."""
        path = self.directory / "summary.json"
        before = json.loads(path.read_text()) if path.exists() else {}
        _write_json(path, before | to_json(values))

    def save_state(self, state: Any) -> None:
        """Replaces state.json, from which the run goes on after a restart; whole or not at all."""
        _write_json(self.directory / "state.json", to_json(state))

    def load_state(self) -> Any | None:
        """What `save_state` wrote last; None in a new run."""
        path = self.directory / "state.json"
        return json.loads(path.read_text()) if path.exists() else None

    def progress(
        self, description: str, total: int | None = None, *, completed: int = 0
    ) -> AbstractContextManager[Bar]:
        """A bar with rate and ETA for the length of a `with` block: `bar.advance()`."""
        return self._display.bar(description, total, completed=completed)

    def steps(self, total: int | None, *, start: int = 0) -> Iterator[int]:
        """start, start + 1, ..., total - 1, with a bar; without end when `total` is None."""
        with self._display.bar("steps", total, completed=start) as bar:
            for step in itertools.count(start) if total is None else range(start, total):
                yield step
                bar.advance()


def finished_summary(directory: Path, config: Any, may_differ: Collection[str] = ()) -> dict[str, Any] | None:
    """The summary of a run that came to its end, which is said; None where there is something left to do.

    Changes nothing. ValueError when the directory holds a run of another config.
    """
    path = directory / "summary.json"
    if not path.exists() or not (directory / "config.json").exists():
        return None
    summary = json.loads(path.read_text())
    if not summary.get("finished"):
        return None
    _check_config(directory, json.loads((directory / "config.json").read_text()), to_json(config), may_differ)
    return summary


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    fd = os.open(directory / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"{directory} is in use by another process; wait for it or give another --run") from None
        yield
    finally:
        os.close(fd)


@contextmanager
def _reported(directory: Path) -> Iterator[None]:
    """Says what is saved when the block is interrupted, and leaves the traceback of an error in the directory."""
    try:
        yield
    except (asyncio.CancelledError, KeyboardInterrupt, SystemExit):
        print(f"interrupted: what is done so far is saved in {directory}; the same command goes on", file=sys.stderr)
        raise
    except Exception:
        (directory / "error.txt").write_text(traceback.format_exc())
        raise


def _write_config(directory: Path, resolved: Any, *, resume: bool, may_differ: Collection[str]) -> None:
    path = directory / "config.json"
    started = {"time": time.time(), "git": code_revision(), "packages": package_versions(), "hardware": hardware()}
    if not path.exists():
        _write_json(path, {"config": resolved, **started, "restarts": []})
        return
    if not resume:
        raise ValueError(f"{directory} already holds a run; give another --run or remove it")
    record = json.loads(path.read_text())
    _check_config(directory, record, resolved, may_differ)
    for name, before, after in differences(record["packages"], started["packages"]):
        logger.warning("run=%s was made with %s %s, goes on with %s", directory, name, before, after)
    record["restarts"].append(started)
    _write_json(path, record)


def _check_config(directory: Path, record: Any, resolved: Any, may_differ: Collection[str]) -> None:
    changed = [change for change in differences(record["config"], resolved) if not _listed(change[0], may_differ)]
    if changed:
        listed = "; ".join(f"{name} was {before!r}, is {after!r}" for name, before, after in changed)
        raise ValueError(
            f"{directory} holds a run of another config: {listed}. "
            "Give another --run, the values it was made with, or remove the directory"
        )


def _listed(name: str, may_differ: Collection[str]) -> bool:
    return any(name == each or name.startswith(f"{each}.") for each in may_differ)


def _reopen(summary: Path) -> None:
    """A finished run goes on, say with more steps: its summary is of a part from now on."""
    if summary.exists() and (values := json.loads(summary.read_text())).get("finished"):
        _write_json(summary, values | {"finished": False})


def _write_json(path: Path, value: Any) -> None:
    partial = path.with_name(f".{path.name}.partial")
    write_synced(partial, json.dumps(value, indent=2, allow_nan=False) + "\n")
    os.replace(partial, path)
    sync_directory(path.parent)  # before anything that it no longer names is removed
