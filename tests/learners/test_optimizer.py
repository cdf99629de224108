"""Schedules and AdamW against numbers computed by hand, and against torch's own."""

import math
import pickle

import pytest
import torch
from torch import nn

from learners.config import LearnerConfig, Schedule
from learners.optimizer import NonFiniteGradients, build_optimizer, describe_nonfinite, learning_rate


def rates(config: LearnerConfig, num_steps: int) -> list[float]:
    return [learning_rate(config, step) for step in range(num_steps)]


def test_warm_up_then_each_schedule_by_hand() -> None:
    def of(schedule: Schedule, final: float = 0.0) -> list[float]:
        return rates(LearnerConfig(lr=1.0, schedule=schedule, warmup_steps=2, total_steps=6, final_lr_ratio=final), 7)

    assert of(Schedule.CONSTANT) == [0.5, 1, 1, 1, 1, 1, 1]
    assert of(Schedule.LINEAR) == pytest.approx([0.5, 1, 1, 0.75, 0.5, 0.25, 0])
    half = math.cos(math.pi / 4) / 2
    assert of(Schedule.COSINE) == pytest.approx([0.5, 1, 1, 0.5 + half, 0.5, 0.5 - half, 0])
    assert of(Schedule.LINEAR, final=0.2) == pytest.approx([0.5, 1, 1, 0.8, 0.6, 0.4, 0.2])
    assert of(Schedule.COSINE, final=0.2)[4] == pytest.approx(0.2 + 0.8 * 0.5)


def test_past_its_end_a_schedule_stays_on_its_floor() -> None:
    config = LearnerConfig(lr=2.0, schedule=Schedule.COSINE, total_steps=4, final_lr_ratio=0.1)
    assert rates(config, 9)[4:] == pytest.approx([0.2] * 5)


def test_a_warm_up_of_a_share_of_the_run_is_rounded_up() -> None:
    config = LearnerConfig(lr=1.0, schedule=Schedule.COSINE, warmup_ratio=0.1)
    resolved = config.for_run_of(25)
    assert (resolved.warmup_steps, resolved.total_steps) == (3, 25)
    assert rates(resolved, 4) == pytest.approx([1 / 3, 2 / 3, 1.0, 1.0])
    assert resolved.for_run_of(99) == resolved
    assert LearnerConfig(schedule=Schedule.COSINE, total_steps=10).for_run_of(99).total_steps == 10


def test_a_rate_that_depends_on_nothing_to_come_needs_no_end() -> None:
    config = LearnerConfig(warmup_steps=3)
    assert config.for_run_of(None) == config


@pytest.mark.parametrize("schedule", [Schedule.LINEAR, Schedule.COSINE])
def test_a_schedule_without_an_end_is_refused(schedule: Schedule) -> None:
    with pytest.raises(ValueError, match="needs to know where the run ends"):
        LearnerConfig(schedule=schedule).for_run_of(None)
    with pytest.raises(ValueError, match=r"needs total_steps > warmup_steps \(5\), got 5"):
        LearnerConfig(schedule=schedule, warmup_steps=5).for_run_of(5)
    with pytest.raises(ValueError, match="excludes warmup_steps"):
        LearnerConfig(schedule=schedule, warmup_steps=5, warmup_ratio=0.1)


class Weights(nn.Module):
    """One parameter of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(3, 2)
        self.proj = nn.Linear(2, 2)
        self.norm = nn.LayerNorm(2, bias=False)
        for parameter in self.parameters():
            nn.init.ones_(parameter)


def decays(config: LearnerConfig) -> dict[str, float]:
    return {
        group["name"]: group["weight_decay"]
        for group in build_optimizer(config, Weights().named_parameters()).param_groups
    }


def test_norms_and_biases_never_decay_and_embeddings_only_on_request() -> None:
    assert decays(LearnerConfig(weight_decay=0.1)) == {"matrices": 0.1, "embeddings": 0.1, "norms and biases": 0.0}
    without = decays(LearnerConfig(weight_decay=0.1, decay_embeddings=False))
    assert without == {"matrices": 0.1, "embeddings": 0.0, "norms and biases": 0.0}


def test_two_adamw_steps_by_hand() -> None:
    # lr 0.1, betas 0.9 / 0.95, decay 0.5, weights 1, gradients 1 then 3:
    # step 1: decay to 0.95; m = 0.1, v = 0.05, corrected 1 and 1: 0.95 - 0.1 = 0.85 (norms: 0.9)
    # step 2: m = 0.39, corrected 0.39 / 0.19; v = 0.4975, corrected 0.4975 / 0.0975
    weights = Weights()
    config = LearnerConfig(lr=0.1, betas=(0.9, 0.95), weight_decay=0.5)
    optimizer = build_optimizer(config, weights.named_parameters())
    for gradient in (1.0, 3.0):
        for parameter in weights.parameters():
            parameter.grad = torch.full_like(parameter, gradient)
        optimizer.step()
    second = 0.1 * (0.39 / 0.19) / math.sqrt(0.4975 / 0.0975)
    torch.testing.assert_close(weights.proj.weight.data, torch.full((2, 2), 0.85 * 0.95 - second))
    torch.testing.assert_close(weights.norm.weight.data, torch.full((2,), 0.9 - second))
    torch.testing.assert_close(weights.proj.bias.data, torch.full((2,), 0.9 - second))


def test_steps_equal_those_of_a_plain_adamw_with_two_groups() -> None:
    ours, theirs = Weights(), Weights()
    config = LearnerConfig(lr=0.03, weight_decay=0.2, decay_embeddings=False, eps=1e-6)
    optimizer = build_optimizer(config, ours.named_parameters())
    plain = torch.optim.AdamW(
        [
            {"params": [theirs.proj.weight], "weight_decay": 0.2},
            {"params": [theirs.embed_tokens.weight, theirs.proj.bias, theirs.norm.weight], "weight_decay": 0.0},
        ],
        lr=0.03,
        betas=config.betas,
        eps=1e-6,
    )
    torch.manual_seed(0)
    for _ in range(5):
        for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            mine.grad = torch.randn_like(mine)
            other.grad = mine.grad.clone()
        optimizer.step()
        plain.step()
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, other)


def test_gradients_that_are_not_finite_are_named_by_group() -> None:
    weights = Weights()
    for parameter in weights.parameters():
        parameter.grad = torch.zeros_like(parameter)
    assert "the norm alone" in describe_nonfinite(weights.named_parameters())
    for parameter, value in (
        (weights.norm.weight, math.nan),
        (weights.proj.bias, math.inf),
        (weights.proj.weight, -math.inf),
    ):
        assert parameter.grad is not None
        parameter.grad[0] = value
    where = describe_nonfinite(weights.named_parameters())
    assert where == "matrices: proj.weight; norms and biases: proj.bias and 1 more"
    error = pickle.loads(pickle.dumps(NonFiniteGradients(7, 2, where)))  # as it travels from a rank
    assert "step 7: the gradient was not finite 2 times in a row, last in matrices" in str(error)
