"""Losses: pure functions from log-probabilities and advantages to one loss per token, and their metrics.

Invariant: a loss is summed with weights that the plan fixed for the whole optimizer step (1 / trained tokens of the
step for the token mean), so splitting a step over micro-batches and ranks changes nothing.
Called by learners/learner.py; constants in LossConfig.

With l_t the learner's log-probability of trained token t, b_t the recorded one, A_t the advantage of its Trajectory
and r_t = exp(l_t - b_t):

    CROSS_ENTROPY  -l_t                                                       each reference response's likelihood
    REINFORCE      -A_t l_t                                                   Williams 1992; arXiv 2402.14740 eq. 6
    CLIPPED        -min(r_t A_t, clip(r_t, 1 - low, 1 + high) A_t)            PPO, arXiv 1707.06347 eq. 7
                   and at most -c A_t where A_t < 0                           dual clip, arXiv 1912.09729 eq. 5
    TRUNCATED      -stop_gradient(min(r_t, C)) A_t l_t                        truncated importance sampling
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from learners.config import LossConfig, LossKind

LOG_RATIO_LIMIT = 20.0
"""|l_t - b_t| is clamped here before exp: no float32 overflow, and no 0 * inf in the gradient of a clipped token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLoss:
    """One loss per trained token, and what is known of the tokens."""

    loss_N: Tensor
    """[N] float32, differentiable."""
    ratio_N: Tensor | None
    """[N] float32 importance ratios, detached; None for cross-entropy."""
    clipped_N: Tensor | None
    """[N] bool: tokens whose gradient clipping or truncation changed; None where nothing can clip."""


def token_loss(config: LossConfig, logprobs_N: Tensor, behaviour_N: Tensor, advantages_N: Tensor) -> TokenLoss:
    """The loss of each trained token; all arguments [N] float32, `behaviour_N` and `advantages_N` without gradient.

    ValueError when the loss needs recorded log-probabilities and one is not finite (NaN marks one never recorded).
    """
    if config.kind is LossKind.CROSS_ENTROPY:
        return TokenLoss(loss_N=-logprobs_N, ratio_N=None, clipped_N=None)
    _require_recorded(config.kind, behaviour_N)
    log_ratio_N = (logprobs_N - behaviour_N).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    match config.kind:
        case LossKind.REINFORCE:
            return TokenLoss(loss_N=-advantages_N * logprobs_N, ratio_N=log_ratio_N.detach().exp(), clipped_N=None)
        case LossKind.CLIPPED:
            return _clipped(config, log_ratio_N.exp(), advantages_N)
        case LossKind.TRUNCATED:
            ratio_N = log_ratio_N.detach().exp()
            weight_N = ratio_N.clamp(max=config.truncation)
            return TokenLoss(
                loss_N=-weight_N * advantages_N * logprobs_N, ratio_N=ratio_N, clipped_N=ratio_N > config.truncation
            )


def _clipped(config: LossConfig, ratio_N: Tensor, advantages_N: Tensor) -> TokenLoss:
    plain_N = ratio_N * advantages_N
    bounded_N = ratio_N.clamp(1 - config.clip_low, 1 + config.clip_high) * advantages_N
    objective_N = torch.minimum(plain_N, bounded_N)
    floor_N = config.dual_clip * advantages_N
    is_floored_N = (advantages_N < 0) & (objective_N < floor_N)
    objective_N = torch.where(is_floored_N, floor_N, objective_N)
    return TokenLoss(
        loss_N=-objective_N,
        ratio_N=ratio_N.detach(),
        clipped_N=((bounded_N < plain_N) | is_floored_N).detach(),
    )


def _require_recorded(kind: LossKind, behaviour_N: Tensor) -> None:
    if not bool(torch.isfinite(behaviour_N).all()):
        num_missing = int((~torch.isfinite(behaviour_N)).sum())
        raise ValueError(
            f"loss {kind} needs the recorded log-probability of every trained token, and {num_missing} of "
            f"{behaviour_N.numel()} are not finite; train Samples without log-probabilities with cross_entropy"
        )


SUMMED = ("num_tokens", "loss", "entropy", "gap", "ratio", "ratio_squared", "clipped", "kl")
"""What `metric_sums` adds up, in order."""


def metric_sums(
    loss: TokenLoss, weights_N: Tensor, logprobs_N: Tensor, behaviour_N: Tensor, entropy_N: Tensor
) -> Tensor:
    """[len(SUMMED)] float64 sums over these tokens, to be added over micro-batches and ranks."""
    zero = torch.zeros((), dtype=torch.float64)
    sums = {
        "num_tokens": torch.tensor(float(logprobs_N.numel()), dtype=torch.float64),
        "loss": (loss.loss_N.detach().double() * weights_N).sum(),
        "entropy": entropy_N.detach().double().sum(),
    }
    if loss.ratio_N is not None:
        log_ratio_N = (logprobs_N.detach() - behaviour_N).double()
        ratio_N = loss.ratio_N.double()
        sums["gap"] = log_ratio_N.abs().sum()
        sums["ratio"] = ratio_N.sum()
        sums["ratio_squared"] = ratio_N.square().sum()
        sums["kl"] = (ratio_N - 1 - log_ratio_N.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)).sum()
    if loss.clipped_N is not None:
        sums["clipped"] = loss.clipped_N.double().sum()
    return torch.stack([sums.get(name, zero).to("cpu") for name in SUMMED])


def metrics_from_sums(kind: LossKind, sums: Tensor, largest_ratio: float) -> dict[str, float]:
    """Flat metrics of a whole step from the sums over all its tokens.

    train/loss is the aggregated loss; train/ess is (sum r)^2 / (n sum r^2), 1 when every token is on-policy; train/kl
    estimates KL(behaviour | learner) by r - 1 - log r.
    """
    totals = dict(zip(SUMMED, sums.tolist(), strict=True))
    num_tokens = totals["num_tokens"]
    metrics = {"train/num_tokens": num_tokens, "train/loss": totals["loss"]}
    if not num_tokens:
        return metrics
    metrics["train/entropy"] = totals["entropy"] / num_tokens
    if kind is LossKind.CROSS_ENTROPY:
        return metrics
    metrics |= {
        "train/logprob_gap_mean": totals["gap"] / num_tokens,
        "train/ratio_mean": totals["ratio"] / num_tokens,
        "train/ratio_max": largest_ratio,
        "train/kl": totals["kl"] / num_tokens,
        "train/ess": totals["ratio"] ** 2 / (num_tokens * totals["ratio_squared"]),
    }
    if kind is not LossKind.REINFORCE:
        metrics["train/clip_fraction"] = totals["clipped"] / num_tokens
    return metrics
