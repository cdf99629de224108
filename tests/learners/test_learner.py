"""The Learner on one rank against a plain loop on the same numbers."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from learners.config import AttentionKernel, LearnerConfig, LossConfig, LossKind, Precision
from learners.learner import Learner
from learners.model import full_tensor
from learners.optimizer import NonFiniteGradients
from learners.plan import BatchPlan, RankPlan, plan_batch, plan_samples
from tests.learners.conftest import make_samples, store_samples
from tests.learners.live_bytes import LiveBytes
from tests.learners.reference import PlainLearner
from trajectories.handle import summarize
from trajectories.samples import Sample, trajectory_samples
from trajectories.schema import Group, Outcome, PolicyVersion, Trajectory, Turn, TurnTokens, VersionSpan
from trajectories.store import StoreWriter

LENGTHS = [33, 5, 64, 61, 2, 60, 17, 40]
DEEP: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 128,
    "num_hidden_layers": 12,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "tie_word_embeddings": True,
}
SFT = LossConfig(kind=LossKind.CROSS_ENTROPY)


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


def test_activation_checkpointing_more_than_halves_the_peak(tmp_path: Path) -> None:
    model = tmp_path / "deep"
    Qwen3ForCausalLM(Qwen3Config(**DEEP)).save_pretrained(model)
    plan = sft_plan(tmp_path / "store", make_samples([256], vocabulary=50), max_tokens=256).ranks[0]
    peaks = []
    for activation_checkpointing in (False, True):
        learner = Learner(LearnerConfig(activation_checkpointing=activation_checkpointing), model=model)
        with LiveBytes() as live:
            learner.forward_backward(plan, SFT, tmp_path / "store")
        peaks.append(live.peak)
    kept_by_layers = DEEP["num_hidden_layers"] * 256 * (3 * 32 + 3 * 32 + 2 * 128) * 4
    assert kept_by_layers < peaks[0] < 1.5 * kept_by_layers
    assert peaks[1] < peaks[0] / 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attention": AttentionKernel.FLASH, "precision": Precision.BF16}, "attention=flash needs a GPU"),
        ({"liger": True}, "liger needs a GPU"),
        ({"cpu_offload": True}, "cpu_offload moves a GPU's state"),
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="asks what happens without a GPU")
def test_what_needs_a_gpu_is_refused_without_one(tiny_model: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Learner(LearnerConfig(**options), model=tiny_model)


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
def test_a_sample_of_32768_tokens_trains(tiny_model: Path, tmp_path: Path) -> None:
    config = LearnerConfig(lr=1e-2, max_tokens=32_768, activation_checkpointing=True)
    learner = Learner(config, model=tiny_model)
    plan = sft_plan(tmp_path, make_samples([32_768]), max_tokens=32_768).ranks[0]
    losses = []
    for _ in range(2):
        losses.append(learner.forward_backward(plan, SFT, tmp_path)["train/loss"])
        learner.optim_step()
    assert losses[1] < losses[0]


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


def test_one_bad_gradient_is_named_alone(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    learner = Learner(LearnerConfig(max_nonfinite_steps=1), model=tiny_model)
    learner.forward_backward(sft_plan(tmp_path, make_samples([12])).ranks[0], SFT, tmp_path)
    bad = dict(learner._network.named_weights())["model.layers.1.mlp.up_proj.weight"]
    assert isinstance(bad.grad, DTensor)
    bad.grad.to_local()[0, 0] = math.nan
    with pytest.raises(NonFiniteGradients, match=r"last in matrices: model\.layers\.1\.mlp\.up_proj\.weight;"):
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
