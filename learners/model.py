"""The policy network: a Hugging Face causal language model, sharded by FSDP2, that answers in log-probabilities.

Invariant: parameters keep their Hugging Face names, master weights are float32 shards, and the logits of a whole
sequence never exist. Called by learners/learner.py.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from learners.attention import PACKED_ATTENTION
from learners.config import LearnerConfig, Precision
from learners.cpu_layers import use_cpu_layers
from learners.logprobs import token_logprobs
from learners.packing import PackedBatch

COMPUTE_DTYPE = {Precision.FP32: torch.float32, Precision.BF16: torch.bfloat16}


class PolicyNetwork(nn.Module):
    """Packed tokens in, log-probability and entropy of each trained token out."""

    def __init__(self, causal_lm: PreTrainedModel, chunk_tokens: int) -> None:
        super().__init__()
        self.causal_lm = causal_lm
        self._chunk_tokens = chunk_tokens

    def forward(self, batch: PackedBatch, temperature: float) -> tuple[Tensor, Tensor]:
        """([N] log-probabilities, [N] entropies), float32."""
        backbone = self.causal_lm.get_decoder()
        hidden_TH = backbone(
            input_ids=batch.ids_T[None],
            position_ids=batch.positions_T[None],
            use_cache=False,
            layout=batch.layout,
        ).last_hidden_state[0]
        return token_logprobs(
            hidden_TH[batch.predictors_N],
            self.causal_lm.lm_head.weight,
            batch.targets_N,
            temperature=temperature,
            chunk_tokens=self._chunk_tokens,
        )

    def named_weights(self) -> Iterator[tuple[str, nn.Parameter]]:
        """(Hugging Face name, parameter), a tied lm_head only once, under the name of the embedding."""
        return self.causal_lm.named_parameters()


def load_policy(config: LearnerConfig, model: Path, *, world_size: int) -> PolicyNetwork:
    """The network of a Hugging Face directory, its parameters sharded over all ranks.

    ValueError when `freeze` names nothing in it. Every rank reads the whole directory.
    """
    if not (model / "config.json").is_file():
        raise ValueError(f"{model}: no config.json; give a directory saved with save_pretrained")
    causal_lm = AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float32, attn_implementation=PACKED_ATTENTION, local_files_only=True
    )
    if config.activation_checkpointing:
        causal_lm.gradient_checkpointing_enable({"use_reentrant": False})
    if not torch.cuda.is_available():
        use_cpu_layers(causal_lm.get_decoder())
    _freeze(causal_lm, config.freeze)
    network = PolicyNetwork(causal_lm.train(), config.chunk_tokens).to(_device())
    _shard(network, config, world_size)
    return network


def full_tensor(parameter: Tensor) -> Tensor:
    """The whole parameter on this rank; all ranks must ask for it together."""
    tensor = parameter.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def reshard(network: PolicyNetwork) -> None:
    """Frees gathered parameters, lest those of a forward without backward serve again, stale, after the next step."""
    for module in network.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def _freeze(causal_lm: PreTrainedModel, names: tuple[str, ...]) -> None:
    for part in names:
        frozen = [parameter for name, parameter in causal_lm.named_parameters() if part in name]
        if not frozen:
            raise ValueError(f"freeze={part!r} matches no parameter of the model; see its names in model.safetensors")
        for parameter in frozen:
            parameter.requires_grad_(False)


def _layers(network: PolicyNetwork) -> nn.ModuleList:
    layers = network.causal_lm.get_decoder().layers
    assert isinstance(layers, nn.ModuleList)
    return layers


def _shard(network: PolicyNetwork, config: LearnerConfig, world_size: int) -> None:
    mesh = init_device_mesh(_device().type, (world_size,))
    policy = MixedPrecisionPolicy(
        param_dtype=COMPUTE_DTYPE[config.precision], reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": policy}
    for layer in _layers(network):
        fully_shard(layer, **options)
    fully_shard(network, **options)
