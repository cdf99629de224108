"""RMS norm, and linear maps fused with the norm or the activation before them.

Invariant: forward and gradients are those of the plain composition (up to rounding); the backward keeps inputs and
computes normed and activated values again, so no product of a norm or an activation outlives its use.
Called by learners/cpu_layers.py. T tokens, H width, I width of the MLP.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK_TOKENS = 1024
"""Tokens of the MLP that are worked on at once; so many keep matrix products at full speed (256 cost 7% on AVX512)."""


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """weight * x / rms(x) over the last axis, differentiable."""
    return _RmsNorm.apply(x, weight, eps)


def add_gated_mlp(x_TH: Tensor, norm: Tensor, eps: float, gate_IH: Tensor, up_IH: Tensor, down_HI: Tensor) -> Tensor:
    """[1, T, H]: x + (silu(n G^T) * (n U^T)) D^T with n = rms_norm(x), differentiable; no view of anything."""
    return _GatedMlp.apply(x_TH, norm, eps, gate_IH, up_IH, down_HI)


def normed_linears(x_TH: Tensor, norm: Tensor, eps: float, *weights: Tensor | None) -> tuple[Tensor, ...]:
    """rms_norm(x), then several linear maps of it; `weights` are weight, bias (or None), weight, bias and so on."""
    return _NormedLinears.apply(x_TH, norm, eps, *weights)  # pyright: ignore[reportReturnType]


class _NormedLinears(torch.autograd.Function):
    """Keeps x and 1 / rms(x)."""

    @staticmethod
    def forward(ctx: Any, x_TH: Tensor, norm: Tensor, eps: float, *weights: Tensor | None) -> tuple[Tensor, ...]:
        inverse_T1 = _inverse_rms(x_TH, eps)
        normed_TH = _normed(x_TH, inverse_T1, norm)
        matrices, biases = weights[::2], weights[1::2]
        ctx.save_for_backward(x_TH, inverse_T1, norm, *matrices)
        return tuple(F.linear(normed_TH, *pair) for pair in zip(matrices, biases, strict=True))  # pyright: ignore[reportArgumentType]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_TH, inverse_T1, norm, *matrices = ctx.saved_tensors
        grad_normed_TH = grads[0] @ matrices[0]
        for grad, matrix in zip(grads[1:], matrices[1:], strict=True):
            grad_normed_TH.addmm_(grad, matrix)
        normed_TH = _normed(x_TH, inverse_T1, norm)
        wanted = ctx.needs_input_grad[3:]
        grad_weights: list[Tensor | None] = []
        for index, grad in enumerate(grads):
            grad_weights.append(grad.t() @ normed_TH if wanted[2 * index] else None)
            grad_weights.append(grad.sum(0) if wanted[2 * index + 1] else None)
        return *_norm_backward(grad_normed_TH, x_TH, inverse_T1, norm), None, *grad_weights


class _GatedMlp(torch.autograd.Function):
    """Keeps x and the two halves [T, I]; walks over the tokens in chunks, forward and backward."""

    @staticmethod
    def forward(
        ctx: Any, x_TH: Tensor, norm: Tensor, eps: float, gate_IH: Tensor, up_IH: Tensor, down_HI: Tensor
    ) -> Tensor:
        inverse_T1 = _inverse_rms(x_TH, eps)
        gates_TI, ups_TI = (x_TH.new_empty(x_TH.shape[0], gate_IH.shape[0]) for _ in range(2))
        out_1TH = x_TH.new_empty(1, *x_TH.shape)  # FSDP wants layers to return no views
        for chunk in _chunks(x_TH.shape[0]):
            normed_CH = _normed(x_TH[chunk], inverse_T1[chunk], norm)
            gate_CI = torch.mm(normed_CH, gate_IH.t(), out=gates_TI[chunk])
            up_CI = torch.mm(normed_CH, up_IH.t(), out=ups_TI[chunk])
            torch.addmm(x_TH[chunk], F.silu(gate_CI).mul_(up_CI), down_HI.t(), out=out_1TH[0, chunk])
        ctx.save_for_backward(x_TH, inverse_T1, norm, gates_TI, ups_TI, gate_IH, up_IH, down_HI)
        return out_1TH

    @staticmethod
    def backward(ctx: Any, grad_1TH: Tensor) -> tuple[Tensor | None, ...]:
        x_TH, inverse_T1, norm, gates_TI, ups_TI, *matrices = ctx.saved_tensors
        wanted = ctx.needs_input_grad[3:]
        totals = [_zeros_like(m) if want else None for m, want in zip(matrices, wanted, strict=True)]
        grad_x_TH = torch.empty_like(x_TH)
        grad_norm = torch.zeros_like(norm, dtype=torch.float32)
        for chunk in _chunks(x_TH.shape[0]):
            kept = (x_TH[chunk], inverse_T1[chunk], gates_TI[chunk], ups_TI[chunk])
            grad_x_CH, part = _mlp_chunk_backward(grad_1TH[0, chunk], kept, norm, matrices, totals)
            grad_x_TH[chunk] = grad_x_CH
            grad_norm += part
        grad_matrices = [t if t is None else t.to(m.dtype) for t, m in zip(totals, matrices, strict=True)]
        return grad_x_TH, grad_norm.to(norm.dtype), None, *grad_matrices


def _mlp_chunk_backward(
    grad_CH: Tensor,
    kept: tuple[Tensor, ...],
    norm: Tensor,
    matrices: list[Tensor],
    totals: list[Tensor | None],
) -> tuple[Tensor, Tensor]:
    """Gradients of x [C, H] and of the norm's weight [H]; adds those of the matrices to `totals`."""
    x_CH, inverse_C1, gate_CI, up_CI = kept
    gate_IH, up_IH, down_HI = matrices
    sigmoid_CI = torch.sigmoid(gate_CI)
    silu_CI = gate_CI * sigmoid_CI
    if totals[2] is not None:
        _add_product(totals[2], grad_CH.t(), silu_CI * up_CI)
    grad_product_CI = grad_CH @ down_HI
    # d silu / d gate = sigmoid + silu (1 - sigmoid)
    slope_CI = torch.addcmul(silu_CI, silu_CI, sigmoid_CI, value=-1).add_(sigmoid_CI)
    grad_gate_CI = slope_CI.mul_(up_CI).mul_(grad_product_CI)
    grad_up_CI = silu_CI.mul_(grad_product_CI)
    normed_CH = _normed(x_CH, inverse_C1, norm)
    for total, grad_CI in zip(totals[:2], (grad_gate_CI, grad_up_CI), strict=True):
        if total is not None:
            _add_product(total, grad_CI.t(), normed_CH)
    grad_normed_CH = (grad_gate_CI @ gate_IH).addmm_(grad_up_CI, up_IH)
    grad_x_CH, grad_norm = _norm_backward(grad_normed_CH, x_CH, inverse_C1, norm)
    return grad_x_CH.add_(grad_CH), grad_norm


class _RmsNorm(torch.autograd.Function):
    """Keeps x and 1 / rms(x)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        inverse = _inverse_rms(x, eps)
        ctx.save_for_backward(x, inverse, weight)
        return _normed(x, inverse, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, inverse, weight = ctx.saved_tensors
        return *_norm_backward(grad.contiguous(), x, inverse, weight), None


def _inverse_rms(x: Tensor, eps: float) -> Tensor:
    """[..., 1] float32."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    return norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()


def _normed(x: Tensor, inverse: Tensor, weight: Tensor) -> Tensor:
    return (x * inverse).to(x.dtype).mul_(weight)


def _norm_backward(grad: Tensor, x: Tensor, inverse: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """With x^ = x / rms(x), the gradient of x is (w g - x^ mean(w g x^)) / rms(x), that of w the sum of g x^."""
    scaled = x * inverse
    product = grad * scaled
    width = x.shape[-1]
    rows = product.view(-1, width)
    grad_weight = rows.sum(0)
    mean = (rows @ weight.to(rows.dtype)).div_(-width).view(inverse.shape)
    grad_x = torch.mul(grad, weight, out=product) if product.dtype == grad.dtype else (grad * weight).float()
    return grad_x.addcmul_(scaled, mean).mul_(inverse).to(grad.dtype), grad_weight.to(weight.dtype)


def _chunks(num_tokens: int) -> list[slice]:
    return [slice(start, min(start + CHUNK_TOKENS, num_tokens)) for start in range(0, num_tokens, CHUNK_TOKENS)]


def _zeros_like(matrix: Tensor) -> Tensor:
    """float32 whatever the compute dtype: many chunks are added up in it."""
    return torch.zeros_like(matrix, dtype=torch.float32)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right, accumulated in float32."""
    if right.dtype == torch.float32:
        total.addmm_(left, right)
    else:
        total.add_(left @ right)
