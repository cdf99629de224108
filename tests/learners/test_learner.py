"""The Learner on one rank against a plain loop on the same numbers."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from learners.config import (
    Aggregation,
    KlEstimator,
    LearnerConfig,
    LossConfig,
    LossKind,
    Precision,
    RatioLevel,
    Schedule,
)
from learners.learner import Learner
from learners.model import full_tensor
from learners.models import make_tiny_model
from learners.optimizer import NonFiniteGradients
from learners.plan import BatchPlan, RankPlan, plan_batch, plan_samples
from tests.learners.conftest import CORPUS, make_samples, store_samples
from tests.learners.reference import PlainLearner
from tests.trajectories.records import trajectory, turn
from trajectories.handle import summarize
from trajectories.samples import Sample, trajectory_samples
from trajectories.schema import Group, Outcome, PolicyVersion, Trajectory, Turn, TurnTokens, VersionSpan
from trajectories.store import StoreWriter

LENGTHS = [33, 5, 64, 61, 2, 60, 17, 40]
SFT = LossConfig(kind=LossKind.CROSS_ENTROPY)


@pytest.fixture(scope="module")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Other weights for the same tokens."""
    return make_tiny_model(tmp_path_factory.mktemp("models") / "other", CORPUS, seed=1)


def sft_plan(store: Path, samples: list[Sample], max_tokens: int = 128) -> BatchPlan:
    return plan_samples(store_samples(store, samples), num_ranks=1, max_tokens=max_tokens)


def with_advantages(plan: BatchPlan, advantages: list[float]) -> RankPlan:
    batches = plan.ranks[0].micro_batches
    return RankPlan(
        micro_batches=tuple(tuple(replace(ref, advantage=advantages[ref.index]) for ref in batch) for batch in batches)
    )


def gradients(learner: Learner) -> dict[str, torch.Tensor]:
    weights = learner._network.named_weights()
    return {name: full_tensor(p.grad) for name, p in weights if p.grad is not None}


def assert_same_gradients(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        error = float((ours[name] - gradient).norm() / gradient.norm())
        assert error < 1e-4, f"{name}: relative error {error}"


def test_sft_gradients_equal_those_of_transformers_on_whole_logits(tiny_model: Path, tmp_path: Path) -> None:
    samples = make_samples(LENGTHS)
    learner = Learner(LearnerConfig(chunk_tokens=20), model=tiny_model)
    plain = PlainLearner(tiny_model, lr=1.0)
    plan = sft_plan(tmp_path, samples)
    metrics = learner.forward_backward(plan.ranks[0], SFT, tmp_path)
    assert metrics["train/loss"] == pytest.approx(plain.cross_entropy(samples), rel=1e-6)
    assert metrics["train/num_tokens"] == sum(sample.mask.sum() for sample in samples)
    assert len(plan.ranks[0].micro_batches) > 1
    assert_same_gradients(gradients(learner), plain.gradients())


def test_clipped_gradients_equal_those_of_transformers_on_whole_logits(tiny_model: Path, tmp_path: Path) -> None:
    samples = make_samples(LENGTHS)
    advantages = [1.0, -0.5, 0.25, -1.0, 2.0, 1.0, -3.0, 0.5]
    learner, plain = Learner(LearnerConfig(), model=tiny_model), PlainLearner(tiny_model, lr=1.0)
    plan = sft_plan(tmp_path, samples)
    metrics = learner.forward_backward(with_advantages(plan, advantages), LossConfig(), tmp_path)
    assert metrics["train/loss"] == pytest.approx(plain.clipped(samples, advantages, plan.num_tokens), rel=1e-5)
    assert 0 < metrics["train/clip_fraction"] < 1
    assert_same_gradients(gradients(learner), plain.gradients())


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
        store_samples(tmp_path, near), aggregation=Aggregation.SEQUENCE_MEAN, num_ranks=1, max_tokens=20
    )
    metrics = learner.forward_backward(with_advantages(plan, advantages), loss, tmp_path)
    total = torch.zeros(())
    for sample, advantage in zip(near, advantages, strict=True):
        ratio = (plain.logprobs(sample) - torch.from_numpy(sample.logprobs[sample.mask])).sum().exp()
        total = total - torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage) / 4
    total.backward()
    assert metrics["train/loss"] == pytest.approx(total.item(), abs=1e-6)
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


@pytest.mark.parametrize("activation_checkpointing", [False, True])
def test_three_steps_equal_a_plain_loop(tiny_model: Path, tmp_path: Path, activation_checkpointing: bool) -> None:
    samples = make_samples(LENGTHS)
    config = LearnerConfig(lr=2e-4, max_grad_norm=0.5, activation_checkpointing=activation_checkpointing)
    learner, plain = Learner(config, model=tiny_model), PlainLearner(tiny_model, lr=2e-4)
    plan = sft_plan(tmp_path, samples).ranks[0]
    for _ in range(3):
        ours = learner.forward_backward(plan, SFT, tmp_path) | learner.optim_step()
        assert ours["train/loss"] == pytest.approx(plain.cross_entropy(samples), abs=1e-6)
        assert ours["optim/grad_norm"] == pytest.approx(plain.step(0.5), rel=1e-5)
    exported = dict(learner.export_weights())
    for name, parameter in plain.model.named_parameters():
        # Over the whole tensor: AdamW's first steps blow rounding of a single near-zero gradient up to a share of lr.
        error = float((exported[name] - parameter.detach()).norm() / parameter.detach().norm())
        assert error < 5e-6, f"{name}: relative error {error}"


def test_splitting_a_step_over_micro_batches_changes_nothing(tiny_model: Path, tmp_path: Path) -> None:
    samples = make_samples(LENGTHS)
    results = []
    for max_tokens in (64, 300):
        learner = Learner(LearnerConfig(), model=tiny_model)
        plan = sft_plan(tmp_path / str(max_tokens), samples, max_tokens)
        metrics = learner.forward_backward(plan.ranks[0], SFT, tmp_path / str(max_tokens))
        results.append((metrics["train/loss"], gradients(learner)))
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-6)
    assert_same_gradients(results[0][1], results[1][1])


def test_logprobs_follow_every_optimizer_step_and_equal_transformers(tiny_model: Path, tmp_path: Path) -> None:
    learner = Learner(LearnerConfig(lr=1e-2), model=tiny_model)
    plan = sft_plan(tmp_path, make_samples([20])).ranks[0]
    ids = [3, 1, 4, 1, 5, 9]
    seen = [learner.logprobs(ids)]
    for _ in range(2):
        learner.forward_backward(plan, SFT, tmp_path)
        learner.optim_step()
        seen.append(learner.logprobs(ids))
    assert seen[0] != seen[1] != seen[2]
    plain = PlainLearner(tiny_model, lr=1.0)
    plain.model.load_state_dict(dict(learner.export_weights()), strict=False)
    mask = np.arange(6) > 0
    sample = Sample(ids=np.array(ids, np.int32), mask=mask, logprobs=np.zeros(6, np.float32))
    assert seen[2] == pytest.approx(plain.logprobs(sample).tolist(), abs=1e-5)


def test_sequence_logprobs_are_the_sums_of_trained_tokens_in_the_order_of_the_plan(
    tiny_model: Path, tmp_path: Path
) -> None:
    samples = make_samples(LENGTHS)
    learner, plain = Learner(LearnerConfig(), model=tiny_model), PlainLearner(tiny_model, lr=1.0)
    plan = sft_plan(tmp_path, samples)
    ours = plan.in_given_order(learner.sequence_logprobs(plan.ranks[0], tmp_path))
    assert ours == pytest.approx([plain.logprobs(sample).sum().item() for sample in samples], abs=1e-4)


def test_frozen_parameters_stay_as_they_were(tiny_model: Path, tmp_path: Path) -> None:
    learner = Learner(LearnerConfig(lr=1e-2, freeze=("embed_tokens",)), model=tiny_model)
    before = {name: tensor.clone() for name, tensor in learner.export_weights()}
    learner.forward_backward(sft_plan(tmp_path, make_samples([30])).ranks[0], SFT, tmp_path)
    learner.optim_step()
    changed = {name for name, tensor in learner.export_weights() if not torch.equal(tensor, before[name])}
    assert "model.embed_tokens.weight" not in changed
    assert len(changed) == len(before) - 1


def test_freezing_what_does_not_exist_is_refused(tiny_model: Path) -> None:
    with pytest.raises(ValueError, match="freeze='wte' matches no parameter"):
        Learner(LearnerConfig(freeze=("wte",)), model=tiny_model)


def test_an_empty_step_is_skipped_and_counted(tiny_model: Path, tmp_path: Path) -> None:
    learner = Learner(LearnerConfig(), model=tiny_model)
    before = {name: tensor.clone() for name, tensor in learner.export_weights()}
    metrics = learner.forward_backward(RankPlan(micro_batches=()), LossConfig(), tmp_path) | learner.optim_step()
    assert metrics["optim/skipped"] == 1.0 and metrics["train/num_tokens"] == 0.0
    assert learner.step == 1
    assert all(torch.equal(tensor, before[name]) for name, tensor in learner.export_weights())


def test_a_rank_without_samples_adds_nothing(tiny_model: Path, tmp_path: Path) -> None:
    samples = make_samples([20, 10])
    plan = sft_plan(tmp_path, samples).ranks[0]
    learners = [Learner(LearnerConfig(), model=tiny_model) for _ in range(2)]
    padded = RankPlan(micro_batches=(*plan.micro_batches, ()))
    metrics = [
        learner.forward_backward(each, SFT, tmp_path) for learner, each in zip(learners, (plan, padded), strict=True)
    ]
    assert metrics[0] == metrics[1]
    ours, theirs = (gradients(learner) for learner in learners)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_non_finite_gradients_are_skipped_and_end_the_run_past_the_limit(tiny_model: Path, tmp_path: Path) -> None:
    learner = Learner(LearnerConfig(max_nonfinite_steps=2), model=tiny_model)
    sample = make_samples([12])[0]
    plan = sft_plan(tmp_path, [sample])
    poisoned = with_advantages(plan, [math.inf])
    loss = LossConfig(kind=LossKind.REINFORCE)
    before = {name: tensor.clone() for name, tensor in learner.export_weights()}
    learner.forward_backward(poisoned, loss, tmp_path)
    assert learner.optim_step()["optim/skipped"] == 1.0
    assert all(torch.equal(tensor, before[name]) for name, tensor in learner.export_weights())
    learner.forward_backward(plan.ranks[0], SFT, tmp_path)
    assert learner.optim_step()["optim/skipped"] == 0.0
    learner.forward_backward(poisoned, loss, tmp_path)
    learner.optim_step()
    learner.forward_backward(poisoned, loss, tmp_path)
    with pytest.raises(
        NonFiniteGradients,
        match=r"2 times in a row, last in embeddings: model\.embed_tokens",
    ):
        learner.optim_step()


def test_bf16_compute_stays_close_and_exports_bf16(tiny_model: Path, tmp_path: Path) -> None:
    samples = make_samples(LENGTHS)
    learners = [Learner(LearnerConfig(precision=precision), model=tiny_model) for precision in Precision]
    plan = sft_plan(tmp_path, samples).ranks[0]
    losses = [learner.forward_backward(plan, SFT, tmp_path)["train/loss"] for learner in learners]
    assert losses[0] == pytest.approx(losses[1], rel=2e-3)
    assert {tensor.dtype for _, tensor in learners[1].export_weights()} == {torch.bfloat16}


def test_the_tied_embedding_is_exported_once(tiny_model: Path) -> None:
    names = [name for name, _ in Learner(LearnerConfig(), model=tiny_model).export_weights()]
    assert len(names) == len(set(names))
    assert "model.embed_tokens.weight" in names and "lm_head.weight" not in names


def test_a_missing_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no config\.json"):
        Learner(LearnerConfig(), model=tmp_path / "nowhere")


def test_a_stored_group_is_trained_branch_by_branch_on_the_ids_that_were_sampled(
    tiny_model: Path, tmp_path: Path
) -> None:
    def turn(prefix_len: int, new_ids: tuple[int, ...], sampled: tuple[int, ...]) -> Turn:
        tokens = TurnTokens(
            prefix_len=prefix_len,
            new_ids=new_ids,
            sampled_ids=sampled,
            logprobs=(-5.0,) * len(sampled),
            spans=(VersionSpan(version=PolicyVersion(lineage=0, n=0), num_tokens=len(sampled)),),
        )
        return Turn(reply="", observation="", finish_reason="stop", tokens=tokens)

    def trajectory(member: int, reward: float, *turns: Turn) -> Trajectory:
        return Trajectory(
            id=f"t{member}",
            task_id="task",
            group_id="g",
            member=member,
            prompt="",
            turns=turns,
            outcome=Outcome.COMPLETED,
            reward=reward,
        )

    broken = trajectory(0, 1.0, turn(0, (1, 2), (3, 4)), turn(1, (5,), (6,)))  # keeps one id: two branches
    group = Group(id="g", task_id="task", trajectories=(broken, trajectory(1, 0.0, turn(0, (1, 2), (7,)))))
    with StoreWriter(tmp_path, "test") as writer:
        handle = summarize(group, writer.append(group))
    plan = plan_batch([handle], num_ranks=1, max_tokens=64)
    assert plan.num_tokens == 4
    learner, plain = Learner(LearnerConfig(), model=tiny_model), PlainLearner(tiny_model, lr=1.0)
    metrics = learner.forward_backward(plan.ranks[0], LossConfig(), tmp_path)
    samples = [sample for member in group.trajectories for sample in trajectory_samples(member)]
    assert [sample.ids.tolist() for sample in samples] == [[1, 2, 3, 4], [1, 5, 6], [1, 2, 7]]
    assert metrics["train/loss"] == pytest.approx(plain.clipped(samples, [1.0, 1.0, -1.0], 4), rel=1e-5)
    assert_same_gradients(gradients(learner), plain.gradients())


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
