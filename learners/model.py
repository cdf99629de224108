"""The policy network: a causal language model, sharded by FSDP2, that answers in log-probabilities.

Invariant: parameters keep their Hugging Face names, master weights are float32 shards, and the logits of a whole
sequence never exist. Called by learners/learner.py and benchmarks.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from learners.config import LearnerConfig, Precision
from learners.logprobs import token_logprobs
from learners.packing import PackedBatch

COMPUTE_DTYPE = {Precision.FP32: torch.float32, Precision.BF16: torch.bfloat16}


class CausalLm(Protocol):
    """What is asked of a causal language model: transformers' own have it."""

    lm_head: nn.Linear

    def get_decoder(self) -> Any:
        """The module below the head; its `layers` are sharded one by one."""
        ...

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """(Hugging Face name, parameter)."""
        ...


class PolicyNetwork(nn.Module):
    """Packed tokens in, log-probability and entropy of each trained token out."""

    def __init__(self, causal_lm: CausalLm, chunk_tokens: int) -> None:
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
            _rows(hidden_TH, batch.predictors_N),
            self.causal_lm.lm_head.weight,
            batch.targets_N,
            temperature=temperature,
            chunk_tokens=self._chunk_tokens,
        )

    def named_weights(self) -> Iterator[tuple[str, nn.Parameter]]:
        """(Hugging Face name, parameter), a tied lm_head only once, under the name of the embedding."""
        return self.causal_lm.named_parameters()


def _rows(hidden_TH: Tensor, rows_N: Tensor) -> Tensor:
    """Rows that may repeat; of two ways the one whose gradients add up in the same order each time on this device."""
    return hidden_TH[rows_N] if hidden_TH.is_cuda else hidden_TH.index_select(0, rows_N)


def load_policy(config: LearnerConfig, model: Path, *, world_size: int) -> PolicyNetwork:
    """The network of a Hugging Face directory, its parameters sharded over all ranks.

    ValueError when `freeze` names nothing in it. Every rank reads the whole directory.
    """
    from learners.hugging_face import load_causal_lm  # where no transformers is installed, other models still train

    if config.cpu_offload and not torch.cuda.is_available():
        raise ValueError("learner.cpu_offload moves a GPU's state to host memory, and this machine has no GPU")
    causal_lm = load_causal_lm(config, model)
    _freeze(causal_lm, config.freeze)
    network = PolicyNetwork(causal_lm, config.chunk_tokens)
    if config.cpu_offload:
        _move_buffers(network)
    else:
        network.to(compute_device())
    return shard(network, config, world_size)


def shard(network: PolicyNetwork, config: LearnerConfig, world_size: int) -> PolicyNetwork:
    """The same network with its parameters sharded in place over all ranks, layer by layer."""
    mesh = init_device_mesh(compute_device().type, (world_size,))
    policy = MixedPrecisionPolicy(
        param_dtype=COMPUTE_DTYPE[config.precision], reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": policy}
    if config.cpu_offload:
        options["offload_policy"] = CPUOffloadPolicy()
    for layer in network.causal_lm.get_decoder().layers:
        fully_shard(layer, **options)
    fully_shard(network, **options)
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


def compute_device() -> torch.device:
    """Where this rank computes, wherever its state lies."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def _move_buffers(network: PolicyNetwork) -> None:
    """Parameters stay for FSDP to bring when they are needed; it leaves buffers where they are."""
    for module in network.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(compute_device()))


def _freeze(causal_lm: CausalLm, names: tuple[str, ...]) -> None:
    for part in names:
        frozen = [parameter for name, parameter in causal_lm.named_parameters() if part in name]
        if not frozen:
            raise ValueError(f"freeze={part!r} matches no parameter of the model; see its names in model.safetensors")
        for parameter in frozen:
            parameter.requires_grad_(False)
