"""The flash-attn path hands its kernel what that kernel's contract asks for; the kernel itself runs on GPUs."""

import sys
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from learners.attention import attend_buckets, attend_flash, packed_layout
from learners.config import AttentionKernel, LearnerConfig


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    softmax_scale: float,
    causal: bool,
) -> Tensor:
    """As flash-attn 2 documents it: [total, heads, dim], int32 boundaries, one causal attention a sequence."""
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    assert max_seqlen_q == max_seqlen_k == int(cu_seqlens_q.diff().max())
    outputs = []
    for start, stop in zip(cu_seqlens_q[:-1].tolist(), cu_seqlens_q[1:].tolist(), strict=True):
        query, key, value = (states[start:stop].transpose(0, 1)[None] for states in (q, k, v))
        attended = F.scaled_dot_product_attention(
            query, key, value, is_causal=causal, scale=softmax_scale, enable_gqa=True
        )
        outputs.append(attended[0].transpose(0, 1))
    return torch.cat(outputs)


def test_flash_and_buckets_attend_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = SimpleNamespace(flash_attn_varlen_func=flash_attn_varlen_func)
    monkeypatch.setitem(sys.modules, "flash_attn", fake)
    torch.manual_seed(0)
    layout = packed_layout([9, 8, 8, 3, 1])
    query, key, value = torch.randn(29, 4, 8), torch.randn(29, 2, 8), torch.randn(29, 2, 8)
    expected = attend_buckets(layout, query, key, value, 0.3)
    torch.testing.assert_close(attend_flash(layout, query, key, value, 0.3), expected, rtol=1e-5, atol=1e-5)


def test_flash_in_float32_is_refused() -> None:
    with pytest.raises(ValueError, match="attention=flash computes in half precision only"):
        LearnerConfig(attention=AttentionKernel.FLASH)
