"""Reading weights back from where vLLM's kernels keep them, to compare them with a stage bit for bit.

Invariant: a weight that a kernel holds prepacked is read through that same kernel: one-hot inputs return its columns
exactly (1 x w plus zeros), in float32 and bfloat16 alike. Runs inside the worker; called by actors/weight_extension.py.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from actors.weight_stage import Manifest, read_stage


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelPart:
    """Where one checkpoint tensor, or this rank's shard of it, sits in a layer."""

    name: str
    """Hugging Face name of the tensor."""
    holder: str
    """Layer and attribute within vLLM's model, for messages."""
    read: Callable[[torch.Tensor | None], torch.Tensor]
    """What the kernel holds: all of it for None, else [rows, C] for columns [C] of the layer's input."""
    rows: slice
    """Rows of the layer that belong to this tensor."""
    shard: Callable[[torch.Tensor], torch.Tensor]
    """The full tensor to this rank's shard of it."""
    packed: bool
    """True where reading costs a matrix product per column."""


def compare_kernels(model: torch.nn.Module, manifest: Manifest, *, max_columns: int) -> dict[str, Any]:
    """Which tensors differ from the stage ("stale"), which could not be read ("unread"), and how many values agreed.

    Weights that can be read directly are compared whole; prepacked ones on `max_columns` columns, others each version.
    """
    parts: dict[str, list[KernelPart]] = {}
    for part in _kernel_parts(model):
        parts.setdefault(part.name, []).append(part)
    stale: list[str] = []
    unread: list[str] = []
    num_values = 0
    for staged, tensor in read_stage(manifest):
        holders = parts.get(staged.name, [])
        if not holders:
            unread.append(staged.name)
        for part in holders:
            agreed = _agrees(part, tensor, max_columns=max_columns, start=manifest.version.n)
            num_values += agreed
            if not agreed:
                stale.append(f"{staged.name} (in {part.holder})")
    return {"stale": stale, "unread": unread, "num_values": num_values}


def _agrees(part: KernelPart, tensor: torch.Tensor, *, max_columns: int, start: int) -> int:
    """Number of values compared, or 0 when one of them differs."""
    wanted = part.shard(tensor)
    columns = None
    if part.packed:
        columns = torch.arange(wanted.shape[-1])
        if max_columns < len(columns):
            columns = (columns[:: len(columns) // max_columns][:max_columns] + start) % len(columns)
        wanted = wanted[:, columns]
    held = part.read(columns)[part.rows]
    return wanted.numel() if torch.equal(held, wanted.to(held.dtype)) else 0


def _kernel_parts(model: torch.nn.Module) -> Iterator[KernelPart]:
    from vllm.model_executor.layers.linear import LinearBase
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    packed_names = getattr(model, "packed_modules_mapping", {})
    for path, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, LinearBase):
            yield from _linear_parts(path, module, packed_names)
        elif isinstance(module, VocabParallelEmbedding):
            yield from _embedding_parts(model, path, module)
        else:
            for name, parameter in module.named_parameters(recurse=False):
                full = f"{path}.{name}" if path else name
                yield _plain_part(full, full, parameter)


def _linear_parts(path: str, layer: Any, packed_names: dict[str, list[str]]) -> Iterator[KernelPart]:
    """One part for each checkpoint tensor fused in a linear layer."""
    stem, _, leaf = path.rpartition(".")
    names = packed_names.get(leaf, [leaf])
    sizes = _output_sizes(layer, len(names))
    begin = 0
    for index, (name, size) in enumerate(zip(names, sizes, strict=True)):
        rows = slice(begin, begin + size)
        begin += size
        prefix = f"{stem}.{name}" if stem else name
        yield KernelPart(
            name=f"{prefix}.weight",
            holder=f"{path}.weight",
            read=_weight_reader(layer),
            rows=rows,
            shard=_linear_shard(layer, index, size),
            packed=hasattr(layer, "cpu_linear"),
        )
        if getattr(layer, "bias", None) is not None:
            yield KernelPart(
                name=f"{prefix}.bias",
                holder=f"{path}.bias",
                read=lambda _, layer=layer: layer.bias,
                rows=rows,
                shard=_linear_shard(layer, index, size),
                packed=False,
            )


def _output_sizes(layer: Any, num_parts: int) -> list[int]:
    """Rows of this rank by fused tensor."""
    if num_parts == 1:
        sizes = getattr(layer, "output_partition_sizes", None)
        return [sum(sizes) if sizes else layer.output_size]
    return list(layer.output_partition_sizes)


def _linear_shard(layer: Any, index: int, size: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """This rank's share of a full checkpoint tensor: rows of a column-parallel layer, columns of a row-parallel one."""
    from vllm.model_executor.layers.linear import QKVParallelLinear, RowParallelLinear

    rank, world = getattr(layer, "tp_rank", 0), getattr(layer, "tp_size", 1)
    if world == 1:
        return lambda tensor: tensor
    if isinstance(layer, RowParallelLinear):
        width = layer.input_size_per_partition
        return lambda tensor: tensor[:, rank * width : (rank + 1) * width] if tensor.ndim > 1 else tensor
    if isinstance(layer, QKVParallelLinear) and index > 0:
        rank //= layer.num_kv_head_replicas
    return lambda tensor: tensor[rank * size : (rank + 1) * size] if len(tensor) != size else tensor


def _embedding_parts(model: torch.nn.Module, path: str, layer: Any) -> Iterator[KernelPart]:
    """An embedding table, read as the lookup reads it; an output head, read through its matrix product."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    name, is_head = path, isinstance(layer, ParallelLMHead)
    if is_head:
        tied = [
            other
            for other, module in model.named_modules()
            if module is not layer and getattr(module, "weight", None) is layer.weight
        ]
        name = tied[0] if tied else path
    first, last = layer.shard_indices.org_vocab_start_index, layer.shard_indices.org_vocab_end_index
    yield KernelPart(
        name=f"{name}.weight",
        holder=f"{path}.weight",
        read=_weight_reader(layer) if is_head else lambda _: layer.weight,
        rows=slice(0, last - first),
        shard=lambda tensor: tensor[first:last],
        packed=is_head and hasattr(layer, "cpu_linear"),
    )


def _weight_reader(layer: Any) -> Callable[[torch.Tensor | None], torch.Tensor]:
    if not hasattr(layer, "cpu_linear"):
        return lambda _: layer.weight
    return lambda columns: _read_packed(layer, columns)


def _read_packed(layer: Any, columns: torch.Tensor | None) -> torch.Tensor:
    """Columns [C] of a prepacked weight as [rows, C], read by multiplying one-hot rows [C, K] with it."""
    assert columns is not None, "a packed part is read by columns"
    width = getattr(layer, "input_size_per_partition", None) or layer.embedding_dim
    dtype = getattr(layer, "params_dtype", None) or layer.weight.dtype
    one_hot = torch.zeros(len(columns), width, dtype=dtype)
    one_hot[torch.arange(len(columns)), columns] = 1
    return layer.cpu_linear(one_hot, layer.weight, None).T


def _plain_part(name: str, holder: str, parameter: torch.Tensor) -> KernelPart:
    return KernelPart(
        name=name,
        holder=holder,
        read=lambda _: parameter,
        rows=slice(None),
        shard=lambda tensor: tensor,
        packed=False,
    )
