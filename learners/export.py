"""Hugging Face directories from trained weights.

Invariant: the directory is whole or not there, and differs from its source in nothing but the weights and their dtype.
Called by learners/learner.py, learners/lora.py and learners/models.py.
"""

import json
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

SHARD_BYTES = 4 * 2**30
COPIED = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)


def save_pretrained(
    weights: Iterable[tuple[str, Tensor]], *, source: Path, directory: Path, is_writer: bool = True
) -> None:
    """Writes `weights` with the config and tokenizer of `source`; ranks that do not write only exhaust them."""
    if not is_writer:
        for _ in weights:
            pass
        return
    with written_directory(directory) as partial:
        dtype = _write_shards(weights, partial)
        config = json.loads((source / "config.json").read_text())
        config.pop("torch_dtype", None)
        (partial / "config.json").write_text(json.dumps(config | {"dtype": dtype}, indent=2))
        for name in COPIED:
            if (source / name).is_file():
                shutil.copyfile(source / name, partial / name)


@contextmanager
def written_directory(directory: Path) -> Iterator[Path]:
    """A directory to write into, beside `directory`; it takes that one's place when all is written."""
    partial = directory.with_name(directory.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    yield partial
    if directory.exists():
        shutil.rmtree(directory)
    partial.rename(directory)


def _write_shards(weights: Iterable[tuple[str, Tensor]], directory: Path) -> str:
    """Writes model.safetensors, or numbered shards and their index; returns the dtype's name."""
    shards: list[list[str]] = []
    pending: dict[str, Tensor] = {}
    num_bytes = total_bytes = 0
    dtype = "float32"
    for name, tensor in weights:
        if pending and num_bytes + tensor.nbytes > SHARD_BYTES:
            shards.append(_flush(pending, directory, len(shards)))
            pending, num_bytes = {}, 0
        pending[name] = tensor.contiguous()
        num_bytes += tensor.nbytes
        total_bytes += tensor.nbytes
        dtype = str(tensor.dtype).removeprefix("torch.")
    shards.append(_flush(pending, directory, len(shards)))
    if len(shards) == 1:
        (directory / "shard-0.safetensors").rename(directory / "model.safetensors")
        return dtype
    weight_map = {}
    for index, names in enumerate(shards):
        file = f"model-{index + 1:05d}-of-{len(shards):05d}.safetensors"
        (directory / f"shard-{index}.safetensors").rename(directory / file)
        weight_map |= dict.fromkeys(names, file)
    index_json = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index_json, indent=2))
    return dtype


def _flush(pending: dict[str, Tensor], directory: Path, index: int) -> list[str]:
    save_file(pending, directory / f"shard-{index}.safetensors", metadata={"format": "pt"})
    return list(pending)
