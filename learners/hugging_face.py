"""Hugging Face models as the network that is trained: loading, packed attention, kernels.

Invariant: what is chosen in the config is what runs; a kernel that is not installed is refused before anything is
loaded. Called by learners/model.py. Imports transformers; nothing else of the learner's path needs it.
"""

import importlib.util
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM, PreTrainedModel

from learners.attention import attend_flash, packed_attention
from learners.config import AttentionKernel, LearnerConfig
from learners.cpu_layers import use_cpu_layers
from learners.lora import add_adapters
from learners.sequence_parallel import kv_repeats

PACKED_ATTENTION = "thresher_packed"
FLASH_ATTENTION = "thresher_flash"


def load_causal_lm(config: LearnerConfig, model: Path) -> PreTrainedModel:
    """The model of a Hugging Face directory in float32, in training mode, with the adapters and kernels of `config`."""
    if not (model / "config.json").is_file():
        raise ValueError(f"{model}: no config.json; give a directory saved with save_pretrained")
    _require_kernels(config)
    name = FLASH_ATTENTION if config.attention is AttentionKernel.FLASH else PACKED_ATTENTION
    causal_lm = AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float32, attn_implementation=name, local_files_only=True
    )
    kv_repeats(config.sequence_parallel, causal_lm.config.num_attention_heads, causal_lm.config.num_key_value_heads)
    if config.activation_checkpointing:
        causal_lm.gradient_checkpointing_enable({"use_reentrant": False})
    if config.lora.rank:
        add_adapters(causal_lm, config.lora)
    if config.liger:
        _use_liger(causal_lm)
    elif not torch.cuda.is_available():
        use_cpu_layers(causal_lm.get_decoder())
    return causal_lm.train()


def _require_kernels(config: LearnerConfig) -> None:
    wanted = {
        "attention=flash": ("flash_attn", "flash-attn", config.attention is AttentionKernel.FLASH),
        "liger": ("liger_kernel", "liger-kernel", config.liger),
    }
    for option, (module, package, is_wanted) in wanted.items():
        if not is_wanted:
            continue
        if not torch.cuda.is_available():
            raise ValueError(f"learner.{option} needs a GPU, and this machine has none; leave it out")
        if importlib.util.find_spec(module) is None:
            raise ValueError(f"learner.{option} needs the package {package}: install it, or leave the option out")


def _use_liger(causal_lm: PreTrainedModel) -> None:
    from liger_kernel.transformers import _apply_liger_kernel_to_instance  # pyright: ignore[reportMissingImports]

    # The log-probabilities are computed in chunks by learners/logprobs.py, so Liger's own cross-entropy stays out.
    _apply_liger_kernel_to_instance(causal_lm, cross_entropy=False, fused_linear_cross_entropy=False)


def _no_mask(*_: Any, **__: Any) -> None:
    """The layout says all; building a mask would cost [T, T]."""


for _name, _function in (
    (PACKED_ATTENTION, packed_attention),
    (FLASH_ATTENTION, partial(packed_attention, kernel=attend_flash)),
):
    AttentionInterface.register(_name, _function)
    AttentionMaskInterface.register(_name, _no_mask)
