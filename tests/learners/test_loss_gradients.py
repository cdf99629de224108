"""Corrections, penalties and aggregations through the Learner, against plain autograd; what no gradient depends on."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from learners.config import Aggregation, KlEstimator, LearnerConfig, LossConfig, LossKind, RatioLevel, Schedule
from learners.learner import Learner
from learners.models import make_tiny_model
from learners.plan import plan_batch, plan_samples
from tests.learners.conftest import CORPUS, make_samples, store_samples
from tests.learners.reference import PlainLearner
from tests.learners.test_learner import assert_same_gradients, gradients, sft_plan, with_advantages
from tests.trajectories.records import trajectory, turn
from trajectories.handle import summarize
from trajectories.schema import Group, Outcome, PolicyVersion, Trajectory, TurnTokens, VersionSpan
from trajectories.store import StoreWriter


@pytest.fixture(scope="module")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Other weights for the same tokens."""
    return make_tiny_model(tmp_path_factory.mktemp("models") / "other", CORPUS, seed=1)


def test_a_masked_sequence_mean_with_a_penalty_has_the_gradients_of_plain_autograd(
    tiny_model: Path, other_model: Path, tmp_path: Path
) -> None:
    samples = make_samples([33, 5, 64, 12])
    advantages = [1.0, -0.5, 0.25, -1.0]
    loss = LossConfig(
        kind=LossKind.MASKED, mask_low=0.9, mask_high=1.1, kl_coef=0.3, kl_estimator=KlEstimator.K3, temperature=0.7
    )
    learner = Learner(LearnerConfig(reference=other_model, chunk_tokens=20), model=tiny_model)
    plain, reference = PlainLearner(tiny_model, lr=1.0), PlainLearner(other_model, lr=1.0)
    sized = store_samples(tmp_path, samples)
    plan = plan_samples(sized, aggregation=Aggregation.SEQUENCE_MEAN, num_ranks=1, max_tokens=70)
    metrics = learner.forward_backward(with_advantages(plan, advantages), loss, tmp_path)
    total, num_masked, num_tokens, kl = torch.zeros(()), 0, 0, 0.0
    for sample, advantage in zip(samples, advantages, strict=True):
        logprobs_N = plain.logprobs(sample, temperature=0.7)
        gap_N = logprobs_N - reference.logprobs(sample, temperature=0.7).detach()
        kl_N = (-gap_N).exp() - 1 + gap_N
        ratio_N = (logprobs_N.detach() - torch.from_numpy(sample.logprobs[sample.mask])).exp()
        is_kept_N = (ratio_N >= 0.9) & (ratio_N <= 1.1)
        total = total + (-(ratio_N * is_kept_N) * advantage * logprobs_N + 0.3 * kl_N).mean() / len(samples)
        num_masked += int((~is_kept_N).sum())
        num_tokens += len(logprobs_N)
        kl += kl_N.sum().item()
    total.backward()
    assert metrics["train/loss"] == pytest.approx(total.item(), rel=1e-5)
    assert 0 < num_masked < num_tokens
    assert metrics["train/clip_fraction"] == pytest.approx(num_masked / num_tokens)
    assert metrics["train/reference_kl"] == pytest.approx(kl / num_tokens, rel=1e-4)
    assert_same_gradients(gradients(learner), plain.gradients())


def test_a_clipped_sequence_ratio_has_the_gradients_of_plain_autograd(tiny_model: Path, tmp_path: Path) -> None:
    samples, advantages = make_samples([9, 5, 7, 6]), [1.0, -0.5, 0.25, -1.0]
    plain = PlainLearner(tiny_model, lr=1.0)
    with torch.no_grad():  # recorded as a policy nearby would have: sequence ratios exp(0.1), exp(-0.1), exp(0.3), 1
        shifts = [0.1, -0.1, 0.3, 0.0]
        near = []
        for sample, shift in zip(samples, shifts, strict=True):
            recorded = np.zeros(len(sample.ids), np.float32)
            recorded[sample.mask] = plain.logprobs(sample).numpy() - shift / sample.mask.sum()
            near.append(replace(sample, logprobs=recorded))
    loss = LossConfig(ratio_level=RatioLevel.SEQUENCE)
    learner = Learner(LearnerConfig(), model=tiny_model)
    plan = plan_samples(
        store_samples(tmp_path, near), aggregation=Aggregation.SEQUENCE_MEAN_TOKEN_SUM, num_ranks=1, max_tokens=20
    )
    metrics = learner.forward_backward(with_advantages(plan, advantages), loss, tmp_path)
    total, value = torch.zeros(()), 0.0
    for sample, advantage in zip(near, advantages, strict=True):
        ratio = (plain.logprobs(sample) - torch.from_numpy(sample.logprobs[sample.mask])).sum().exp()
        loss_of_sequence = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage) / 4
        total = total + loss_of_sequence
        value += loss_of_sequence.item() * int(sample.mask.sum())  # each of its tokens has it
    total.backward()
    assert metrics["train/loss"] == pytest.approx(value, rel=1e-4)
    assert metrics["train/clip_fraction_high"] > 0  # exp(0.3) = 1.35 with a positive advantage
    assert_same_gradients(gradients(learner), plain.gradients())


def test_a_penalty_compares_with_the_weights_the_reference_was_loaded_with(tiny_model: Path, tmp_path: Path) -> None:
    loss = LossConfig(kind=LossKind.REINFORCE, kl_coef=0.1)
    learner = Learner(LearnerConfig(lr=1e-2, reference=tiny_model), model=tiny_model)
    plan = sft_plan(tmp_path, make_samples([20, 9])).ranks[0]
    kls = []
    for _ in range(3):
        kls.append(learner.forward_backward(plan, loss, tmp_path)["train/reference_kl"])
        learner.optim_step()
    assert kls[0] == pytest.approx(0.0, abs=1e-9)
    assert 0 < kls[1] < kls[2]
    with pytest.raises(ValueError, match="needs a reference policy"):
        Learner(LearnerConfig(), model=tiny_model).forward_backward(plan, loss, tmp_path)


def test_a_reference_of_another_vocabulary_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    small = make_tiny_model(tmp_path / "small", ["a b c"], vocabulary_size=270)
    with pytest.raises(ValueError, match="the policy"):
        Learner(LearnerConfig(reference=small), model=tiny_model)


def test_a_learner_whose_schedule_has_no_end_is_refused(tiny_model: Path) -> None:
    with pytest.raises(ValueError, match="cosine schedule with warmup_ratio 0 needs to know where the run ends"):
        Learner(LearnerConfig(schedule=Schedule.COSINE), model=tiny_model)


@pytest.mark.parametrize("reward", [math.nan, math.inf, -1e30, None])
def test_an_excluded_member_changes_no_metric_and_no_gradient_whatever_it_holds(
    tiny_model: Path, tmp_path: Path, reward: float | None
) -> None:
    def member(number: int, reward: float | None, outcome: Outcome = Outcome.COMPLETED) -> Trajectory:
        said = TurnTokens(
            prefix_len=0,
            new_ids=(1, 2),
            sampled_ids=(3 + number, 4, 5),
            logprobs=(math.nan,) * 3 if outcome is Outcome.CANCELLED else (-5.0, -5.5, -6.0),
            spans=(VersionSpan(version=PolicyVersion(lineage=0, n=0), num_tokens=3),),
        )
        return trajectory(turn(said), member=number, reward=reward, outcome=outcome)

    valid = [member(0, 1.0), member(1, 0.0), member(2, 0.0)]
    seen = []
    for name, members in (("without", valid), ("with", [*valid, member(3, reward, Outcome.CANCELLED)])):
        with StoreWriter(tmp_path / name, "test") as writer:
            group = Group(id="g0", task_id="t0", trajectories=tuple(members))
            handle = summarize(group, writer.append(group))
        plan = plan_batch([handle], aggregation=Aggregation.SEQUENCE_MEAN, num_ranks=1, max_tokens=64)
        learner = Learner(LearnerConfig(), model=tiny_model)
        metrics = learner.forward_backward(plan.ranks[0], LossConfig(), tmp_path / name)
        seen.append((metrics, gradients(learner)))
    assert seen[0][0] == seen[1][0]
    assert all(torch.equal(gradient, seen[1][1][name]) for name, gradient in seen[0][1].items())
