"""The records: Turn, Trajectory, Group and what they are made of.

Invariant: a record is built whole and checked where it is built, so whoever holds one may trust its lengths.
Called by everything: harnesses build Turns, the store writes Groups, learners read Samples made from them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType


class Outcome(StrEnum):
    """How a Trajectory ended."""

    COMPLETED = "completed"
    TURN_LIMIT = "turn_limit"
    CONTEXT_LIMIT = "context_limit"
    AGENT_TIMEOUT = "agent_timeout"
    AGENT_ERROR = "agent_error"
    SANDBOX_ERROR = "sandbox_error"
    VERIFIER_ERROR = "verifier_error"
    SAMPLER_ERROR = "sampler_error"
    CANCELLED = "cancelled"


class Treatment(StrEnum):
    """What an Outcome counts as."""

    SCORE = "score"
    """The Verifier's reward counts."""
    ZERO = "zero"
    """Reward 0, in the baseline and trained."""
    EXCLUDE = "exclude"
    """In no sum at all."""


DEFAULT_TREATMENTS: Mapping[Outcome, Treatment] = MappingProxyType(
    {
        Outcome.COMPLETED: Treatment.SCORE,
        Outcome.TURN_LIMIT: Treatment.SCORE,
        Outcome.CONTEXT_LIMIT: Treatment.SCORE,
        Outcome.AGENT_TIMEOUT: Treatment.SCORE,
        Outcome.AGENT_ERROR: Treatment.ZERO,
        Outcome.SANDBOX_ERROR: Treatment.EXCLUDE,
        Outcome.VERIFIER_ERROR: Treatment.EXCLUDE,
        Outcome.SAMPLER_ERROR: Treatment.EXCLUDE,
        Outcome.CANCELLED: Treatment.EXCLUDE,
    }
)


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class PolicyVersion:
    """Which weights: `n` optimizer steps behind them, within one lineage."""

    lineage: int
    """Starts at 0; every restore from a checkpoint starts the next one."""
    n: int
    """Number of optimizer steps behind the weights."""

    def __post_init__(self) -> None:
        if self.lineage < 0 or self.n < 0:
            raise ValueError(f"lineage and n must be >= 0, got lineage={self.lineage} n={self.n}")


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionSpan:
    """A run of sampled tokens that one policy version sampled."""

    version: PolicyVersion
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnTokens:
    """The exact tokens of one Turn, as the engine saw and sampled them.

    The full prompt of Turn k is `context[k-1][:prefix_len] + new_ids`, where `context[k-1]` is the full prompt of
    Turn k-1 followed by its sampled ids (empty before the first Turn). A prefix shorter than that context is a break.
    """

    prefix_len: int
    """How many ids of the previous context this Turn's prompt keeps."""
    new_ids: tuple[int, ...]
    """Prompt ids after the kept prefix."""
    sampled_ids: tuple[int, ...]
    """What the policy sampled, the stop token included."""
    logprobs: tuple[float, ...]
    """Natural-log probability of each sampled id under the distribution it was sampled from."""
    spans: tuple[VersionSpan, ...]
    """Policy versions of the sampled ids, in order; their lengths add up to len(sampled_ids)."""

    def __post_init__(self) -> None:
        if len(self.logprobs) != len(self.sampled_ids):
            raise ValueError(f"{len(self.sampled_ids)} sampled ids but {len(self.logprobs)} logprobs")
        spanned = sum(span.num_tokens for span in self.spans)
        if spanned != len(self.sampled_ids):
            raise ValueError(f"{len(self.sampled_ids)} sampled ids but version spans cover {spanned}")
        if self.prefix_len < 0:
            raise ValueError(f"prefix_len must be >= 0, got {self.prefix_len}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What replies of a remote endpoint cost, as it reported."""

    prompt_tokens: int
    completion_tokens: int
    cost_usd: float

    @property
    def num_tokens(self) -> int:
        """Prompt and completion together."""
        return self.prompt_tokens + self.completion_tokens

    def __add__(self, other: "Usage") -> "Usage":
        return Usage(
            prompt_tokens=self.prompt_tokens + other.prompt_tokens,
            completion_tokens=self.completion_tokens + other.completion_tokens,
            cost_usd=self.cost_usd + other.cost_usd,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One reply of the policy and what the world answered."""

    reply: str
    """The reply as text."""
    observation: str
    """What the world answered; "" when the rollout ended with this reply."""
    finish_reason: str
    """"stop", or "length" when the reply was cut at its token limit."""
    tokens: TurnTokens | None
    """Exact tokens; None when the replier gave none (the oracle, a remote endpoint without ids)."""
    sample_s: float = 0.0
    """Seconds the reply took."""
    execute_s: float = 0.0
    """Seconds from the reply to the observation."""
    usage: Usage | None = None
    """What a remote endpoint reported; None for everyone else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """The record of one rollout."""

    id: str
    task_id: str
    group_id: str
    member: int
    """Index within the Group, from 0."""
    prompt: str
    """The first user message."""
    turns: tuple[Turn, ...]
    outcome: Outcome
    reward: float | None
    """The Verifier's reward; None when it did not run or was not valid."""
    evidence: str = ""
    """What the Verifier printed, cut to its last 4,000 characters."""
    error: str = ""
    """For an Outcome that is an error: type and message."""
    timings_s: Mapping[str, float] = field(default_factory=dict[str, float])
    """Seconds by stage: "sandbox_start", "harness", "verifier", "sandbox_stop"."""
    provenance: Mapping[str, str] = field(default_factory=dict[str, str])
    """Free strings: harness, sampler (model), sandbox provider, task set, run."""

    def messages(self) -> list[dict[str, str]]:
        """The conversation as [{"role", "content"}, ...]: user prompt, then assistant and user in turn."""
        messages = [{"role": "user", "content": self.prompt}]
        for index, turn in enumerate(self.turns, start=1):
            messages.append({"role": "assistant", "content": turn.reply})
            if turn.observation or index < len(self.turns):  # an empty answer between two replies was said too
                messages.append({"role": "user", "content": turn.observation})
        return messages


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The Trajectories of one Task that share a baseline."""

    id: str
    task_id: str
    trajectories: tuple[Trajectory, ...]
