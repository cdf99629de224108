"""Artifacts: what a Task wants kept of its Sandbox, brought to the host, and from there to a separate verifier.

Invariant: what comes out is plain files and directories under the given directory, of bounded size, whatever the agent
left; what did not come is named in the manifest. Called by envs/steps.py.
"""

import asyncio
import io
import json
import posixpath
import secrets
import shlex
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from envs.errors import SandboxDied, SandboxError, TaskError
from envs.sandbox import Sandbox
from envs.task import Artifact
from envs.unpack import unpack

MAX_ARTIFACT_BYTES = 64 << 20
"""Of one Artifact, as a tar archive."""
CONVENTION_DIR = "/logs/artifacts"
"""Kept of every Task that asks for artifacts, without being named."""

_PACK_LIMIT_S = 120.0
_MISSING, _TOO_LARGE = 3, 4
_PACK = """\
path={path}
if [[ -d $path ]]; then cd "$path" && name=. kind=dir
elif [[ -f $path ]]; then cd "${{path%/*}}/" && name=${{path##*/}} kind=file
else exit {missing}; fi || exit {missing}
command -v tar >/dev/null || exit 127
mkdir -p /logs
tar -cf - {exclude} "./$name" 2>/dev/null | head -c {one_more} >{archive}
(( $(wc -c <{archive}) < {one_more} )) || {{ rm -f {archive}; exit {too_large}; }}
printf %s $kind
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptArtifact:
    """An Artifact that came."""

    source: str
    """Absolute path inside, where a separate verifier finds it again."""
    path: Path
    """On the host: a directory, or a file."""


async def keep_artifacts(artifacts: Sequence[Artifact], sandbox: Sandbox, into: Path) -> list[KeptArtifact]:
    """Brings the Artifacts, and what lies in CONVENTION_DIR, under `into`, beside a manifest.json of how each one went.

    Each lies at its destination, or else at its source path; a place that is taken is not written again. Links and
    devices are left out. SandboxDied when tar, which was there, is gone.
    """
    kept: list[KeptArtifact] = []
    manifest: list[dict[str, str]] = []
    for artifact in (Artifact(source=CONVENTION_DIR), *artifacts):
        source = posixpath.join(sandbox.workdir, artifact.source)
        destination = artifact.destination or source.strip("/")
        target = into / destination
        status = "its place is taken" if target.exists() else await _bring(artifact, source, sandbox, target)
        if status == "kept":
            kept.append(KeptArtifact(source=source, path=target))
        if status != "missing" or artifact.source != CONVENTION_DIR:
            manifest.append({"source": source, "destination": destination, "status": status})
    into.mkdir(parents=True, exist_ok=True)
    (into / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n")
    return kept


async def require_tar(sandbox: Sandbox) -> None:
    """SandboxError where nothing could be kept: asked before the policy acts, who must not gain by removing tar."""
    if (await sandbox.exec("command -v tar", timeout_s=_PACK_LIMIT_S, cwd="/")).exit_code:
        raise SandboxError("no tar in the Sandbox, so nothing can be kept of it; install tar in the Task's image")


async def place_artifacts(kept: Sequence[KeptArtifact], sandbox: Sandbox) -> None:
    """Puts each where it came from, in another Sandbox."""
    for artifact in kept:
        if artifact.path.is_dir():
            await sandbox.upload_dir(artifact.path, artifact.source)
        else:
            mode = 0o755 if artifact.path.stat().st_mode & 0o100 else 0o644
            await sandbox.write_file(artifact.source, artifact.path.read_bytes(), mode=mode)


async def download_dir(sandbox: Sandbox, source: str, target: Path) -> str:
    """Brings a directory to the host, where `target` must not exist; "kept", or why it did not come."""
    return await _bring(Artifact(source=source), source, sandbox, target)


async def _bring(artifact: Artifact, source: str, sandbox: Sandbox, target: Path) -> str:
    archive = f"/logs/.artifact-{secrets.token_hex(8)}"
    command = _PACK.format(
        path=shlex.quote(source.rstrip("/") or "/"),
        exclude=" ".join(f"--exclude={shlex.quote(pattern)}" for pattern in artifact.exclude),
        archive=archive,
        one_more=MAX_ARTIFACT_BYTES + 1,
        missing=_MISSING,
        too_large=_TOO_LARGE,
    )
    result = await sandbox.exec(command, timeout_s=_PACK_LIMIT_S, cwd="/")
    if result.exit_code == 127:
        raise SandboxDied("tar was there and is gone from the Sandbox, so nothing can be kept of it")
    if result.exit_code in (_MISSING, _TOO_LARGE):
        return "missing" if result.exit_code == _MISSING else f"larger than {MAX_ARTIFACT_BYTES >> 20} MiB"
    data = await sandbox.read_file(archive, max_bytes=MAX_ARTIFACT_BYTES) if result.exit_code == 0 else None
    if data is None:
        return f"could not be packed (exit code {result.exit_code})"
    await sandbox.exec(f"rm -f {archive}", timeout_s=_PACK_LIMIT_S, cwd="/")
    name = posixpath.basename(source) if result.stdout == b"file" else ""
    return await asyncio.to_thread(_unpack, data, target, name)


def _unpack(data: bytes, target: Path, name: str) -> str:
    """Writes the archive of a directory at `target`, or, when a name is given, its one file of that name."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        staged = target.parent / f".{secrets.token_hex(8)}"
        unpack(_plain(data), staged)
        (staged / name).rename(target)
        if name:
            staged.rmdir()
    except (TaskError, tarfile.TarError, OSError) as error:
        return f"not kept: {error}"
    return "kept"


def _plain(data: bytes) -> bytes:
    """The archive without links and devices, which `unpack` refuses."""
    out = io.BytesIO()
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as old, tarfile.open(fileobj=out, mode="w") as new:
        for member in old:
            if member.isreg() or member.isdir():
                new.addfile(member, old.extractfile(member) if member.isreg() else None)
    return out.getvalue()
