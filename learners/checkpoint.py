"""Checkpoints: weights, optimizer, progress and random state of all ranks in one directory.

Invariant: a directory holds a complete checkpoint or it is not there; any number of ranks may load what any other
number saved. Called by learners/learner.py.
"""

import hashlib
import json
import shutil
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter

from learners.process_group import new_group
from trajectories.durable import sync_directory, write_synced

COMPLETE = "COMPLETE"
"""Marker file, written last; holds the progress and what the weights look like."""
FORMAT = 2
MOMENTS = ("exp_avg", "exp_avg_sq")


class CheckpointError(Exception):
    """The directory is no checkpoint that this Learner can load, or could not become one; the message says why."""


class CheckpointWriter:
    """Writes the checkpoints of one rank, one at a time, while it trains on; all ranks call the same verbs together."""

    def __init__(self, *, rank: int) -> None:
        self._rank = rank
        # Its own group: the collectives of a checkpoint in the background must not meet those of training.
        group = new_group(backend="gloo")
        assert group is not None
        self._group = group
        self._pending: Future[None] | None = None

    def begin(
        self,
        directory: Path,
        weights: Mapping[str, nn.Parameter],
        optimizer: torch.optim.Optimizer,
        progress: Mapping[str, int],
    ) -> None:
        """Returns when the state is copied to host memory; a thread writes the copy, and `finish` tells how it went.

        It is written beside `directory` and renamed when everything is on disk; an older checkpoint there is replaced.
        One that was begun before is waited for; `finish` no longer tells of it.
        """
        if self._pending is not None:
            wait([self._pending])  # ends: the group that its collectives run in has a timeout
        unsealed = directory.with_name(directory.name + ".partial")
        pending = Future[None]()
        try:
            self._on_first_rank(lambda: _make_empty(unsealed))
        except CheckpointError as error:
            pending.set_exception(error)
        else:
            _fill_moments(optimizer)
            marker = {"format": FORMAT, "shapes": _shapes_digest(weights), "progress": dict(progress)}
            state = _state(weights, optimizer) | _random_state(self._rank)
            writer = FileSystemWriter(unsealed, sync_files=True)
            written = state_dict_saver.async_save(state, storage_writer=writer, process_group=self._group)
            seal = partial(_seal, unsealed, directory, marker)
            threading.Thread(target=self._seal_when, args=(written, pending, seal), daemon=True).start()
        self._pending = pending

    @property
    def is_done(self) -> bool:
        """False while the checkpoint that was begun is being written, well or not."""
        return self._pending is None or self._pending.done()

    def finish(self) -> None:
        """Waits for the checkpoint that was begun last; CheckpointError, each time, when it could not be written."""
        if self._pending is not None:
            self._pending.result()

    def _seal_when(self, written: "Future[Any]", pending: "Future[None]", seal: Callable[[], None]) -> None:
        try:
            written.result()
            self._on_first_rank(seal)
        except CheckpointError as error:
            pending.set_exception(error)
        except BaseException as error:  # torch's CheckpointException is none of Exception
            pending.set_exception(CheckpointError((str(error).strip().splitlines() or [repr(error)])[-1]))
        else:
            pending.set_result(None)

    def _on_first_rank(self, work: Callable[[], None]) -> None:
        """Works on rank 0; CheckpointError on every rank when that fails, so that none waits for another for ever."""
        failure: list[str | None] = [None]
        if self._rank == 0:
            try:
                work()
            except OSError as error:
                failure = [str(error)]
        dist.broadcast_object_list(failure, src=0, group=self._group)
        if failure[0] is not None:
            raise CheckpointError(failure[0])


def load_checkpoint(
    directory: Path, weights: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer, *, rank: int
) -> dict[str, int]:
    """Restores weights, optimizer and random state in place; returns the progress that was saved with them."""
    marker = _read_marker(directory)
    if marker["shapes"] != _shapes_digest(weights):
        raise CheckpointError(
            f"{directory} holds a model of other names or shapes; load it into the model that saved it"
        )
    _fill_moments(optimizer)
    state = _state(weights, optimizer)
    reader = FileSystemReader(directory)
    saved = reader.read_metadata().state_dict_metadata
    if missing := state.keys() - saved.keys():
        raise CheckpointError(
            f"{directory} lacks {sorted(missing)[0]} and {len(missing) - 1} more; was `freeze` changed?"
        )
    random_state = {name: tensor for name, tensor in _random_state(rank).items() if name in saved}
    state_dict_loader.load(state | random_state, storage_reader=reader)
    _set_random_state(random_state, rank)
    return marker["progress"]


def _random_state(rank: int) -> dict[str, Tensor]:
    state = {f"rng/{rank}": torch.get_rng_state()}
    if torch.cuda.is_available():
        state[f"rng-cuda/{rank}"] = torch.cuda.get_rng_state()
    return state


def _set_random_state(state: Mapping[str, Tensor], rank: int) -> None:
    """Ranks that the checkpoint did not have keep their own."""
    if f"rng/{rank}" in state:
        torch.set_rng_state(state[f"rng/{rank}"])
    if f"rng-cuda/{rank}" in state:
        torch.cuda.set_rng_state(state[f"rng-cuda/{rank}"])


def _state(weights: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Flat names to tensors (shards where they are sharded), shared with model and optimizer."""
    state: dict[str, Tensor] = {f"weights/{name}": parameter.detach() for name, parameter in weights.items()}
    for name, parameter in weights.items():
        for key, value in optimizer.state.get(parameter, {}).items():
            state[f"optimizer/{key}/{name}"] = value
    return state


def _fill_moments(optimizer: torch.optim.Optimizer) -> None:
    """Gives AdamW the state it makes on its first step, so there is something to load into."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state[parameter]
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
                for moment in MOMENTS:
                    state[moment] = torch.zeros_like(parameter, requires_grad=False)


def _shapes_digest(weights: Mapping[str, nn.Parameter]) -> str:
    shapes = sorted((name, list(parameter.shape)) for name, parameter in weights.items())
    return hashlib.sha256(json.dumps(shapes).encode()).hexdigest()


def _read_marker(directory: Path) -> dict[str, Any]:
    path = directory / COMPLETE
    if not path.is_file():
        raise CheckpointError(f"{directory} is not a complete checkpoint: no {COMPLETE} file; choose an earlier one")
    marker = json.loads(path.read_text())
    if marker.get("format") != FORMAT:
        raise CheckpointError(f"{directory} has format {marker.get('format')}, this version reads {FORMAT}")
    for name, num_bytes in marker["files"].items():
        size = (directory / name).stat().st_size if (directory / name).is_file() else None
        if size != num_bytes:
            raise CheckpointError(
                f"{directory} is torn: {name} has {size} bytes instead of {num_bytes}; choose an earlier one"
            )
    return marker


def _make_empty(directory: Path) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)


def _seal(unsealed: Path, directory: Path, marker: Mapping[str, Any]) -> None:
    """Marks what all ranks have written as complete and puts it in its place."""
    files = {path.name: path.stat().st_size for path in sorted(unsealed.iterdir())}
    write_synced(unsealed / COMPLETE, json.dumps({**marker, "files": files}))
    sync_directory(unsealed)
    _replace(unsealed, directory)


def _replace(unsealed: Path, directory: Path) -> None:
    """Moves `unsealed` to `directory`; what was there goes away only after the new one is in place."""
    old = directory.with_name(directory.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    if directory.exists():
        directory.rename(old)
    unsealed.rename(directory)
    sync_directory(directory.parent)  # a run may then say that it goes on from it
    shutil.rmtree(old, ignore_errors=True)
