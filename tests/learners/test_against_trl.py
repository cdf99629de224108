"""Losses against those of TRL 1.16, called on the same numbers; slow for its import alone (some 10 s).

TRL's `_compute_loss` of RLOOTrainer and GRPOTrainer is called as it is, with a stand-in for the trainer that hands it
log-probabilities instead of a model's. TRL computes advantages inside the method that also generates; their formula is
written out here in torch instead.
"""

import math
from collections import defaultdict
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from learners.advantages import group_mean, group_mean_over_batch_std, group_mean_over_std
from learners.config import Aggregation, KlEstimator, LossConfig, LossKind, RatioLevel
from learners.losses import token_loss
from learners.plan import SizedSample, plan_samples
from trajectories.handle import Location

pytestmark = pytest.mark.slow

LENGTHS = [5, 2, 7, 3]
WIDTH = max(LENGTHS)
ADVANTAGES = torch.tensor([1.0, -0.5, 0.25, -1.0])
MASK_BT = torch.tensor([[t < length for t in range(WIDTH)] for length in LENGTHS])


def numbers(spread: float) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities [B, T] of learner, behaviour and reference, whose ratios leave every range."""
    generator = torch.Generator().manual_seed(0)
    learner, first, second = (torch.randn(len(LENGTHS), WIDTH, generator=generator) for _ in range(3))
    return learner - 4, learner - 4 + spread * first, learner - 4 + 0.3 * second


def theirs(trainer: str, spread: float, **options: Any) -> tuple[float, Tensor]:
    """TRL's loss and its gradient by the learner's log-probabilities, [B, T]."""
    import trl

    logps, old, reference = numbers(spread)
    logps = logps.requires_grad_()
    same = SimpleNamespace(
        reduce=lambda value, **_: value,
        gather=lambda value: value,
        gather_for_metrics=lambda value: value,
        num_processes=1,
    )
    stand_in = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (logps, torch.zeros_like(logps), None),
        _metrics=defaultdict(lambda: defaultdict(list)),
        accelerator=same,
        model=SimpleNamespace(training=True),
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        use_vllm=False,
        current_gradient_accumulation_steps=1,
        _entropy_bonus_enabled=False,
        **{"importance_sampling_level": "token", "beta": 0.0, "epsilon_low": 0.2, "epsilon_high": 0.2} | options,
    )
    stand_in.args = SimpleNamespace(delta=options.get("delta"), use_bias_correction_kl=False, steps_per_generation=1)
    ids = torch.zeros(len(LENGTHS), WIDTH, dtype=torch.long)
    inputs = {
        "prompt_ids": ids[:, :1],
        "prompt_mask": ids[:, :1] + 1,
        "completion_ids": ids,
        "completion_mask": MASK_BT.float(),
        "advantages": ADVANTAGES,
        "old_logps": (old * MASK_BT).sum(1),
        "old_per_token_logps": old,
        "ref_per_token_logps": reference,
        "num_items_in_batch": MASK_BT.sum(),
    }
    loss = getattr(trl, trainer)._compute_loss(stand_in, None, inputs)
    loss.backward()
    assert logps.grad is not None
    return loss.item(), logps.grad


def ours(config: LossConfig, spread: float) -> tuple[float, Tensor]:
    logps, old, reference = numbers(spread)
    logps = logps.requires_grad_()
    samples = [
        SizedSample(location=Location(segment="a", offset=0, length=1), num_tokens=length + 1, num_trained=length)
        for length in LENGTHS
    ]
    plan = plan_samples(samples, aggregation=config.aggregation, num_ranks=1, max_tokens=100)
    refs = [ref for batch in plan.ranks[0].micro_batches for ref in batch]
    weights = torch.tensor([ref.weight for ref in sorted(refs, key=lambda ref: ref.index)])
    members_N = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    result = token_loss(
        config,
        logps[MASK_BT],
        old[MASK_BT],
        ADVANTAGES[members_N],
        members_N=members_N,
        reference_N=reference[MASK_BT],
    )
    loss = torch.dot(result.loss_N, weights[members_N])
    loss.backward()
    assert logps.grad is not None
    return loss.item(), logps.grad


CASES: dict[str, tuple[str, float, dict[str, Any], LossConfig]] = {
    "asymmetric dual clip, token mean": (
        "GRPOTrainer",
        0.8,
        {"loss_type": "bnpo", "epsilon_low": 0.1, "epsilon_high": 0.28, "delta": 2.0},
        LossConfig(clip_low=0.1, clip_high=0.28, dual_clip=2.0),
    ),
    "clip with a k3 penalty, sequence mean": (
        "GRPOTrainer",
        0.3,
        {"loss_type": "grpo", "beta": 0.1},
        LossConfig(aggregation=Aggregation.SEQUENCE_MEAN, dual_clip=None, kl_coef=0.1, kl_estimator=KlEstimator.K3),
    ),
    "clip, mean of sums": (
        "GRPOTrainer",
        0.3,
        {"loss_type": "luspo"},
        LossConfig(aggregation=Aggregation.SEQUENCE_MEAN_TOKEN_SUM, dual_clip=None),
    ),
    "truncated ratios as in CISPO": (
        "GRPOTrainer",
        0.8,
        {"loss_type": "cispo", "epsilon_high": 1.5},
        LossConfig(kind=LossKind.TRUNCATED, truncation=1.5),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradient_equal_those_of_trl(case: str) -> None:
    trainer, spread, options, config = CASES[case]
    their_loss, their_gradient = theirs(trainer, spread, **options)
    our_loss, our_gradient = ours(config, spread)
    assert our_loss == pytest.approx(their_loss, rel=1e-5)
    torch.testing.assert_close(our_gradient, their_gradient * MASK_BT, rtol=1e-5, atol=1e-7)
    assert 0 < int((their_gradient[MASK_BT] != 0).sum()) <= sum(LENGTHS)


def test_clipped_sequence_ratios_equal_those_of_trls_rloo() -> None:
    """TRL has one loss a sequence; here each of its tokens has it, with the gradient of its own log-probability."""
    config = LossConfig(
        ratio_level=RatioLevel.SEQUENCE, aggregation=Aggregation.SEQUENCE_MEAN_TOKEN_SUM, dual_clip=None
    )
    their_loss, their_gradient = theirs("RLOOTrainer", -0.8)
    _, our_gradient = ours(config, -0.8)
    torch.testing.assert_close(our_gradient, their_gradient * MASK_BT, rtol=1e-5, atol=1e-7)
    our_loss, _ = ours(replace(config, aggregation=Aggregation.SEQUENCE_MEAN), -0.8)
    assert our_loss == pytest.approx(their_loss, abs=1e-5)
    num_moved = int((their_gradient[MASK_BT] != 0).sum())
    assert 0 < num_moved < sum(LENGTHS)  # clipped sequences do not move


def test_advantages_equal_the_formulas_of_trl() -> None:
    # GRPOTrainer: (r - nanmean of the group) / (nanstd + 1e-4), nanstd over n - 1; scale_rewards none, group or batch.
    groups = [[1.0, 0.0, None, 0.0], [0.5, 1.0, 1.0, 1.0]]
    rewards = torch.tensor([[math.nan if r is None else r for r in rewards] for rewards in groups])
    centred = rewards - rewards.nanmean(1, keepdim=True)

    def std(values: Tensor) -> Tensor:
        return values[~values.isnan()].std()

    group_stds = torch.stack([std(row) for row in rewards])[:, None]
    by_name = {
        "none": ([group_mean(rewards) for rewards in groups], centred),
        "group": ([group_mean_over_std(rewards) for rewards in groups], centred / (group_stds + 1e-4)),
        # REINFORCE++-baseline normalises what is centred, TRL's "batch" divides by the std of the rewards themselves.
        "batch": (group_mean_over_batch_std(groups), centred / (std(centred) + 1e-4)),
    }
    for name, (values, expected) in by_name.items():
        flat = [math.nan if value is None else value for row in values for value in row]
        torch.testing.assert_close(torch.tensor(flat), expected.flatten(), equal_nan=True, msg=name)
