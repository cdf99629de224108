"""Peak of a process's resident memory above what it holds between two steps.

Invariant: the same procedure for every contender: give freed memory back, note what remains (weights, optimizer,
libraries), reset the kernel's high-water mark, work, read the mark. Linux only. Called by benchmarks/sft_contenders.py.
"""

import ctypes
import gc
from pathlib import Path


class PeakMemory:
    """What a process holds now, against its later peak."""

    def __init__(self) -> None:
        gc.collect()
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
        self.held_mb = _status_mb("VmRSS")
        """Resident when this was made, in MiB."""

    def above_mb(self) -> float:
        """The peak since then above `held_mb`, in MiB."""
        return _status_mb("VmHWM") - self.held_mb


def _status_mb(name: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) / 1024
    raise ValueError(f"/proc/self/status has no {name}; this benchmark needs Linux")
