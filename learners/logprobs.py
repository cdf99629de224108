"""Log-probabilities and entropy of given tokens, without ever holding a [tokens, vocabulary] tensor.

Invariant: no tensor here is larger than [chunk_tokens, vocabulary] or [vocabulary, hidden], forward or backward.
Called by the Learner with the hidden states of the positions that predict a trained token.

With logits z = (h W^T) / temperature and p = softmax(z):
    logprob_t = z[y_t] - logsumexp(z)                 d logprob_t / d z_j = [j = y_t] - p_j
    entropy_t = logsumexp(z) - sum_j p_j z_j          d entropy_t / d z_j = -p_j (log p_j + entropy_t)
"""

from typing import Any

import torch
from torch import Tensor

DEFAULT_CHUNK_TOKENS = 512


def token_logprobs(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    targets_T: Tensor,
    *,
    temperature: float = 1.0,
    chunk_tokens: int = DEFAULT_CHUNK_TOKENS,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target and entropy of each distribution, both [T] float32, both differentiable.

    Logits are computed in the dtype of `hidden_TH` (as the sampling engine does), everything after them in float32.
    """
    if temperature <= 0:
        raise ValueError(f"temperature must be > 0 to divide logits by it, got {temperature}")
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens must be >= 1, got {chunk_tokens}")
    return _TokenLogprobs.apply(hidden_TH, weight_VH, targets_T, temperature, chunk_tokens)


class _TokenLogprobs(torch.autograd.Function):
    """Keeps the logsumexp of each row and computes its logits a second time in the backward."""

    @staticmethod
    def forward(
        ctx: Any, hidden_TH: Tensor, weight_VH: Tensor, targets_T: Tensor, temperature: float, chunk_tokens: int
    ) -> tuple[Tensor, Tensor]:
        num_tokens = hidden_TH.shape[0]
        logprobs_T, entropy_T, normalizer_T = (hidden_TH.new_empty(num_tokens, dtype=torch.float32) for _ in range(3))
        for chunk in _chunks(num_tokens, chunk_tokens):
            logits_CV = _logits(hidden_TH[chunk], weight_VH, temperature)
            chosen_C = logits_CV.gather(1, targets_T[chunk, None])[:, 0]
            largest_C1 = logits_CV.amax(-1, keepdim=True)
            exps_CV = (logits_CV - largest_C1).exp_()
            total_C = exps_CV.sum(-1)
            normalizer_C = total_C.log().add_(largest_C1[:, 0])
            normalizer_T[chunk] = normalizer_C
            logprobs_T[chunk] = chosen_C - normalizer_C
            entropy_T[chunk] = normalizer_C - torch.linalg.vecdot(exps_CV, logits_CV) / total_C
        ctx.save_for_backward(hidden_TH, weight_VH, targets_T, normalizer_T, entropy_T)
        ctx.temperature, ctx.chunk_tokens = temperature, chunk_tokens
        ctx.set_materialize_grads(False)
        return logprobs_T, entropy_T

    @staticmethod
    def backward(
        ctx: Any, grad_logprobs_T: Tensor | None, grad_entropy_T: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        hidden_TH, weight_VH, targets_T, normalizer_T, entropy_T = ctx.saved_tensors
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        grad_hidden_TH = torch.empty_like(hidden_TH) if needs_hidden else None
        # float32 whatever the compute dtype: many chunks are added up in it.
        grad_weight_VH = torch.zeros_like(weight_VH, dtype=torch.float32) if needs_weight else None
        for chunk in _chunks(hidden_TH.shape[0], ctx.chunk_tokens):
            log_probs_CV = _logits(hidden_TH[chunk], weight_VH, ctx.temperature).sub_(normalizer_T[chunk, None])
            grad_logits_CV = _grad_logits(
                log_probs_CV,
                targets_T[chunk],
                None if grad_logprobs_T is None else grad_logprobs_T[chunk],
                None if grad_entropy_T is None else grad_entropy_T[chunk],
                entropy_T[chunk],
            )
            grad_logits_CV = grad_logits_CV.div_(ctx.temperature).to(hidden_TH.dtype)
            if grad_hidden_TH is not None:
                torch.mm(grad_logits_CV, weight_VH, out=grad_hidden_TH[chunk])
            if grad_weight_VH is not None:
                _add_product(grad_weight_VH, grad_logits_CV.t(), hidden_TH[chunk])
        if grad_weight_VH is not None:
            grad_weight_VH = grad_weight_VH.to(weight_VH.dtype)
        return grad_hidden_TH, grad_weight_VH, None, None, None


def _chunks(num_tokens: int, chunk_tokens: int) -> list[slice]:
    return [slice(start, min(start + chunk_tokens, num_tokens)) for start in range(0, num_tokens, chunk_tokens)]


def _logits(hidden_CH: Tensor, weight_VH: Tensor, temperature: float) -> Tensor:
    """[C, V] float32, divided by the temperature."""
    logits_CV = (hidden_CH @ weight_VH.t()).float()
    return logits_CV if temperature == 1.0 else logits_CV.div_(temperature)


def _grad_logits(
    log_probs_CV: Tensor,
    targets_C: Tensor,
    grad_logprobs_C: Tensor | None,
    grad_entropy_C: Tensor | None,
    entropy_C: Tensor,
) -> Tensor:
    """[C, V] gradient of the scaled logits; overwrites `log_probs_CV` when no entropy gradient is wanted."""
    if grad_entropy_C is None:
        grad_CV = log_probs_CV.exp_()
        if grad_logprobs_C is None:
            return grad_CV.zero_()
        grad_CV.mul_(-grad_logprobs_C[:, None])
    else:
        probs_CV = log_probs_CV.exp()
        grad_CV = log_probs_CV.add_(entropy_C[:, None]).mul_(probs_CV).mul_(-grad_entropy_C[:, None])
        if grad_logprobs_C is None:
            return grad_CV
        grad_CV.sub_(probs_CV.mul_(grad_logprobs_C[:, None]))
    return grad_CV.scatter_add_(1, targets_C[:, None], grad_logprobs_C[:, None])


def _add_product(total_VH: Tensor, left_VC: Tensor, right_CH: Tensor) -> None:
    """total += left @ right, accumulated in float32."""
    if right_CH.dtype == torch.float32:
        total_VH.addmm_(left_VC, right_CH)
    else:
        total_VH.add_(left_VC @ right_CH)
