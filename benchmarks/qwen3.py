"""Qwen3 in plain torch, with random weights, for machines without transformers.

Invariant: the function and parameter names of transformers' Qwen3 (a test compares them), attention through
learners/attention.py; so that what benchmarks/gpu_learner.py measures is this project's learner path.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from learners.attention import PackedLayout, packed_attention
from learners.shape import ModelShape

ROPE_THETA = 1e6
EPS = 1e-6


class Qwen3(nn.Module):
    """A causal language model: a decoder and its head, which `PolicyNetwork` drives."""

    def __init__(self, shape: ModelShape, *, is_checkpointed: bool) -> None:
        super().__init__()
        self.model = Decoder(shape, is_checkpointed=is_checkpointed)
        self.lm_head = nn.Linear(shape.hidden, shape.vocabulary, bias=False)
        if shape.is_tied:
            self.lm_head.weight = self.model.embed_tokens.weight

    def get_decoder(self) -> "Decoder":
        """The module below the head."""
        return self.model


class Output:
    """What a decoder returns, by the name that transformers gives it."""

    def __init__(self, last_hidden_state: Tensor) -> None:
        self.last_hidden_state = last_hidden_state
        """[1, T, hidden]."""


class Decoder(nn.Module):
    """Embedding, layers and the last norm."""

    def __init__(self, shape: ModelShape, *, is_checkpointed: bool) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocabulary, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape, is_checkpointed=is_checkpointed) for _ in range(shape.num_layers))
        self.norm = RmsNorm(shape.hidden)
        self._head_dim = shape.head_dim

    def forward(self, *, input_ids: Tensor, position_ids: Tensor, layout: PackedLayout, **_unused: Any) -> Output:
        """[1, T] ids and positions -> [1, T, hidden]."""
        hidden = self.embed_tokens(input_ids)
        tables = _rotary_tables(position_ids, self._head_dim, hidden.dtype)
        for layer in self.layers:
            hidden = layer(hidden, tables, layout)
        return Output(self.norm(hidden))


class Layer(nn.Module):
    """Attention and MLP, each behind a norm and added to its input."""

    def __init__(self, shape: ModelShape, *, is_checkpointed: bool) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = RmsNorm(shape.hidden), RmsNorm(shape.hidden)
        self.self_attn, self.mlp = Attention(shape), Mlp(shape)
        self._is_checkpointed = is_checkpointed

    def forward(self, hidden: Tensor, tables: tuple[Tensor, Tensor], layout: PackedLayout) -> Tensor:
        """[1, T, hidden] -> [1, T, hidden]."""
        if not (self._is_checkpointed and torch.is_grad_enabled()):
            return self._compute(hidden, tables, layout)
        return checkpoint(self._compute, hidden, tables, layout, use_reentrant=False)  # pyright: ignore[reportReturnType]

    def _compute(self, hidden: Tensor, tables: tuple[Tensor, Tensor], layout: PackedLayout) -> Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), tables, layout)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Attention(nn.Module):
    """Grouped heads, each query and key normed and rotated."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        widths = (shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim)
        self.q_proj = nn.Linear(shape.hidden, widths[0], bias=False)
        self.k_proj = nn.Linear(shape.hidden, widths[1], bias=False)
        self.v_proj = nn.Linear(shape.hidden, widths[1], bias=False)
        self.o_proj = nn.Linear(widths[0], shape.hidden, bias=False)
        self.q_norm, self.k_norm = RmsNorm(shape.head_dim), RmsNorm(shape.head_dim)

    def forward(self, hidden: Tensor, tables: tuple[Tensor, Tensor], layout: PackedLayout) -> Tensor:
        """[1, T, hidden] -> [1, T, hidden]."""
        heads = (1, hidden.shape[1], -1, self.head_dim)
        query = _rotate(self.q_norm(self.q_proj(hidden).view(heads)), *tables).transpose(1, 2)
        key = _rotate(self.k_norm(self.k_proj(hidden).view(heads)), *tables).transpose(1, 2)
        value = self.v_proj(hidden).view(heads).transpose(1, 2)
        scale = self.head_dim**-0.5
        attended, _ = packed_attention(self, query, key, value, None, layout=layout, scaling=scale)
        return self.o_proj(attended.flatten(2))


class Mlp(nn.Module):
    """(silu(x G) * x U) D."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.down_proj = nn.Linear(shape.intermediate, shape.hidden, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """[1, T, hidden] -> [1, T, hidden]."""
        return self.down_proj(F.silu(self.gate_proj(hidden)) * self.up_proj(hidden))


class RmsNorm(nn.Module):
    """x / rms(x) * weight, over the last axis."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, hidden: Tensor) -> Tensor:
        """The same shape and dtype."""
        return F.rms_norm(hidden, self.weight.shape, self.weight, EPS)


def compiled(model: Qwen3, compile_: Callable[[Any], Any] = torch.compile) -> Qwen3:
    """The same model with norms, rotation and MLPs fused by torch's compiler."""
    for layer in model.model.layers:
        assert isinstance(layer, Layer)
        for module in (layer.mlp, layer.input_layernorm, layer.post_attention_layernorm):
            module.forward = compile_(module.forward)
        for norm in (layer.self_attn.q_norm, layer.self_attn.k_norm):
            norm.forward = compile_(norm.forward)
    return model


def _rotary_tables(positions: Tensor, head_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(cos, sin), [1, T, 1, head_dim] each, computed in float32."""
    frequencies = ROPE_THETA ** (-torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32) / head_dim)
    angles = positions.float()[..., None] * frequencies
    angles = torch.cat((angles, angles), -1).unsqueeze(2)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def _rotate(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = states.shape[-1] // 2
    return states * cos + torch.cat((-states[..., half:], states[..., :half]), -1) * sin
