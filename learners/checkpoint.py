"""Checkpoints: weights, optimizer, progress and random state of all ranks in one directory.

Invariant: a directory holds a complete checkpoint or it is not there; any number of ranks may load what any other
number saved. Called by learners/learner.py.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter

COMPLETE = "COMPLETE"
"""Marker file, written last; holds the progress and what the weights look like."""
FORMAT = 1
MOMENTS = ("exp_avg", "exp_avg_sq")


class CheckpointError(Exception):
    """The directory is no checkpoint that this Learner can load; the message says why."""


def save_checkpoint(
    directory: Path,
    weights: Mapping[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
    progress: Mapping[str, int],
    *,
    rank: int,
) -> None:
    """Writes beside `directory` and renames when everything is on disk; an older checkpoint there is replaced."""
    partial = directory.with_name(directory.name + ".partial")
    if rank == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    dist.barrier()
    _fill_moments(optimizer)
    state = _state(weights, optimizer)
    state[f"rng/{rank}"] = torch.get_rng_state()
    state_dict_saver.save(state, storage_writer=FileSystemWriter(partial, sync_files=True))
    dist.barrier()
    if rank == 0:
        marker = {"format": FORMAT, "shapes": _shapes_digest(weights), "progress": dict(progress)}
        _write_synced(partial / COMPLETE, json.dumps(marker))
        _replace(partial, directory)
    dist.barrier()


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
    if f"rng/{rank}" in saved:
        state[f"rng/{rank}"] = torch.get_rng_state()
    state_dict_loader.load(state, storage_reader=reader)
    if f"rng/{rank}" in state:
        torch.set_rng_state(state[f"rng/{rank}"])
    return marker["progress"]


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
    return marker


def _write_synced(path: Path, text: str) -> None:
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _replace(partial: Path, directory: Path) -> None:
    """Moves `partial` to `directory`; what was there goes away only after the new one is in place."""
    old = directory.with_name(directory.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    if directory.exists():
        directory.rename(old)
    partial.rename(directory)
    shutil.rmtree(old, ignore_errors=True)
