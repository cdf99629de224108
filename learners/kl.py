"""The divergence from a frozen reference policy, estimated at each token that was sampled.

Invariant: 0 with gradient 0 where the two policies agree. Called by learners/losses.py; pure functions.

With d = l - q, the log-probability of the sampled token under the learner minus that under the reference (Schulman,
"Approximating KL divergence", 2020):

    K1  d                   unbiased, of either sign
    K2  d^2 / 2             biased, small variance
    K3  exp(-d) - 1 + d     unbiased, never negative

The gradients are d, d and 1 - exp(-d) times that of l. K1's own derivative would be that of l alone, whose mean is 0:
it would push nowhere. It therefore takes the score-function gradient of its mean, d times that of l, which is also
K2's (docs/decisions/037-gradient-of-the-k1-penalty.md).
"""

import torch
from torch import Tensor

from learners.config import KlEstimator

LOG_RATIO_LIMIT = 20.0
"""Differences of log-probabilities are clamped here before exp: no float32 overflow, no 0 * inf in a gradient."""


def kl_penalty(estimator: KlEstimator, logprobs_N: Tensor, reference_N: Tensor) -> Tensor:
    """[N] float32 estimates, differentiable in `logprobs_N`; d = log 2 -> 0.6931 (K1), 0.2402 (K2), 0.1931 (K3).

    ValueError when a log-probability of the reference is not finite.
    """
    if not bool(torch.isfinite(reference_N).all()):
        num_bad = int((~torch.isfinite(reference_N)).sum())
        raise ValueError(
            f"{num_bad} of {reference_N.numel()} log-probabilities of the reference are not finite; give "
            "learner.reference a model whose weights are"
        )
    difference_N = (logprobs_N - reference_N).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    match estimator:
        case KlEstimator.K1:
            constant_N = difference_N.detach()
            return constant_N + constant_N * (logprobs_N - logprobs_N.detach())
        case KlEstimator.K2:
            return 0.5 * difference_N.square()
        case KlEstimator.K3:
            return torch.exp(-difference_N) - 1 + difference_N
