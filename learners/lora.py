"""Low-rank adapters through peft: put in, merged into whole weights, written as an adapter directory.

Invariant: names that leave the learner are Hugging Face's for merged weights and peft's for an adapter directory.
Called by learners/hugging_face.py and learners/learner.py.
"""

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from learners.config import LoraConfig
from learners.export import written_directory

ADAPTER = "default"
"""The name that peft puts into parameter names."""
_A, _B, _BASE = f".lora_A.{ADAPTER}.weight", f".lora_B.{ADAPTER}.weight", ".base_layer."


def add_adapters(causal_lm: nn.Module, config: LoraConfig) -> None:
    """Puts an adapter beside each target and freezes all else; ValueError when a target matches nothing.

    B starts at zero, so the model computes what it did before.
    """
    try:
        from peft import LoraConfig as PeftConfig
        from peft import inject_adapter_in_model
    except ImportError as error:
        raise ValueError("lora needs the package peft: pip install peft, or set lora.rank=0") from error
    for target in config.targets:
        if not any(name.rpartition(".")[2] == target for name, _ in causal_lm.named_modules()):
            raise ValueError(f"lora.targets names {target!r}, which is no part of this model; see model.safetensors")
    peft_config = PeftConfig(r=config.rank, lora_alpha=config.alpha, target_modules=list(config.targets))  # pyright: ignore[reportArgumentType]
    inject_adapter_in_model(peft_config, causal_lm, adapter_name=ADAPTER)


def is_adapter(name: str) -> bool:
    """Whether a parameter of this name is part of an adapter."""
    return name.endswith((_A, _B))


def merged_weights(
    weights: Mapping[str, Tensor], config: LoraConfig, whole: Callable[[Tensor], Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """(Hugging Face name, whole weight with its adapter added), one at a time; `whole` gathers a sharded tensor."""
    for name, weight in weights.items():
        if is_adapter(name):
            continue
        prefix = name.partition(_BASE)[0]
        full = whole(weight)
        if prefix + _A in weights and name.endswith(".weight"):
            full = full + (config.alpha / config.rank) * (whole(weights[prefix + _B]) @ whole(weights[prefix + _A]))
        yield name.replace(_BASE, "."), full


def save_adapter(
    adapter: Iterator[tuple[str, Tensor]], config: Mapping[str, Any], *, directory: Path, is_writer: bool
) -> None:
    """Writes the adapter directory that peft and vLLM load; ranks that do not write only exhaust `adapter`.

    `adapter` gives peft's names and whole CPU tensors, `config` is `peft_config`.
    """
    from safetensors.torch import save_file

    tensors = {name: tensor.contiguous() for name, tensor in adapter}
    if not is_writer:
        return
    with written_directory(directory) as partial:
        save_file(tensors, partial / "adapter_model.safetensors", metadata={"format": "pt"})
        (partial / "adapter_config.json").write_text(json.dumps(dict(config), indent=2))


def peft_name(name: str) -> str:
    """What peft calls a parameter in an adapter directory."""
    return f"base_model.model.{name.replace(f'.{ADAPTER}.', '.')}"


def peft_config(config: LoraConfig, base: Path) -> dict[str, Any]:
    """What an adapter directory says of itself; `base` is the model that it belongs to."""
    values = dataclasses.asdict(config)
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base),
        "r": values["rank"],
        "lora_alpha": values["alpha"],
        "target_modules": sorted(values["targets"]),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
