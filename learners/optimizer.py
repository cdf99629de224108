"""AdamW and its learning-rate schedule.

Invariant: the rate is a function of the step alone, so a resumed run continues it without any state.
Called by learners/learner.py.
"""

import math
from collections.abc import Iterable

import torch
from torch import nn

from learners.config import LearnerConfig, Schedule


class NonFiniteGradients(Exception):
    """So many gradients in a row were not finite that training cannot go on."""

    def __init__(self, step: int, num_in_a_row: int) -> None:
        super().__init__(
            f"step {step}: the gradient was not finite {num_in_a_row} times in a row; lower learner.lr or "
            "restart from an earlier checkpoint"
        )


def build_optimizer(config: LearnerConfig, weights: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.AdamW:
    """AdamW over the trainable parameters; weight decay on matrices only."""
    trainable = [parameter for _, parameter in weights if parameter.requires_grad]
    if not trainable:
        raise ValueError("every parameter is frozen; shorten learner.freeze")
    groups = [
        {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]], lr=config.lr, betas=config.betas, eps=config.eps, fused=True
    )


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
