"""The system-call filter of a box, as the bytes that the kernel loads.

Invariant: a pure function of the machine's architecture; what is not named here is allowed, what is newer than the
table is unknown to us and answers ENOSYS. Called by envs/local/staging.py.
"""

import errno
import platform
import socket
import struct
from typing import NamedTuple

from envs.errors import SandboxRefused

_LOAD, _JUMP_EQUAL, _JUMP_GREATER_EQUAL, _JUMP_ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER_AT, _ARCH_AT, _ARG0_AT = 0, 4, 16
_ALLOW, _KILL_PROCESS, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_X32_BIT = 0x40000000
_NEWEST_KNOWN = 469
"""Highest system-call number reviewed; the numbers above 423 are the same on every architecture."""
_NEW_NAMESPACES = 0x7E020000 | 0x80
"""Every CLONE_NEW* flag of clone(2): mount, cgroup, uts, ipc, user, pid, net, time."""

_FAMILIES = (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6, 16)
"""Socket families allowed; 16 is netlink. AF_VSOCK above all is not: a network namespace does not isolate it."""


class _Architecture(NamedTuple):
    audit: int
    clone: int
    socket: int
    prlimit64: int
    denied: dict[str, int]


_DENIED_EVERYWHERE = {
    "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427, "open_tree": 428, "move_mount": 429,
    "fsopen": 430, "fsconfig": 431, "fsmount": 432, "fspick": 433, "pidfd_getfd": 438, "process_madvise": 440,
    "mount_setattr": 442, "quotactl_fd": 443, "memfd_secret": 447, "statmount": 457, "listmount": 458,
    "lsm_get_self_attr": 459, "lsm_set_self_attr": 460, "lsm_list_modules": 461, "open_tree_attr": 467,
}  # fmt: skip
_CLONE3 = 435

_X86_64 = _Architecture(
    audit=0xC000003E,
    clone=56,
    socket=41,
    prlimit64=302,
    denied={
        "modify_ldt": 154, "pivot_root": 155, "chroot": 161, "acct": 163, "settimeofday": 164, "mount": 165,
        "umount2": 166, "swapon": 167, "swapoff": 168, "reboot": 169, "sethostname": 170, "setdomainname": 171,
        "iopl": 172, "ioperm": 173, "init_module": 175, "delete_module": 176, "quotactl": 179, "syslog": 103,
        "clock_settime": 227, "kexec_load": 246, "add_key": 248, "request_key": 249, "keyctl": 250,
        "migrate_pages": 256, "unshare": 272, "move_pages": 279, "perf_event_open": 298, "fanotify_init": 300,
        "open_by_handle_at": 304, "clock_adjtime": 305, "setns": 308, "kcmp": 312, "finit_module": 313,
        "kexec_file_load": 320, "bpf": 321, "userfaultfd": 323,
    },
)  # fmt: skip
_AARCH64 = _Architecture(
    audit=0xC00000B7,
    clone=220,
    socket=198,
    prlimit64=261,
    denied={
        "umount2": 39, "mount": 40, "pivot_root": 41, "chroot": 51, "quotactl": 60, "acct": 89, "kexec_load": 104,
        "init_module": 105, "delete_module": 106, "clock_settime": 112, "syslog": 116, "reboot": 142,
        "sethostname": 161, "setdomainname": 162, "settimeofday": 170, "add_key": 217, "request_key": 218,
        "keyctl": 219, "swapon": 224, "swapoff": 225, "migrate_pages": 238, "move_pages": 239,
        "perf_event_open": 241, "fanotify_init": 262, "open_by_handle_at": 265, "clock_adjtime": 266, "setns": 268,
        "kcmp": 272, "finit_module": 273, "bpf": 280, "userfaultfd": 282, "kexec_file_load": 294, "unshare": 97,
    },
)  # fmt: skip
_ARCHITECTURES = {"x86_64": _X86_64, "aarch64": _AARCH64}


def seccomp_filter(machine: str | None = None) -> bytes:
    """A BPF program for bubblewrap's --seccomp; `machine` as in `platform.machine()`. Raises SandboxRefused."""
    machine = machine or platform.machine()
    if machine not in _ARCHITECTURES:
        known = " or ".join(_ARCHITECTURES)
        raise SandboxRefused(f"seccomp filter: no table for {machine}; run on {known}")
    arch = _ARCHITECTURES[machine]
    program = [
        *_unless(_JUMP_EQUAL, arch.audit, _KILL_PROCESS, load=_ARCH_AT),
        _instruction(_LOAD, _NUMBER_AT),
        *_when(_JUMP_GREATER_EQUAL, _X32_BIT, _error(errno.ENOSYS)),
        *_when(_JUMP_GREATER_EQUAL, _NEWEST_KNOWN + 1, _error(errno.ENOSYS)),
        *_when(_JUMP_EQUAL, _CLONE3, _error(errno.ENOSYS)),
    ]
    for number in sorted([*arch.denied.values(), *_DENIED_EVERYWHERE.values()]):
        program += _when(_JUMP_EQUAL, number, _error(errno.EPERM))
    program += _clone(arch.clone) + _socket(arch.socket) + _prlimit(arch.prlimit64)
    program.append(_instruction(_RETURN, _ALLOW))
    return b"".join(program)


def _clone(number: int) -> list[bytes]:
    """clone3 answers ENOSYS, so that libc falls back to clone, whose flags a filter can read."""
    return [
        _instruction(_JUMP_EQUAL, number, otherwise=4),
        _instruction(_LOAD, _ARG0_AT),
        *_when(_JUMP_ANY_BIT, _NEW_NAMESPACES, _error(errno.EPERM)),
        _instruction(_RETURN, _ALLOW),
    ]


def _socket(number: int) -> list[bytes]:
    families = [item for family in _FAMILIES for item in _when(_JUMP_EQUAL, int(family), _ALLOW)]
    refuse = _instruction(_RETURN, _error(errno.EAFNOSUPPORT))
    return [
        _instruction(_JUMP_EQUAL, number, otherwise=len(families) + 2),
        _instruction(_LOAD, _ARG0_AT),
        *families,
        refuse,
    ]


def _prlimit(number: int) -> list[bytes]:
    """Of itself only (pid 0): the agent has the same user, and a CPU limit would kill it."""
    return [
        _instruction(_JUMP_EQUAL, number, otherwise=4),
        _instruction(_LOAD, _ARG0_AT),
        *_when(_JUMP_EQUAL, 0, _ALLOW),
        _instruction(_RETURN, _error(errno.EPERM)),
    ]


def _when(jump: int, value: int, result: int) -> list[bytes]:
    return [_instruction(jump, value, otherwise=1), _instruction(_RETURN, result)]


def _unless(jump: int, value: int, result: int, *, load: int) -> list[bytes]:
    return [_instruction(_LOAD, load), _instruction(jump, value, then=1), _instruction(_RETURN, result)]


def _error(number: int) -> int:
    return _ERRNO | number


def _instruction(code: int, value: int, *, then: int = 0, otherwise: int = 0) -> bytes:
    """One struct sock_filter; `then` and `otherwise` count the instructions to skip."""
    return struct.pack("=HBBI", code, then, otherwise, value)
