"""Labels: which driver and slot a control group or host process of a box belongs to.

Invariant: a label holds pid and start time of its driver, so it is known for good whether that still runs. Launchers
and bubblewraps carry it as their argv[0], control groups as their name.
Called by envs/local/{cgroups,slots,provider}.py.
"""

import contextlib
import os
import signal
from collections.abc import Callable
from pathlib import Path

PREFIX = "thresher-"


def make_label(slot: int) -> str:
    """Unique on this machine."""
    pid = os.getpid()
    return f"{PREFIX}{pid}-{start_time(pid)}-{slot}"


def is_orphan(label: str) -> bool:
    """Whether the driver that made this label has ended."""
    pid, _, rest = label.removeprefix(PREFIX).partition("-")
    return not pid.isdigit() or start_time(int(pid)) != rest.partition("-")[0]


def kill_labelled(is_wanted: Callable[[str], bool]) -> int:
    """SIGKILL to the host processes whose label is wanted; returns how many there were. Looks at every process."""
    killed = 0
    for name in os.listdir("/proc"):
        if name.isdigit() and _is_wanted(name, is_wanted):
            with contextlib.suppress(OSError):
                fd = os.pidfd_open(int(name))
                try:
                    if _is_wanted(name, is_wanted):  # still the one that was seen, now that it is held
                        signal.pidfd_send_signal(fd, signal.SIGKILL)
                        killed += 1
                finally:
                    os.close(fd)
    return killed


def _is_wanted(pid: str, is_wanted: Callable[[str], bool]) -> bool:
    try:
        label = Path(f"/proc/{pid}/cmdline").read_bytes().partition(b"\0")[0].decode(errors="replace")
    except OSError:
        return False
    return label.startswith(PREFIX) and is_wanted(label)


def start_time(pid: int) -> str:
    """When a process began, in clock ticks since boot; "" for no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""
