"""Losses and their metrics against numbers computed by hand."""

import math

import pytest
import torch

from learners.config import KlEstimator, LossConfig, LossKind, RatioLevel
from learners.loss_metrics import metric_sums, metrics_from_sums
from learners.losses import TokenLoss, token_loss


def loss_and_gradient(
    config: LossConfig | LossKind,
    logprobs: list[float],
    behaviour: list[float],
    advantages: list[float],
    *,
    members: list[int] | None = None,
    reference: list[float] | None = None,
) -> tuple[TokenLoss, list[float]]:
    logprobs_N = torch.tensor(logprobs, requires_grad=True)
    result = token_loss(
        LossConfig(kind=config) if isinstance(config, LossKind) else config,
        logprobs_N,
        torch.tensor(behaviour),
        torch.tensor(advantages),
        members_N=None if members is None else torch.tensor(members),
        reference_N=None if reference is None else torch.tensor(reference),
    )
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
    for kind in (LossKind.CLIPPED, LossKind.TRUNCATED, LossKind.MASKED):
        assert loss_and_gradient(kind, logprobs, logprobs, advantages)[1] == pytest.approx(expected)


@pytest.mark.parametrize("kind", [LossKind.REINFORCE, LossKind.CLIPPED, LossKind.TRUNCATED, LossKind.MASKED])
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
    metrics = metrics_from_sums(config, sums, 2.0)
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
            "train/clip_fraction_low": 0.0,
            "train/clip_fraction_high": 0.5,
            "train/clip_fraction_dual": 0.0,
        }
    )


def test_metrics_of_no_tokens_are_finite() -> None:
    empty = torch.zeros(0)
    result = token_loss(LossConfig(), empty, empty, empty)
    metrics = metrics_from_sums(LossConfig(), metric_sums(result, empty, empty, empty, empty), 0.0)
    assert metrics == {"train/num_tokens": 0.0, "train/loss": 0.0}


def behaviours(logprobs: list[float], ratios: list[float]) -> list[float]:
    return [logprob - math.log(ratio) for logprob, ratio in zip(logprobs, ratios, strict=True)]


def test_an_asymmetric_clip_leaves_more_room_upwards() -> None:
    config = LossConfig(clip_low=0.1, clip_high=0.6)
    for ratio, advantage, gradient in ((1.5, 1.0, -1.5), (1.7, 1.0, 0.0), (0.85, -1.0, 0.0), (0.95, -1.0, 0.95)):
        result, gradients = loss_and_gradient(config, [-1.0], behaviours([-1.0], [ratio]), [advantage])
        assert gradients == pytest.approx([gradient], rel=1e-5)
        assert result.clipped_N is not None and result.clipped_N.tolist() == [gradient == 0.0]


def test_without_a_dual_clip_a_bad_token_pushes_however_likely_it_has_become() -> None:
    result, gradients = loss_and_gradient(LossConfig(dual_clip=None), [-1.0], behaviours([-1.0], [5.0]), [-1.0])
    assert result.loss_N.tolist() == pytest.approx([5.0], rel=1e-5)
    assert gradients == pytest.approx([5.0], rel=1e-5)


def test_clip_fractions_tell_why_a_token_was_bounded() -> None:
    logprobs = [-1.0] * 4
    ratios, advantages = [0.5, 1.5, 5.0, 1.0], [-1.0, 1.0, -1.0, 1.0]
    result, _ = loss_and_gradient(LossKind.CLIPPED, logprobs, behaviours(logprobs, ratios), advantages)
    assert result.corrected is not None
    assert result.corrected.is_low_N.tolist() == [True, False, False, False]
    assert result.corrected.is_high_N.tolist() == [False, True, False, False]
    assert result.corrected.is_dual_N.tolist() == [False, False, True, False]


def test_masking_leaves_out_tokens_outside_the_range_and_weighs_the_others() -> None:
    logprobs, ratios = [-1.0, -2.0, -3.0], [0.4, 1.5, 6.0]
    result, gradient = loss_and_gradient(LossKind.MASKED, logprobs, behaviours(logprobs, ratios), [1.0, 1.0, -1.0])
    assert result.loss_N.tolist() == pytest.approx([0.0, 3.0, 0.0])
    assert gradient == pytest.approx([0.0, -1.5, 0.0])
    assert result.clipped_N is not None and result.clipped_N.tolist() == [True, False, True]


def test_a_sequence_ratio_is_the_product_over_the_tokens_of_a_sample() -> None:
    # Sample 0 has tokens 0 and 2: ratio 1.5 * 1.2 = 1.8; sample 1 has token 1: ratio 3, truncated at 2.
    logprobs, ratios = [-1.0, -2.0, -3.0], [1.5, 3.0, 1.2]
    config = LossConfig(kind=LossKind.TRUNCATED, ratio_level=RatioLevel.SEQUENCE)
    result, gradient = loss_and_gradient(
        config, logprobs, behaviours(logprobs, ratios), [1.0, 1.0, 1.0], members=[0, 1, 0]
    )
    assert result.ratio_N is not None and result.ratio_N.tolist() == pytest.approx([1.8, 3.0, 1.8])
    assert gradient == pytest.approx([-1.8, -2.0, -1.8])
    assert result.loss_N.tolist() == pytest.approx([1.8, 4.0, 5.4])


def test_a_clipped_sequence_ratio_weighs_each_token_of_its_sample_once() -> None:
    # One Sample, ratios 1.1 and 1.05: product 1.155, inside the clip, for both tokens.
    config = LossConfig(ratio_level=RatioLevel.SEQUENCE)
    result, gradient = loss_and_gradient(
        config, [-1.0, -2.0], behaviours([-1.0, -2.0], [1.1, 1.05]), [1.0, 1.0], members=[0, 0]
    )
    assert result.loss_N.tolist() == pytest.approx([-1.155, -1.155])
    assert gradient == pytest.approx([-1.155, -1.155])


@pytest.mark.parametrize("level", RatioLevel)
@pytest.mark.parametrize("kind", [LossKind.CLIPPED, LossKind.TRUNCATED, LossKind.MASKED])
def test_on_policy_every_correction_has_the_gradient_of_reinforce(kind: LossKind, level: RatioLevel) -> None:
    logprobs, advantages, members = [-1.0, -2.0, -0.5, -3.0], [1.0, 1.0, 1.0, -0.5], [0, 0, 0, 1]
    config = LossConfig(kind=kind, ratio_level=level)
    _, gradient = loss_and_gradient(config, logprobs, logprobs, advantages, members=members)
    assert gradient == pytest.approx([-1.0, -1.0, -1.0, 0.5])


def test_a_masked_sequence_is_left_out_whole() -> None:
    config = LossConfig(kind=LossKind.MASKED, ratio_level=RatioLevel.SEQUENCE)
    result, gradient = loss_and_gradient(
        config, [-1.0] * 3, behaviours([-1.0] * 3, [3.0, 2.0, 1.5]), [1.0] * 3, members=[0, 0, 1]
    )
    assert gradient == pytest.approx([0.0, 0.0, -1.5])  # 3 * 2 = 6 is over 5
    assert result.clipped_N is not None and result.clipped_N.tolist() == [True, True, False]


def test_a_sequence_ratio_without_members_is_refused() -> None:
    with pytest.raises(ValueError, match="pass members_N"):
        loss_and_gradient(LossConfig(ratio_level=RatioLevel.SEQUENCE), [-1.0], [-1.0], [1.0])


# d = log 2: the learner finds the token twice as likely as the reference does. (value, d value / d logprob)
KL_CASES = [
    (KlEstimator.K1, math.log(2), math.log(2)),
    (KlEstimator.K2, math.log(2) ** 2 / 2, math.log(2)),
    (KlEstimator.K3, 0.5 - 1 + math.log(2), 0.5),
]


@pytest.mark.parametrize(("estimator", "value", "slope"), KL_CASES)
def test_the_penalty_is_added_to_the_loss(estimator: KlEstimator, value: float, slope: float) -> None:
    config = LossConfig(kind=LossKind.REINFORCE, kl_coef=0.1, kl_estimator=estimator)
    result, gradient = loss_and_gradient(config, [-1.0], [-1.0], [2.0], reference=[-1.0 - math.log(2)])
    assert result.reference_kl_N is not None and result.reference_kl_N.tolist() == pytest.approx([value])
    assert result.loss_N.tolist() == pytest.approx([2.0 + 0.1 * value])
    assert gradient == pytest.approx([-2.0 + 0.1 * slope])


def test_all_estimators_average_to_the_divergence_or_near_it() -> None:
    # Learner (0.6, 0.4), reference (0.5, 0.5): KL = 0.6 log 1.2 + 0.4 log 0.8 = 0.02014. K1 and K3 are unbiased.
    probs, reference = torch.tensor([0.6, 0.4]), torch.tensor([0.5, 0.5])
    exact = float((probs * (probs / reference).log()).sum())
    for estimator, tolerance in ((KlEstimator.K1, 1e-6), (KlEstimator.K3, 1e-6), (KlEstimator.K2, 1e-3)):
        config = LossConfig(kind=LossKind.REINFORCE, kl_coef=1.0, kl_estimator=estimator)
        result = token_loss(config, probs.log(), probs.log(), torch.zeros(2), reference_N=reference.log())
        assert result.reference_kl_N is not None
        assert float((probs * result.reference_kl_N).sum()) == pytest.approx(exact, abs=tolerance)


def test_k1_and_k2_have_the_gradient_of_the_divergence_on_average() -> None:
    # Of a softmax over two tokens: autograd of the exact KL against the mean of the estimators' gradients.
    reference_logprobs = torch.tensor([0.5, 0.5]).log()
    logits = torch.tensor([0.4, 0.0], requires_grad=True)
    (exact,) = torch.autograd.grad((logits.softmax(0) * (logits.log_softmax(0) - reference_logprobs)).sum(), logits)
    probs = logits.softmax(0).detach()
    for estimator in (KlEstimator.K1, KlEstimator.K2):
        config = LossConfig(kind=LossKind.REINFORCE, kl_coef=1.0, kl_estimator=estimator)
        logprobs = logits.log_softmax(0)
        loss_N = token_loss(config, logprobs, logprobs.detach(), torch.zeros(2), reference_N=reference_logprobs).loss_N
        (mean,) = torch.autograd.grad((probs * loss_N).sum(), logits)
        torch.testing.assert_close(mean, exact)


def test_a_penalty_without_a_reference_is_refused() -> None:
    config = LossConfig(kl_coef=0.1)
    with pytest.raises(ValueError, match=r"kl_coef=0.1 needs a reference policy"):
        loss_and_gradient(config, [-1.0], [-1.0], [1.0])
    with pytest.raises(ValueError, match="1 of 1 log-probabilities of the reference are not finite"):
        loss_and_gradient(config, [-1.0], [-1.0], [1.0], reference=[math.nan])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"clip_low": 1.0}, "clip_low must be in"),
        ({"clip_high": 2.5}, "dual_clip must exceed 1 . clip_high"),
        ({"mask_low": 1.1}, "mask_low and mask_high must lie around 1"),
        ({"kl_coef": -0.1}, "kl_coef must be >= 0"),
        ({"truncation": 0.0}, "truncation must be > 0"),
    ],
)
def test_constants_without_sense_are_refused(values: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LossConfig(**values)  # pyright: ignore[reportArgumentType]  # only floats here
