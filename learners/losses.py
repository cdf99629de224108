"""Losses: pure functions from log-probabilities and advantages to one loss per token.

Invariant: a loss is summed with weights that the plan fixed for the whole optimizer step (learners/plan.py), so
splitting a step over micro-batches and ranks changes nothing.
Called by learners/learner.py; constants in LossConfig; learners/loss_metrics.py reads the results.

With l_t the learner's log-probability of trained token t, b_t the recorded one, q_t the reference's and A_t the
advantage of its Trajectory:

    CROSS_ENTROPY  -l_t                                        each reference response's likelihood
    REINFORCE      -A_t l_t                                    Williams 1992; arXiv 2402.14740 eq. 6
    CLIPPED, TRUNCATED, MASKED                                 learners/corrections.py, with the ratio
        r_t = exp(l_t - b_t)                                   at token level
        r_t = exp(sum of l - b over the Sample of t)           at sequence level, its gradient r_t times l_t's:
                                                               GSPO-token, arXiv 2507.18071 section 4.3, unnormalised
    + kl_coef * KL(l_t, q_t)                                   learners/kl.py
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from learners import corrections
from learners.config import LossConfig, LossKind, RatioLevel
from learners.corrections import Corrected
from learners.kl import LOG_RATIO_LIMIT, kl_penalty


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLoss:
    """One loss per trained token, and what is known of the tokens."""

    loss_N: Tensor
    """[N] float32, differentiable; the penalty included."""
    ratio_N: Tensor | None = None
    """[N] float32 importance ratios, detached; None for cross-entropy."""
    corrected: Corrected | None = None
    """Which tokens the correction touched; None where nothing corrects."""
    reference_kl_N: Tensor | None = None
    """[N] float32 divergence from the reference, detached; None without one."""

    @property
    def clipped_N(self) -> Tensor | None:
        """[N] bool: tokens whose gradient the correction changed; None where nothing corrects."""
        if self.corrected is None:
            return None
        return self.corrected.is_low_N | self.corrected.is_high_N | self.corrected.is_dual_N


def token_loss(
    config: LossConfig,
    logprobs_N: Tensor,
    behaviour_N: Tensor,
    advantages_N: Tensor,
    *,
    members_N: Tensor | None = None,
    reference_N: Tensor | None = None,
) -> TokenLoss:
    """The loss of each trained token; tensors [N] float32, only `logprobs_N` with gradient.

    `members_N` [N] int64 says which Sample of the micro-batch each token belongs to, needed at sequence level;
    `reference_N` holds the reference's log-probabilities, needed with kl_coef. ValueError when a loss lacks what it
    needs: recorded log-probabilities that are not finite (NaN marks one never recorded), members or a reference.
    """
    loss = _policy_loss(config, logprobs_N, behaviour_N, advantages_N, members_N)
    if not config.kl_coef:
        return loss
    if reference_N is None:
        raise ValueError(
            f"kl_coef={config.kl_coef:g} needs a reference policy; give the Learner one by learner.reference"
        )
    penalty_N = kl_penalty(config.kl_estimator, logprobs_N, reference_N)
    return TokenLoss(
        loss_N=loss.loss_N + config.kl_coef * penalty_N,
        ratio_N=loss.ratio_N,
        corrected=loss.corrected,
        reference_kl_N=penalty_N.detach(),
    )


def _policy_loss(
    config: LossConfig, logprobs_N: Tensor, behaviour_N: Tensor, advantages_N: Tensor, members_N: Tensor | None
) -> TokenLoss:
    if config.kind is LossKind.CROSS_ENTROPY:
        return TokenLoss(loss_N=-logprobs_N)
    _require_recorded(config.kind, behaviour_N)
    ratio_N = _log_ratio(config, logprobs_N - behaviour_N, members_N).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    match config.kind:
        case LossKind.REINFORCE:
            return TokenLoss(loss_N=-advantages_N * logprobs_N, ratio_N=ratio_N.detach())
        case LossKind.CLIPPED:
            corrected = corrections.clipped(config, ratio_N, advantages_N)
        case LossKind.TRUNCATED:
            corrected = corrections.truncated(config, ratio_N, advantages_N, logprobs_N)
        case LossKind.MASKED:
            corrected = corrections.masked(config, ratio_N, advantages_N, logprobs_N)
    return TokenLoss(loss_N=corrected.loss_N, ratio_N=ratio_N.detach(), corrected=corrected)


def _log_ratio(config: LossConfig, log_ratio_N: Tensor, members_N: Tensor | None) -> Tensor:
    """[N]: each token's own, or the value of its whole Sample's with the gradient of its own."""
    if config.ratio_level is RatioLevel.TOKEN:
        return log_ratio_N
    if members_N is None:
        raise ValueError("ratio_level sequence needs to know which Sample each token belongs to; pass members_N")
    num_samples = int(members_N.max()) + 1 if members_N.numel() else 0
    own_N = log_ratio_N.detach()
    sums_N = own_N.new_zeros(num_samples).index_add(0, members_N, own_N)[members_N]
    return sums_N + (log_ratio_N - own_N)


def _require_recorded(kind: LossKind, behaviour_N: Tensor) -> None:
    if not bool(torch.isfinite(behaviour_N).all()):
        num_missing = int((~torch.isfinite(behaviour_N)).sum())
        raise ValueError(
            f"loss {kind} needs the recorded log-probability of every trained token, and {num_missing} of "
            f"{behaviour_N.numel()} are not finite; train Samples without log-probabilities with cross_entropy"
        )
