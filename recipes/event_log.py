"""The metrics of a run, step by step: metrics.jsonl, TensorBoard events and, by one flag, Weights & Biases.

Invariant: metrics.jsonl holds whole lines only, each written before `log` returns; the other two are copies of it.
Called by recipes/run.py.
"""

import json
import logging
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

OWN_KEYS = frozenset({"step", "time"})


class EventLog:
    """Appends metrics; after a restart, readers take the last line of a step."""

    def __init__(self, directory: Path, config: Mapping[str, Any], *, wandb: bool) -> None:
        """ValueError when `wandb` is asked for but not installed."""
        path = directory / "metrics.jsonl"
        _cut_torn_line(path)
        self._wandb = _start_wandb(directory, config) if wandb else None
        self._lines = open(path, "a", encoding="utf-8", buffering=1)  # noqa: SIM115 - closed by `close`
        self._events = _start_tensorboard(directory / "tb")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes the metrics of a step; values that are not finite become null, with a warning that names them."""
        if clash := OWN_KEYS & metrics.keys():
            raise ValueError(f"metrics may not be named {sorted(clash)}: the log writes these itself")
        values = {name: float(value) for name, value in metrics.items()}
        if broken := {name: value for name, value in values.items() if not math.isfinite(value)}:
            logger.warning("step=%d not finite: %s", step, ", ".join(f"{k} is {v}" for k, v in broken.items()))
        now = time.time()
        row = {"step": step, "time": now} | {name: None if name in broken else v for name, v in values.items()}
        self._lines.write(json.dumps(row, allow_nan=False) + "\n")
        _add_scalars(self._events, step, now, values)
        if self._wandb is not None:
            self._wandb.log(values, step=step)

    def close(self) -> None:
        """Writes out everything."""
        self._lines.close()
        self._events.close()
        if self._wandb is not None:
            self._wandb.finish()


def read_history(directory: Path) -> list[tuple[int, dict[str, float]]]:
    """(step, metrics) of a run so far, in the order of steps: the last line of each, without what was not finite."""
    path = directory / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    last = {row["step"]: {k: v for k, v in row.items() if k not in OWN_KEYS and v is not None} for row in rows}
    return sorted(last.items())


def _cut_torn_line(path: Path) -> None:
    """A writer that was killed may have left half a line, and the next one would be glued to it."""
    if not path.exists():
        return
    data = path.read_bytes()
    whole = data.rfind(b"\n") + 1
    if whole < len(data):
        os.truncate(path, whole)
        logger.warning("file=%s half a line cut: %d bytes", path, len(data) - whole)


def _start_tensorboard(directory: Path) -> Any:
    # Not torch.utils.tensorboard nor tensorboardX: both import torch, this takes 0.3 s.
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    return EventFileWriter(str(directory), flush_secs=10)


def _add_scalars(events: Any, step: int, now: float, values: Mapping[str, float]) -> None:
    from tensorboard.compat.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue] - generated
    from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]

    scalars = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
    events.add_event(Event(wall_time=now, step=step, summary=Summary(value=scalars)))


def _start_wandb(directory: Path, config: Mapping[str, Any]) -> Any:
    try:
        import wandb  # pyright: ignore[reportMissingImports] - an optional extra
    except ImportError:
        raise ValueError("wandb is not installed: pip install 'thresher[wandb]', or leave --wandb off") from None
    return wandb.init(project="thresher", name=directory.name, dir=str(directory), config=dict(config))
