"""Losses and their metrics against numbers computed by hand."""

import math

import pytest
import torch

from learners.config import LossConfig, LossKind
from learners.losses import TokenLoss, metric_sums, metrics_from_sums, token_loss


def loss_and_gradient(
    kind: LossKind, logprobs: list[float], behaviour: list[float], advantages: list[float]
) -> tuple[TokenLoss, list[float]]:
    logprobs_N = torch.tensor(logprobs, requires_grad=True)
    result = token_loss(LossConfig(kind=kind), logprobs_N, torch.tensor(behaviour), torch.tensor(advantages))
    result.loss_N.sum().backward()
    assert logprobs_N.grad is not None
    return result, logprobs_N.grad.tolist()


def test_cross_entropy_is_the_negative_logprob_and_needs_nothing_recorded() -> None:
    result, gradient = loss_and_gradient(LossKind.CROSS_ENTROPY, [-0.5, -2.0], [math.nan] * 2, [1.0, 1.0])
    assert result.loss_N.tolist() == [0.5, 2.0]
    assert gradient == [-1.0, -1.0]


def test_reinforce_weighs_logprobs_by_the_advantage() -> None:
    result, gradient = loss_and_gradient(LossKind.REINFORCE, [-1.0, -3.0], [-1.0, -3.0], [1.0, -0.5])
    assert result.loss_N.tolist() == [1.0, -1.5]
    assert gradient == [-1.0, 0.5]


# (ratio, advantage) -> (loss, d loss / d logprob); with clip 0.2 / 0.2 and dual clip 3. d ratio / d logprob = ratio.
CLIPPED_CASES = [
    (1.0, 2.0, -2.0, -2.0),  # on-policy: the plain policy gradient
    (1.1, 1.0, -1.1, -1.1),  # inside the range
    (1.5, 1.0, -1.2, 0.0),  # gone up enough: bounded, no gradient
    (0.5, 1.0, -0.5, -0.5),  # gone down although good: full gradient
    (0.5, -1.0, 0.8, 0.0),  # gone down enough: bounded, no gradient
    (1.5, -1.0, 1.5, 1.5),  # gone up although bad: full gradient
    (5.0, -1.0, 3.0, 0.0),  # ... up to the dual clip
]


@pytest.mark.parametrize(("ratio", "advantage", "loss", "gradient"), CLIPPED_CASES)
def test_clipped_loss(ratio: float, advantage: float, loss: float, gradient: float) -> None:
    result, gradients = loss_and_gradient(LossKind.CLIPPED, [-1.0 + math.log(ratio)], [-1.0], [advantage])
    assert result.loss_N.tolist() == pytest.approx([loss], rel=1e-5)
    assert gradients == pytest.approx([gradient], rel=1e-5, abs=1e-7)
    assert result.clipped_N is not None
    assert result.clipped_N.tolist() == [gradient == 0.0]


def test_truncated_importance_weights_stop_at_two_and_carry_no_gradient() -> None:
    logprobs, ratios = [-1.0, -2.0], [1.5, 4.0]
    behaviour = [logprob - math.log(ratio) for logprob, ratio in zip(logprobs, ratios, strict=True)]
    result, gradient = loss_and_gradient(LossKind.TRUNCATED, logprobs, behaviour, [1.0, 1.0])
    assert result.loss_N.tolist() == pytest.approx([1.5, 4.0])  # min(1.5, 2) * 1, min(4, 2) * 2
    assert gradient == pytest.approx([-1.5, -2.0])


def test_on_policy_all_corrections_have_the_gradient_of_reinforce() -> None:
    logprobs, advantages = [-0.3, -1.7, -4.0], [1.0, -0.5, 0.25]
    expected = loss_and_gradient(LossKind.REINFORCE, logprobs, logprobs, advantages)[1]
    for kind in (LossKind.CLIPPED, LossKind.TRUNCATED):
        assert loss_and_gradient(kind, logprobs, logprobs, advantages)[1] == pytest.approx(expected)


@pytest.mark.parametrize("kind", [LossKind.REINFORCE, LossKind.CLIPPED, LossKind.TRUNCATED])
def test_a_loss_without_its_recorded_logprobs_is_refused(kind: LossKind) -> None:
    with pytest.raises(ValueError, match="recorded log-probability of every trained token, and 1 of 2"):
        token_loss(LossConfig(kind=kind), torch.zeros(2), torch.tensor([0.0, math.nan]), torch.ones(2))


def test_an_absurd_ratio_gives_finite_gradients() -> None:
    for advantage in (1.0, -1.0):
        _, gradient = loss_and_gradient(LossKind.CLIPPED, [0.0], [-200.0], [advantage])
        assert gradient == [0.0]


def test_metrics_of_two_tokens_by_hand() -> None:
    config = LossConfig(kind=LossKind.CLIPPED)
    logprobs_N = torch.tensor([-1.0, -1.0])
    behaviour_N = torch.tensor([-1.0, -1.0 - math.log(2.0)])  # ratios 1 and 2
    result = token_loss(config, logprobs_N, behaviour_N, torch.ones(2))
    sums = metric_sums(result, torch.full((2,), 0.25), logprobs_N, behaviour_N, torch.tensor([0.5, 1.5]))
    metrics = metrics_from_sums(config.kind, sums, 2.0)
    assert metrics == pytest.approx(
        {
            "train/num_tokens": 2.0,
            "train/loss": -0.25 * (1.0 + 1.2),
            "train/entropy": 1.0,
            "train/logprob_gap_mean": math.log(2.0) / 2,
            "train/ratio_mean": 1.5,
            "train/ratio_max": 2.0,
            "train/kl": (2 - 1 - math.log(2.0)) / 2,
            "train/ess": 9 / (2 * 5),
            "train/clip_fraction": 0.5,
        }
    )


def test_metrics_of_no_tokens_are_finite() -> None:
    empty = torch.zeros(0)
    result = token_loss(LossConfig(), empty, empty, empty)
    metrics = metrics_from_sums(LossKind.CLIPPED, metric_sums(result, empty, empty, empty, empty), 0.0)
    assert metrics == {"train/num_tokens": 0.0, "train/loss": 0.0}
