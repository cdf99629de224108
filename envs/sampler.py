"""The Sampler Protocol: prompt token ids in, Completion out.

Invariant: a Completion's lists are equally long; log-probabilities belong to the distribution that was sampled from.
Called by conversations (envs/conversation.py); implemented by the inference pool (actors/) and tests/fakes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from trajectories.schema import VersionSpan


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to sample a reply."""

    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps every token."""
    max_tokens: int = 256
    """At most this many new tokens a reply."""
    seed: int | None = None
    """Makes sampling repeatable: each reply of each rollout gets a seed of its own from this one. Costs speed."""

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise ValueError(f"temperature must be >= 0, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")
        if self.top_k < 0:
            raise ValueError(f"top_k must be >= 0 (0 keeps every token), got {self.top_k}")
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be >= 1, got {self.max_tokens}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What one call sampled."""

    ids: tuple[int, ...]
    """Sampled ids, the stop token included."""
    logprobs: tuple[float, ...]
    spans: tuple[VersionSpan, ...]
    finish_reason: str
    """"stop" or "length"."""

    def __post_init__(self) -> None:
        spanned = sum(span.num_tokens for span in self.spans)
        if not len(self.ids) == len(self.logprobs) == spanned:
            raise ValueError(f"{len(self.ids)} ids, {len(self.logprobs)} logprobs, spans over {spanned} tokens")


class Sampler(Protocol):
    """Whoever samples replies. Raises SamplerError when no Completion came within its deadline."""

    async def sample(
        self, prompt_ids: Sequence[int], params: SamplingParams, *, stop_ids: Sequence[int], key: str
    ) -> Completion:
        """One Completion; `key` is the trajectory id, for sticky routing."""
        ...
