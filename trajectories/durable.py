"""What a power failure must not undo: text and names that are on the disk when a call returns.

Invariant: neither returns before the disk has it. Called by trajectories/store.py, learners/checkpoint.py and
recipes/run.py, whose records name what was written before them.
"""

import os
from pathlib import Path


def write_synced(path: Path, text: str) -> None:
    """The file's content is then on the disk; its name is once `sync_directory` was called for its directory."""
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sync_directory(directory: Path) -> None:
    """The names in it, new ones and removed ones, are then on the disk."""
    fd = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
