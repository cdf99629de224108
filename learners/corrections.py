"""Corrections: what becomes of a policy gradient whose tokens another policy version sampled.

Invariant: on-policy (every ratio 1) each has the gradient of REINFORCE. Called by learners/losses.py; pure functions.

With r_t the importance ratio of trained token t and A_t the advantage of its Trajectory:

    clipped    -min(r_t A_t, clip(r_t, 1 - low, 1 + high) A_t)        PPO, arXiv 1707.06347 eq. 7; asymmetric (low !=
                                                                      high): DAPO, arXiv 2503.14476 eq. 10
               and at most -c A_t where A_t < 0                       dual clip, arXiv 1912.09729 eq. 5
    truncated  -stop_gradient(min(r_t, C)) A_t l_t                    truncated importance sampling, arXiv 1802.01561
    masked     -stop_gradient(r_t [low <= r_t <= high]) A_t l_t       IcePop, arXiv 2510.18855
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from learners.config import LossConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Corrected:
    """Token losses, and which tokens the correction touched. The three sets are disjoint."""

    loss_N: Tensor
    """[N] float32, differentiable."""
    is_low_N: Tensor
    """[N] bool: bounded or left out because the ratio is small."""
    is_high_N: Tensor
    """[N] bool: bounded, truncated or left out because the ratio is large."""
    is_dual_N: Tensor
    """[N] bool: bounded by the dual clip."""


def clipped(config: LossConfig, ratio_N: Tensor, advantages_N: Tensor) -> Corrected:
    """PPO's bound; `ratio_N` carries the gradient."""
    bounded_N = ratio_N.clamp(1 - config.clip_low, 1 + config.clip_high)
    objective_N = torch.minimum(ratio_N * advantages_N, bounded_N * advantages_N)
    is_dual_N = torch.zeros_like(ratio_N, dtype=torch.bool)
    if config.dual_clip is not None:
        floor_N = config.dual_clip * advantages_N
        is_dual_N = (advantages_N < 0) & (objective_N < floor_N).detach()
        objective_N = torch.where(is_dual_N, floor_N, objective_N)
    return Corrected(
        loss_N=-objective_N,
        is_low_N=(ratio_N.detach() < 1 - config.clip_low) & (advantages_N < 0),
        is_high_N=(ratio_N.detach() > 1 + config.clip_high) & (advantages_N > 0),
        is_dual_N=is_dual_N,
    )


def truncated(config: LossConfig, ratio_N: Tensor, advantages_N: Tensor, logprobs_N: Tensor) -> Corrected:
    """REINFORCE weighted by the ratio, at most `truncation`."""
    ratio_N = ratio_N.detach()
    none_N = torch.zeros_like(ratio_N, dtype=torch.bool)
    return Corrected(
        loss_N=-ratio_N.clamp(max=config.truncation) * advantages_N * logprobs_N,
        is_low_N=none_N,
        is_high_N=ratio_N > config.truncation,
        is_dual_N=none_N,
    )


def masked(config: LossConfig, ratio_N: Tensor, advantages_N: Tensor, logprobs_N: Tensor) -> Corrected:
    """REINFORCE weighted by the ratio where it lies in [mask_low, mask_high], nothing elsewhere."""
    ratio_N = ratio_N.detach()
    is_low_N, is_high_N = ratio_N < config.mask_low, ratio_N > config.mask_high
    weight_N = ratio_N.masked_fill(is_low_N | is_high_N, 0.0)
    return Corrected(
        loss_N=-weight_N * advantages_N * logprobs_N,
        is_low_N=is_low_N,
        is_high_N=is_high_N,
        is_dual_N=torch.zeros_like(is_low_N),
    )
