"""A LoRA adapter as a server takes it: a stage in peft's form, whole or disturbed for a canary.

Invariant: a server holds one adapter, and a new version replaces it in place, for requests in flight too.
Called by actors/engine_weights.py; written by a learner rank (actors/weight_stage.py).
"""

import shutil
from pathlib import Path

from actors.inference_errors import WeightSyncError
from actors.weight_noise import Noise, disturb
from actors.weight_stage import ADAPTER_CONFIG, ADAPTER_SHARD, Manifest, read_stage

ADAPTER_NAME = "policy"


def require_room(manifest: Manifest, largest: int, server: str) -> None:
    """WeightSyncError where a server cannot hold the adapter."""
    if manifest.lora_rank > largest:
        raise WeightSyncError(
            f"{server} takes adapters up to rank {largest}, got rank {manifest.lora_rank}: set the server's lora_rank"
        )


def disturbed_adapter(manifest: Manifest, noise: Noise, directory: Path) -> None:
    """Writes the adapter into `directory` with noise on the matrices that it names."""
    from safetensors.torch import save_file

    tensors = {
        staged.name: disturb(tensor, staged.name, noise) if staged.name in noise.names else tensor
        for staged, tensor in read_stage(manifest)
    }
    save_file(tensors, directory / ADAPTER_SHARD, metadata={"format": "pt"})
    shutil.copyfile(manifest.directory / ADAPTER_CONFIG, directory / ADAPTER_CONFIG)
