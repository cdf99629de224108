"""AdamW and its learning-rate schedule.

Invariant: the rate is a function of the step alone, so a resumed run continues it without any state.
Called by learners/learner.py.
"""

import math
from collections.abc import Iterable
from enum import StrEnum

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from learners.config import LearnerConfig, Schedule


class ParameterKind(StrEnum):
    """Groups of parameters that share a weight decay."""

    MATRICES = "matrices"
    EMBEDDINGS = "embeddings"
    NORMS_AND_BIASES = "norms and biases"


class NonFiniteGradients(Exception):
    """So many gradients in a row were not finite that training cannot go on."""

    def __init__(self, step: int, num_in_a_row: int, where: str) -> None:
        super().__init__(step, num_in_a_row, where)  # as pickle gives them back

    def __str__(self) -> str:
        step, num_in_a_row, where = self.args
        return (
            f"step {step}: the gradient was not finite {num_in_a_row} times in a row, last in {where}; lower "
            "learner.lr or restart from an earlier checkpoint"
        )


def build_optimizer(config: LearnerConfig, weights: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.AdamW:
    """AdamW over the trainable parameters, grouped by what decays."""
    trainable = [(name, parameter) for name, parameter in weights if parameter.requires_grad]
    if not trainable:
        raise ValueError("every parameter is frozen; shorten learner.freeze")
    decay = {
        ParameterKind.MATRICES: config.weight_decay,
        ParameterKind.EMBEDDINGS: config.weight_decay if config.decay_embeddings else 0.0,
        ParameterKind.NORMS_AND_BIASES: 0.0,
    }
    groups = [
        {"params": params, "weight_decay": decay[kind], "name": kind.value}
        for kind in ParameterKind
        if (params := [parameter for name, parameter in trainable if parameter_kind(name, parameter) is kind])
    ]
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)


def parameter_kind(name: str, parameter: Tensor) -> ParameterKind:
    """Which optimizer group a parameter belongs to."""
    if parameter.ndim < 2:
        return ParameterKind.NORMS_AND_BIASES
    return ParameterKind.EMBEDDINGS if "embed" in name else ParameterKind.MATRICES


def describe_nonfinite(weights: Iterable[tuple[str, nn.Parameter]]) -> str:
    """Where the gradients are not finite: "norms and biases: model.norm.weight and 2 more".

    Each rank looks at its own shards, so all must ask together.
    """
    named = [(name, parameter) for name, parameter in weights if parameter.grad is not None]
    is_bad = torch.tensor([not bool(torch.isfinite(_local(p.grad)).all()) for _, p in named], dtype=torch.int32)
    if dist.is_initialized() and dist.get_world_size() > 1:
        is_bad = is_bad.to(named[0][1].device)
        dist.all_reduce(is_bad, dist.ReduceOp.MAX)
    by_kind: dict[ParameterKind, list[str]] = {}
    for (name, parameter), bad in zip(named, is_bad.tolist(), strict=True):
        if bad:
            by_kind.setdefault(parameter_kind(name, parameter), []).append(name)
    if not by_kind:
        return "the norm alone: every gradient is finite, their sum of squares overflows"
    return "; ".join(
        f"{kind.value}: {names[0]}" + (f" and {len(names) - 1} more" if len(names) > 1 else "")
        for kind, names in by_kind.items()
    )


def _local(gradient: Tensor | None) -> Tensor:
    assert gradient is not None
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def learning_rate(config: LearnerConfig, step: int) -> float:
    """The rate of optimizer step `step`, counted from 0.

    lr 1, warmup_steps 4: 0.25, 0.5, 0.75, 1.0, then the schedule.
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.schedule is Schedule.CONSTANT or config.total_steps is None:
        return config.lr
    done = min(1.0, (step - config.warmup_steps) / (config.total_steps - config.warmup_steps))
    share = 1 - done if config.schedule is Schedule.LINEAR else 0.5 * (1 + math.cos(math.pi * done))
    return config.lr * (config.final_lr_ratio + (1 - config.final_lr_ratio) * share)
