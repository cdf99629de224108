"""What a benchmark ran on: the machine, and the revision of this code.

Invariant: no names of hosts or paths. Called by every benchmark.
"""

import os
import platform
from pathlib import Path

from recipes.record import code_revision


def describe_hardware() -> dict[str, object]:
    """Processor, cores, memory in GB, kernel, the load when asked and the code's revision."""
    return {
        "processor": _field("/proc/cpuinfo", "model name") or platform.machine(),
        "cores": os.cpu_count(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "kernel": platform.release(),
        "load_1m": round(os.getloadavg()[0], 2),
        "revision": code_revision(),
    }


def _field(path: str, name: str) -> str:
    for line in Path(path).read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return ""
