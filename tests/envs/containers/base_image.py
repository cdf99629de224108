"""A small image made of this machine's own programs, for tests and measurements where no registry is reachable.

import_base_image("podman", [])     # -> "localhost/thresher-base:<hash>"
"""

import hashlib
import io
import shutil
import subprocess
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

_PROGRAMS = (
    "bash", "sh", "env", "cat", "cp", "mv", "rm", "ls", "mkdir", "mkfifo", "chmod", "chown", "ln", "stat", "find",
    "sort", "head", "tail", "wc", "tr", "cut", "sed", "grep", "awk", "sleep", "true", "false", "echo", "printf",
    "date", "id", "kill", "ps", "yes", "base64", "dirname", "basename", "setsid", "tee", "touch", "df", "du",
    "uname", "seq", "timeout", "tmux", "tar", "gzip", "test", "expr", "nproc", "readlink", "realpath", "rmdir",
    "sync",
)  # fmt: skip
_TERMINFO = ("/lib/terminfo", "/usr/share/terminfo")
_FILES = {
    "etc/passwd": b"root:x:0:0:root:/root:/bin/bash\n",
    "etc/group": b"root:x:0:\ntty:x:5:\n",
    "etc/profile": b"",
}
_DIRS = {"tmp": 0o1777, "var/tmp": 0o1777, "root": 0o700, "app": 0o755, "proc": 0o755, "sys": 0o755, "dev": 0o755}


def import_base_image(engine: str, engine_args: Sequence[str]) -> str:
    """The name of the image, imported into the engine unless it is there. Takes about 2 s the first time."""
    packed = _pack()
    name = f"localhost/thresher-base:{hashlib.sha256(packed).hexdigest()[:12]}"
    command = [engine, *engine_args]
    known = subprocess.run([*command, "image", "inspect", name], capture_output=True, timeout=60, check=False)
    if known.returncode != 0:
        imported = [*command, "import", "--change", "WORKDIR=/app", "-", name]
        subprocess.run(imported, input=packed, capture_output=True, timeout=300, check=True)
    return name


def _pack() -> bytes:
    """A tar of the programs and of every library they load; the same bytes each time."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for name, mode in _DIRS.items():
            member = tarfile.TarInfo(name)
            member.type, member.mode = tarfile.DIRTYPE, mode
            tar.addfile(member)
        for name, data in _FILES.items():
            _add(tar, name, data, 0o644)
        programs = {name: path for name in _PROGRAMS if (path := shutil.which(name))}
        for name, path in programs.items():
            _add(tar, f"bin/{name}", Path(path).read_bytes(), 0o755)
        for library in sorted(set(libraries(programs.values()))):
            _add(tar, library.lstrip("/"), Path(library).read_bytes(), 0o755)
        for locale in sorted(path for path in Path("/usr/lib/locale/C.utf8").rglob("*") if path.is_file()):
            _add(tar, str(locale).lstrip("/"), locale.read_bytes(), 0o644)  # tmux does not start without
        for terminal in sorted(path for root in _TERMINFO for path in Path(root).glob("[sx]/*-256color")):
            _add(tar, str(terminal).lstrip("/"), terminal.read_bytes(), 0o644)
    return packed.getvalue()


def _add(tar: tarfile.TarFile, name: str, data: bytes, mode: int) -> None:
    member = tarfile.TarInfo(name)
    member.size, member.mode = len(data), mode
    tar.addfile(member, io.BytesIO(data))


def libraries(programs: Iterable[str]) -> Iterator[str]:
    listed = subprocess.run(["ldd", *programs], capture_output=True, text=True, timeout=60, check=False).stdout
    for line in listed.splitlines():
        words = line.split()
        yield from (word for word in words if word.startswith("/") and not word.endswith(":") and Path(word).is_file())
