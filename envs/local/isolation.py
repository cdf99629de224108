"""The proof that boxes are isolated here: one is started and asked what it has of this process and its rights.

Invariant: each part of the isolation was seen from inside before any Task runs; one that was not is SandboxRefused.
Called by envs/local/provider.py before its first box.
"""

import os

from envs.errors import SandboxError, SandboxRefused
from envs.local.boxes import BoxSize, BoxStarter

_PROOF = "grep -E '^(CapEff|CapBnd|NoNewPrivs|Seccomp):' /proc/self/status; cat /proc/net/dev; readlink /proc/self/ns/*"


async def prove_isolation(boxes: BoxStarter, size: BoxSize) -> None:
    """Raises SandboxRefused unless a box says of itself that it is isolated."""
    try:
        sandbox = await boxes.start(size)
    except SandboxError as error:
        raise SandboxRefused(f"{error}; {_remedy(str(error))}") from error
    try:
        result = await sandbox.exec(_PROOF, timeout_s=30)
    finally:
        await sandbox.stop()
    _check_proof(result.stdout.decode())


def _check_proof(text: str) -> None:
    """`text` is what a box says of itself. Raises SandboxRefused unless each part of its isolation is there."""
    found = dict(line.split(":\t", 1) for line in text.splitlines() if ":\t" in line)
    wanted = {"CapEff": "0" * 16, "CapBnd": "0" * 16, "NoNewPrivs": "1", "Seccomp": "2"}
    for key, value in wanted.items():
        if found.get(key) != value:
            raise SandboxRefused(f"isolate: {key} is {found.get(key)}, not {value}; use a newer kernel or bubblewrap")
    for kind in ("cgroup", "ipc", "mnt", "net", "pid", "user", "uts"):
        if os.readlink(f"/proc/self/ns/{kind}") in text:
            raise SandboxRefused(f"isolate: the box shares this process's {kind} namespace; use a newer bubblewrap")


def _remedy(problem: str) -> str:
    if "launcher: /" in problem:
        return "give a cache_dir that every user may enter"
    return "enable user namespaces for this user (sysctl user.max_user_namespaces), with /proc not masked"
