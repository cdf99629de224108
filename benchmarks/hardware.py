"""What a benchmark ran on.

Invariant: facts of the machine only, no names of hosts or paths. Called by every benchmark.
"""

import os
import platform
from pathlib import Path


def describe_hardware() -> dict[str, object]:
    """Processor, cores, memory in GB, kernel and the load when asked."""
    return {
        "processor": _field("/proc/cpuinfo", "model name") or platform.machine(),
        "cores": os.cpu_count(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "kernel": platform.release(),
        "load_1m": round(os.getloadavg()[0], 2),
    }


def _field(path: str, name: str) -> str:
    for line in Path(path).read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return ""
