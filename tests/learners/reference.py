"""A plain training step to compare with: one Sample at a time, whole logits, no FSDP, no packing."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from trajectories.samples import Sample


class PlainLearner:
    """transformers, torch.optim.AdamW and nothing else."""

    def __init__(self, model: Path, *, lr: float, betas: tuple[float, float] = (0.9, 0.95)) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="sdpa")
        self.model.train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr, betas=betas, weight_decay=0.0)

    def logprobs(self, sample: Sample, temperature: float = 1.0) -> Tensor:
        """[N] log-probabilities of the trained tokens."""
        ids = torch.from_numpy(sample.ids).long()
        log_probs = (self.model(ids[None]).logits[0] / temperature).log_softmax(-1)
        trained = torch.from_numpy(sample.mask).nonzero()[:, 0]
        return log_probs[trained - 1, ids[trained]]

    def cross_entropy(self, samples: Sequence[Sample]) -> float:
        """Adds the gradients of the token mean over all Samples; returns it."""
        logprobs = torch.cat([self.logprobs(sample) for sample in samples])
        loss = -logprobs.sum() / len(logprobs)
        loss.backward()
        return loss.item()

    def clipped(self, samples: Sequence[Sample], advantages: Sequence[float], num_tokens: int) -> float:
        """Adds the gradients of PPO's clipped loss (0.2, dual clip 3) over all Samples; returns it."""
        total = torch.zeros(())
        for sample, advantage in zip(samples, advantages, strict=True):
            ratio = (self.logprobs(sample) - torch.from_numpy(sample.logprobs[sample.mask])).exp()
            objective = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
            if advantage < 0:
                objective = torch.clamp(objective, min=3 * advantage)
            total = total - objective.sum() / num_tokens
        total.backward()
        return total.item()

    def gradients(self) -> dict[str, Tensor]:
        return {name: p.grad.clone() for name, p in self.model.named_parameters() if p.grad is not None}

    def step(self, max_grad_norm: float) -> float:
        """One AdamW step; returns the gradient norm."""
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(norm)
