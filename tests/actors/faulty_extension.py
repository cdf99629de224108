"""A worker extension with faults: tensors that stay old, packed copies that stay old."""

from collections.abc import Iterator
from typing import Any

import torch

from actors import weight_extension
from actors.weight_extension import WeightExtension
from actors.weight_noise import Noise
from actors.weight_stage import Manifest


class FaultyExtension(WeightExtension):
    """Tensors named by `freeze` reach the kernels as they were when it was called."""

    def freeze(self, names: list[str], message: dict[str, Any] | None) -> None:
        """`message`: the stage whose tensors stay; with "repack" in `names` the tied head keeps its packed copy."""
        manifest = weight_extension.manifest_from_message(message) if message else None
        read = weight_extension.read_stage(manifest) if manifest else ()
        self._frozen = {staged.name: tensor.clone() for staged, tensor in read if staged.name in names}
        repack = _original_repack if "repack" not in names else (lambda model: None)
        weight_extension.repack_tied_heads = repack

    def _tensors(self, manifest: Manifest, noise: Noise) -> Iterator[tuple[str, torch.Tensor]]:
        frozen = getattr(self, "_frozen", {})
        for name, tensor in super()._tensors(manifest, noise):
            yield name, frozen.get(name, tensor)


_original_repack = weight_extension.repack_tied_heads
