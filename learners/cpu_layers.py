"""Decoder layers of the Llama family that keep less for the backward and pass over memory less often, for CPUs.

Invariant: the same function as transformers' own layers (Llama, Mistral, Qwen2, Qwen3), parameters and names untouched;
a test compares outputs and gradients. Called by learners/hugging_face.py; on GPUs other kernels do this.

A layer keeps its input, the queries, keys and values, what attention gave, its middle, and the two halves of the MLP:
about 10 numbers a token and unit of width for SmolLM2, where transformers' own keep 20. What is cheap is computed
again in the backward: norms, the activation, their products. No matrix product runs twice.
"""

from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from learners.attention import PackedLayout, packed_attention
from learners.fused_linear import add_gated_mlp, normed_linears, rms_norm

LAYER_TYPES = frozenset({"LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer"})


def use_cpu_layers(decoder: nn.Module) -> bool:
    """Replaces the forward of the layers and norms of `decoder`.

    False, and nothing changed, for another family or where a projection is more than a plain linear map (an adapter).
    """
    layers = list(getattr(decoder, "layers", []))
    if not layers or not all(_is_known(layer) for layer in layers):
        return False
    for module in decoder.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = MethodType(_norm_forward, module)
    for layer in layers:
        layer.forward = MethodType(_layer_forward, layer)
    return True


def _is_known(layer: Any) -> bool:
    if type(layer).__name__ not in LAYER_TYPES:
        return False
    if layer.mlp.act_fn.__class__.__name__ not in ("SiLU", "SiLUActivation"):
        return False
    attention, mlp = layer.self_attn, layer.mlp
    inner = (attention.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj)
    linears = (attention.q_proj, attention.k_proj, attention.v_proj, *inner)
    return all(type(linear) is nn.Linear for linear in linears) and all(linear.bias is None for linear in inner)


def _norm_forward(self: Any, hidden_states: Tensor) -> Tensor:
    return rms_norm(hidden_states, self.weight, self.variance_epsilon)


def _layer_forward(
    self: Any,
    hidden_states: Tensor,
    *,
    position_embeddings: tuple[Tensor, Tensor],
    layout: PackedLayout,
    **_unused: Any,
) -> Tensor:
    """hidden_states [1, T, width] -> [1, T, width]."""
    hidden_TH = hidden_states[0]
    attended_TH = _attend(self, hidden_TH, position_embeddings, layout)
    middle_TH = torch.addmm(hidden_TH, attended_TH, self.self_attn.o_proj.weight.t())
    norm, mlp = self.post_attention_layernorm, self.mlp
    return add_gated_mlp(
        middle_TH,
        norm.weight,
        norm.variance_epsilon,
        mlp.gate_proj.weight,
        mlp.up_proj.weight,
        mlp.down_proj.weight,
    )


def _attend(layer: Any, hidden_TH: Tensor, tables: tuple[Tensor, Tensor], layout: PackedLayout) -> Tensor:
    """[T, heads * dim]: what attention gives, before the output projection."""
    attention, norm = layer.self_attn, layer.input_layernorm
    linears = (attention.q_proj, attention.k_proj, attention.v_proj)
    weights = [parameter for linear in linears for parameter in (linear.weight, linear.bias)]
    projected = normed_linears(hidden_TH, norm.weight, norm.variance_epsilon, *weights)
    heads = (1, hidden_TH.shape[0], -1, attention.head_dim)
    query, key, value = (states.view(heads) for states in projected)
    if hasattr(attention, "q_norm"):
        query, key = attention.q_norm(query), attention.k_norm(key)
    cos, sin = (table.unsqueeze(2) for table in tables)
    query, key = _Rotate.apply(query, cos, sin), _Rotate.apply(key, cos, sin)
    query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    # Mistral has its window in the config alone; Qwen's layers each have their own.
    window = getattr(attention, "sliding_window", getattr(attention.config, "sliding_window", None))
    attended, _ = packed_attention(
        attention, query, key, value, None, layout=layout, scaling=attention.scaling, sliding_window=window
    )
    return attended[0].flatten(1)


class _Rotate(torch.autograd.Function):
    """x cos + swap(x) sin~, where swap exchanges the halves of a head and sin~ is sin, negative in the first half."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin, 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotate(grad.contiguous(), cos, sin, -1), None, None


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, sign: int) -> Tensor:
    half = x.shape[-1] // 2
    out = x * cos
    out[..., :half].addcmul_(x[..., half:], sin[..., :half], value=-sign)
    out[..., half:].addcmul_(x[..., :half], sin[..., half:], value=sign)
    return out
