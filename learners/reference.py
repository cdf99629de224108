"""The frozen reference policy that a KL term compares with.

Invariant: it never gets a gradient, and answers for the same tokens at the same temperature as the learner.
Called by learners/learner.py when its config names one.
"""

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from learners.config import LearnerConfig, LoraConfig
from learners.model import PolicyNetwork, load_policy, reshard
from learners.packing import PackedBatch


class Reference:
    """A frozen copy, sharded over the ranks like the policy."""

    def __init__(self, config: LearnerConfig, model: Path, *, num_embeddings: int, world_size: int) -> None:
        """Loads the Hugging Face directory `model`; ValueError when it speaks of another number of tokens."""
        frozen = replace(config, freeze=(), activation_checkpointing=False, lora=LoraConfig())
        self._network = load_policy(frozen, model, world_size=world_size).requires_grad_(False).eval()
        ours = embedding_rows(self._network)
        if ours != num_embeddings:
            raise ValueError(
                f"the reference {model} has {ours} embeddings, the policy {num_embeddings}; give one of the same kind"
            )

    @torch.no_grad()
    def logprobs(self, batch: PackedBatch, temperature: float) -> Tensor:
        """[N] float32 log-probabilities of the trained tokens, computed in chunks."""
        logprobs_N, _ = self._network(batch, temperature)
        reshard(self._network)
        return logprobs_N


def embedding_rows(network: PolicyNetwork) -> int:
    """Tokens that it knows: rows of its head over all ranks."""
    return network.causal_lm.lm_head.weight.shape[0]
