"""A staged set of weights, whole or an adapter: safetensors shards and their Manifest, on any file system.

Invariant: a version's directory is complete or absent (written aside, then renamed), and the digest of each tensor was
taken from what the learner held. Written by a learner rank, read by the servers' worker extension; no Ray, no vLLM.
"""

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from blake3 import blake3

from trajectories.schema import PolicyVersion

if TYPE_CHECKING:
    import torch

HEADER_BYTES = 64 * 1024
"""Room kept for a shard's safetensors header: about 400 tensors; a fuller one starts the next shard."""
SHARD_BYTES = 4 << 30
"""A shard that has reached this size takes no further tensor."""
ADAPTER_HEADER_BYTES = 4 << 20
"""The same room for an adapter: about 18,000 matrices, because all of them must be in one file."""
ADAPTER_SHARD, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
"""The files of peft's form, which is the one that vLLM reads an adapter from."""
VERSIONS_KEPT = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedTensor:
    """One tensor of a stage."""

    name: str
    """Hugging Face parameter name."""
    dtype: str
    """safetensors' name: "F32", "BF16"."""
    shape: tuple[int, ...]
    digest: str
    """blake3 of the tensor's bytes, 16 bytes in hex."""
    shard: str
    """File name within the stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What one stage holds; small enough to travel with every call."""

    version: PolicyVersion
    directory: Path
    tensors: tuple[StagedTensor, ...]
    num_bytes: int
    lora_rank: int = 0
    """Rank of the adapter that the tensors are; 0 where they are the whole model."""
    objects: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """File to its reference in Ray's object store, where servers fetch it from there (actors/weight_objects.py)."""

    @property
    def files(self) -> tuple[str, ...]:
        """Names of all files of the stage."""
        shards = tuple(dict.fromkeys(tensor.shard for tensor in self.tensors))
        return (*shards, ADAPTER_CONFIG) if self.lora_rank else shards

    def as_message(self) -> dict[str, Any]:
        """Plain lists, dicts and strings, for vLLM's own RPC."""
        message = asdict(replace(self, objects={}))
        return message | {"directory": str(self.directory)}


def write_stage(directory: Path, version: PolicyVersion, tensors: Iterator[tuple[str, "torch.Tensor"]]) -> Manifest:
    """Writes `tensors` as one version under `directory` and drops versions older than the one before it.

    Streams: holds one tensor at a time. An existing stage of the same version is replaced.
    """
    with _written_aside(directory, version) as partial:
        staged, num_bytes = _write_shards(partial, tensors)
    final = directory / version_label(version)
    return Manifest(version=version, directory=final, tensors=tuple(staged), num_bytes=num_bytes)


def narrowed(tensors: Iterator[tuple[str, "torch.Tensor"]], dtype: str) -> Iterator[tuple[str, "torch.Tensor"]]:
    """`tensors`, those that are wider than torch's `dtype` rounded to it."""
    import torch

    narrow: torch.dtype = getattr(torch, dtype)
    for name, tensor in tensors:
        yield name, tensor.to(narrow) if tensor.dtype.itemsize > narrow.itemsize else tensor


def write_adapter_stage(
    directory: Path,
    version: PolicyVersion,
    tensors: Iterator[tuple[str, "torch.Tensor"]],
    peft_config: Mapping[str, Any],
) -> Manifest:
    """As `write_stage`, of an adapter: its version's directory is one that peft and vLLM load beside the model."""
    with _written_aside(directory, version) as partial:
        shard = _Shard(partial / ADAPTER_SHARD, header_bytes=ADAPTER_HEADER_BYTES)
        staged = [shard.add(name, tensor) for name, tensor in tensors]
        shard.close()
        (partial / ADAPTER_CONFIG).write_text(json.dumps(dict(peft_config), indent=2))
    return Manifest(
        version=version,
        directory=directory / version_label(version),
        tensors=tuple(staged),
        num_bytes=shard.num_bytes,
        lora_rank=peft_config["r"],
    )


@contextmanager
def _written_aside(directory: Path, version: PolicyVersion) -> Iterator[Path]:
    """A directory to write a version into, which takes its place when all is written."""
    directory.mkdir(parents=True, exist_ok=True)
    final = directory / version_label(version)
    partial = directory / f".{version_label(version)}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    yield partial
    shutil.rmtree(final, ignore_errors=True)
    partial.rename(final)
    drop_old(directory, newest=version)


def read_stage(manifest: Manifest) -> Iterator[tuple[StagedTensor, "torch.Tensor"]]:
    """Each tensor of the stage, mapped from its file, in the order they were written."""
    from safetensors import safe_open

    for shard in dict.fromkeys(tensor.shard for tensor in manifest.tensors):
        with safe_open(manifest.directory / shard, framework="pt") as opened:
            for tensor in manifest.tensors:
                if tensor.shard == shard:
                    yield tensor, opened.get_tensor(tensor.name)


def corrupt_tensors(manifest: Manifest) -> list[str]:
    """Names of the tensors whose bytes, as they lie in the stage, do not have the digest that the learner's had."""
    return [staged.name for staged, tensor in read_stage(manifest) if digest_of(tensor) != staged.digest]


def manifest_from_message(message: dict[str, Any]) -> Manifest:
    """The Manifest that `Manifest.as_message` turned into `message`."""
    return Manifest(
        version=PolicyVersion(**message["version"]),
        directory=Path(message["directory"]),
        tensors=tuple(StagedTensor(**tensor | {"shape": tuple(tensor["shape"])}) for tensor in message["tensors"]),
        num_bytes=message["num_bytes"],
        lora_rank=message["lora_rank"],
    )


def digest_of(tensor: "torch.Tensor") -> str:
    """blake3 of a tensor's bytes in row-major order; copies it to the host if it is elsewhere."""
    return blake3(_bytes_of(tensor)).hexdigest(length=16)


def version_label(version: PolicyVersion) -> str:
    """`lineage.n`: directory name, vLLM weight version and cache salt of a policy version."""
    return f"{version.lineage}.{version.n}"


def parse_version(label: str) -> PolicyVersion:
    """The version behind a label."""
    lineage, n = label.split(".")
    return PolicyVersion(lineage=int(lineage), n=int(n))


class _Shard:
    """One safetensors file being written: data first, the header into the room kept for it at the end."""

    def __init__(self, path: Path, *, header_bytes: int) -> None:
        self._file: BinaryIO = path.open("wb")
        self._file.seek(header_bytes)
        self._room = header_bytes
        self._header: dict[str, Any] = {}
        self._used = 16
        self.name = path.name
        self.num_bytes = 0

    def has_room(self, name: str, num_bytes: int) -> bool:
        fits = self._used + self._entry_bytes(name) <= self._room
        return fits and (self.num_bytes == 0 or self.num_bytes + num_bytes <= SHARD_BYTES)

    def add(self, name: str, tensor: "torch.Tensor") -> StagedTensor:
        data, dtype, shape = _bytes_of(tensor), _safetensors_dtype(tensor), tuple(tensor.shape)
        end = self.num_bytes + data.nbytes
        self._header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [self.num_bytes, end]}
        self._used += self._entry_bytes(name)
        self._file.write(data)
        self.num_bytes = end
        digest = blake3(data).hexdigest(length=16)
        return StagedTensor(name=name, dtype=dtype, shape=shape, digest=digest, shard=self.name)

    def close(self) -> None:
        """Writes the header, padded with spaces as the format allows."""
        room = self._room - 8
        header = json.dumps(self._header, separators=(",", ":")).encode().ljust(room)
        assert len(header) == room, "the header outgrew the room kept for it"
        self._file.seek(0)
        self._file.write(room.to_bytes(8, "little") + header)
        self._file.close()

    @staticmethod
    def _entry_bytes(name: str) -> int:
        return len(name) + 150


def _write_shards(directory: Path, tensors: Iterator[tuple[str, "torch.Tensor"]]) -> tuple[list[StagedTensor], int]:
    staged: list[StagedTensor] = []
    shards: list[_Shard] = []
    for name, tensor in tensors:
        if not shards or not shards[-1].has_room(name, tensor.nbytes):
            if shards:
                shards[-1].close()
            path = directory / f"weights-{len(shards):05d}.safetensors"
            shards.append(_Shard(path, header_bytes=HEADER_BYTES))
        staged.append(shards[-1].add(name, tensor))
    if not shards:
        raise ValueError("export_weights gave no tensors: nothing to stage")
    shards[-1].close()
    return staged, sum(shard.num_bytes for shard in shards)


def _bytes_of(tensor: "torch.Tensor") -> memoryview:
    import torch

    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data


def _safetensors_dtype(tensor: "torch.Tensor") -> str:
    import torch

    names = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
    if tensor.dtype not in names:
        raise ValueError(f"cannot stage dtype {tensor.dtype}; export float32, bfloat16 or float16")
    return names[tensor.dtype]


def drop_old(directory: Path, *, newest: PolicyVersion) -> None:
    """Keeps the newest VERSIONS_KEPT stages by version, the one just written among them."""
    stages = [path for path in directory.iterdir() if path.is_dir() and not path.name.startswith(".")]
    older = [path for path in stages if path.name != version_label(newest)]
    older.sort(key=os.path.getmtime, reverse=True)
    for path in older[VERSIONS_KEPT - 1 :]:
        shutil.rmtree(path, ignore_errors=True)
