"""Metrics of a loss: sums over tokens that add up over micro-batches and ranks, and means made of them.

Invariant: every metric of a step is a function of sums over all its computed tokens, so it does not depend on how the
step was split. Called by learners/learner.py.
"""

import torch
from torch import Tensor

from learners.config import LossConfig, LossKind
from learners.kl import LOG_RATIO_LIMIT
from learners.losses import TokenLoss

SUMMED = (
    "num_tokens",
    "loss",
    "entropy",
    "gap",
    "ratio",
    "ratio_squared",
    "kl",
    "low",
    "high",
    "dual",
    "reference_kl",
)
"""What `metric_sums` adds up, in order."""


def metric_sums(
    loss: TokenLoss, weights_N: Tensor, logprobs_N: Tensor, behaviour_N: Tensor, entropy_N: Tensor
) -> Tensor:
    """[len(SUMMED)] float64 sums over these tokens."""
    zero = torch.zeros((), dtype=torch.float64)
    sums = {
        "num_tokens": torch.tensor(float(logprobs_N.numel()), dtype=torch.float64),
        "loss": (loss.loss_N.detach().double() * weights_N).sum(),
        "entropy": entropy_N.detach().double().sum(),
    }
    if loss.ratio_N is not None:
        log_ratio_N = (logprobs_N.detach() - behaviour_N).double()
        bounded_N = log_ratio_N.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        ratio_N = loss.ratio_N.double()
        sums["gap"] = log_ratio_N.abs().sum()
        sums["ratio"] = ratio_N.sum()
        sums["ratio_squared"] = ratio_N.square().sum()
        sums["kl"] = (bounded_N.exp() - 1 - bounded_N).sum()
    if loss.corrected is not None:
        sums["low"] = loss.corrected.is_low_N.double().sum()
        sums["high"] = loss.corrected.is_high_N.double().sum()
        sums["dual"] = loss.corrected.is_dual_N.double().sum()
    if loss.reference_kl_N is not None:
        sums["reference_kl"] = loss.reference_kl_N.double().sum()
    return torch.stack([sums.get(name, zero).to("cpu") for name in SUMMED])


def metrics_from_sums(config: LossConfig, sums: Tensor, largest_ratio: float) -> dict[str, float]:
    """Flat metrics of a whole step from the sums over all its tokens.

    train/loss is the aggregated loss; train/ess is (sum r)^2 / (n sum r^2), 1 when every token is on-policy; train/kl
    estimates KL(behaviour | learner) by r - 1 - log r at token level; train/clip_fraction is the share of tokens that
    the correction touched, then split by why.
    """
    totals = dict(zip(SUMMED, sums.tolist(), strict=True))
    num_tokens = totals["num_tokens"]
    metrics = {"train/num_tokens": num_tokens, "train/loss": totals["loss"]}
    if not num_tokens:
        return metrics
    metrics["train/entropy"] = totals["entropy"] / num_tokens
    if config.kl_coef:
        metrics["train/reference_kl"] = totals["reference_kl"] / num_tokens
    if config.kind is LossKind.CROSS_ENTROPY:
        return metrics
    metrics |= {
        "train/logprob_gap_mean": totals["gap"] / num_tokens,
        "train/ratio_mean": totals["ratio"] / num_tokens,
        "train/ratio_max": largest_ratio,
        "train/kl": totals["kl"] / num_tokens,
        "train/ess": totals["ratio"] ** 2 / (num_tokens * totals["ratio_squared"]),
    }
    if config.kind is LossKind.REINFORCE:
        return metrics
    return metrics | {
        "train/clip_fraction": (totals["low"] + totals["high"] + totals["dual"]) / num_tokens,
        "train/clip_fraction_low": totals["low"] / num_tokens,
        "train/clip_fraction_high": totals["high"] / num_tokens,
        "train/clip_fraction_dual": totals["dual"] / num_tokens,
    }
