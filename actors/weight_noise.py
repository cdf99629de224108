"""Groups of tensors, and noise that makes a group visible: the canary's arithmetic.

Invariant: noise depends only on the tensor's name and the scale, so every rank of a server draws its part of the same.
Used by actors/weight_extension.py (in the engine) and actors/version_proof.py (which group moved).
"""

import re
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

LAYER = re.compile(r"\.\d+\.")
ADAPTER = re.compile(r"\.lora_[AB]\.weight$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """A disturbance of some tensors on their way into the engine."""

    names: tuple[str, ...]
    """Tensors that get it."""
    scale: float
    """Standard deviation, relative to each tensor's root mean square."""
    kept_rows: tuple[int, ...] = ()
    """Rows that stay as they are."""


def canary_groups(names: Sequence[str], probe_ids: Sequence[int]) -> dict[str, Noise]:
    """One Noise for each kind of tensor, by the name without its layer number, at scale 1.

    Where the output head is tied to the embedding, "lm_head (tied)" disturbs only rows that the probe does not look up,
    so that only the head's own, possibly prepacked, copy can show it.
    """
    groups = {group: Noise(names=members, scale=1.0) for group, members in tensor_groups(names).items()}
    embedding = next((name for name in names if name.endswith("embed_tokens.weight")), None)
    if embedding is not None and not any(name.endswith("lm_head.weight") for name in names):
        groups["lm_head (tied)"] = Noise(names=(embedding,), scale=1.0, kept_rows=tuple(sorted(set(probe_ids))))
    return groups


def tensor_groups(names: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Names by kind: `model.layers.*.self_attn.q_proj.weight` holds that tensor of every layer.

    The two matrices of an adapter are one kind: while B is zero, as at first, no noise on A alone could be seen.
    """
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(ADAPTER.sub("", LAYER.sub(".*.", name)), []).append(name)
    return {group: tuple(members) for group, members in groups.items()}


def disturb(tensor: "torch.Tensor", name: str, noise: Noise) -> "torch.Tensor":
    """`tensor` plus normal noise of `noise.scale` times its root mean square (0.02 where that is 0).

    Additive, because scaling a projection that a norm follows (Qwen3's q_proj and k_proj) changes nothing.
    """
    import torch

    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    drawn = torch.randn(tensor.shape, generator=generator, dtype=torch.float32).to(tensor.device)
    if noise.kept_rows:
        drawn[list(noise.kept_rows)] = 0
    size = tensor.float().pow(2).mean().sqrt().item() or 0.02
    return (tensor.float() + drawn * (noise.scale * size)).to(tensor.dtype)
