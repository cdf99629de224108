"""Programs that run inside a box with the base's own Python, and print what they found."""

SYSCALLS = r"""
import ctypes, errno, os, socket, struct, sys
libc = ctypes.CDLL(None, use_errno=True)

def call(name, number, *args):
    ctypes.set_errno(0)
    result = libc.syscall(number, *args)
    print(name, "done" if result >= 0 else errno.errorcode[ctypes.get_errno()])

buffer = ctypes.create_string_buffer(256)
null = ctypes.c_void_p(0)
call("mount", 165, b"none", b"/tmp", b"tmpfs", 0, null)
call("umount", 166, b"/usr", 2)
call("unshare-user", 272, 0x10000000)
call("unshare-mount", 272, 0x20000)
call("clone-user", 56, 0x10000000 | 17, null, null, null, null)
call("clone3", 435, buffer, 88)
call("setns", 308, os.open("/proc/self/ns/net", os.O_RDONLY), 0)
call("chroot", 161, b"/tmp")
call("pivot_root", 155, b"/", b"/tmp")
call("ptrace-agent", 101, 16, 1, null, null)
iovec = struct.pack("QQ", ctypes.addressof(buffer), 8)
call("read-agent", 310, 1, iovec, 1, iovec, 1, 0)
call("read-self", 310, os.getpid(), iovec, 1, iovec, 1, 0)
call("prlimit-agent", 302, 1, 0, buffer, null)
call("bpf", 321, 0, buffer, 64)
call("io_uring", 425, 8, buffer)
call("keyctl", 250, 0, -3, 1)
call("add_key", 248, b"user", b"k", b"v", 1, -3)
call("perf", 298, buffer, 0, -1, -1, 0)
call("userfaultfd", 323, 0)
call("mknod", 133, b"/tmp/disk", 0o60600, 0xFE00)
call("clock", 227, 0, buffer)
call("hostname", 170, b"owned", 5)
call("reboot", 169, 0xfee1dead, 672274793, 0, null)
call("module", 313, 0, b"", 0)
call("kexec", 246, 0, 0, null, 0)
call("open_by_handle", 304, 0, buffer, 0)
call("x32", 0x40000000 | 39)
call("future", 900)
call("setuid", 105, 1)
for name, family in (("vsock", 40), ("alg", 38), ("packet", 17)):
    try:
        socket.socket(family, socket.SOCK_STREAM if family == 40 else socket.SOCK_SEQPACKET)
        print(name, "done")
    except OSError as error:
        print(name, errno.errorcode[error.errno])
for path in ("/proc/sys/kernel/hostname", "/proc/sys/vm/drop_caches", "/proc/sysrq-trigger",
             "/proc/sys/kernel/core_pattern", "/usr/bin/bash", "/.thresher/agent", "/dev/new", "/proc/1/mem",
             "/proc/1/root/etc/passwd"):
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT))
        print(path, "done")
    except OSError as error:
        print(path, errno.errorcode[error.errno])
"""

CONNECT = r"""
import socket, sys
def attempt(family, address):
    with socket.socket(family, socket.SOCK_STREAM) as s:
        s.settimeout(2)
        try:
            s.connect(address)
            return "connected"
        except OSError as error:
            return type(error).__name__
print(attempt(socket.AF_INET, ("127.0.0.1", int(sys.argv[1]))))
print(attempt(socket.AF_INET, ("8.8.8.8", 53)))
print(attempt(socket.AF_UNIX, "\0" + sys.argv[2]))
"""

SPIN = "while :; do :; done"
FORK_BOMB = "bomb() { bomb | bomb & }; bomb; sleep 60"
DAEMON = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(1000)
    os._exit(0)
os.wait()
"""
ALLOCATE = """
import sys, time
kept = [b'x' * (1 << 20) for _ in range(int(sys.argv[1]))]
print('kept')
time.sleep(3)
"""
INODES = """
import os
for k in range(300_000):
    os.close(os.open(f'/tmp/{k}', os.O_CREAT))
print('made')
"""
KILL_AGENT = """
import os, time
open('/proc/1/oom_score_adj', 'wb', buffering=0).write(b'1000')
for value in range(-1000, 1001, 100):
    try:
        open('/proc/self/oom_score_adj', 'wb', buffering=0).write(b'%d' % value)
        break
    except PermissionError:
        pass
for k in range(100):  # many small processes, so that the agent is what the kernel would rather kill
    if os.fork() == 0:
        kept = [b'x' * (1 << 20) for _ in range(8)]
        time.sleep(20)
time.sleep(20)
"""
