"""Leases of local Sandboxes: one small file for each that is running, in a directory of this machine's user.

Invariant: a file is there while its Sandbox runs, and names the label of its slot, by which any process can end it.
Called by envs/local/provider.py.
"""

import contextlib
import itertools
import json
import os
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

from envs.errors import SandboxError
from envs.lease import Lease, LeasedSandbox, lease_of
from envs.local.labels import kill_labelled, make_label

_numbers = itertools.count(1)


class LeaseFiles:
    """The leases of every driver of this user on this machine."""

    def __init__(self, root: Path) -> None:
        self._directory = root / "leases"

    @contextmanager
    def hold(self, lease: Lease, slot_label: str) -> Generator[None]:
        """Records the lease for the length of the block. Raises SandboxError."""
        path = self._directory / make_label(next(_numbers))
        text = json.dumps(lease.labels() | {"thresher.slot": slot_label})
        try:
            self._write(path, text)
        except OSError as error:
            raise SandboxError(f"write lease {path}: {error.strerror}; give a writable cache_dir") from error
        try:
            yield
        finally:
            path.unlink(missing_ok=True)

    def list(self) -> list[LeasedSandbox]:
        """All that are recorded."""
        found: list[LeasedSandbox] = []
        for path in sorted(self._directory.glob("*")) if self._directory.is_dir() else []:
            with contextlib.suppress(FileNotFoundError):  # it ended meanwhile
                labels = _labels(path)
                state = f"slot {labels.get('thresher.slot', '?')}"
                found.append(LeasedSandbox(provider="local", id=path.name, lease=lease_of(labels), state=state))
        return found

    def remove(self, name: str) -> None:
        """Ends the processes of the lease's slot, the launcher included, and forgets it."""
        path = self._directory / name
        with contextlib.suppress(FileNotFoundError):
            if slot := _labels(path).get("thresher.slot"):
                kill_labelled(slot.__eq__)
        path.unlink(missing_ok=True)

    def _write(self, path: Path, text: str) -> None:
        """Whole or not at all: a half lease would count as expired."""
        with contextlib.suppress(FileExistsError):
            self._directory.mkdir(parents=True)
        fd, temporary = tempfile.mkstemp(dir=self._directory.parent, prefix="lease-")
        try:
            os.write(fd, text.encode())
            os.rename(temporary, path)
        finally:
            os.close(fd)


def _labels(path: Path) -> dict[str, str]:
    """What the file holds; {}, which counts as expired, when it was damaged."""
    try:
        labels: object = json.loads(path.read_text())
    except ValueError:
        return {}
    return cast(dict[str, str], labels) if isinstance(labels, dict) else {}
