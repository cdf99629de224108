"""LearnerConfig and LossConfig: the numbers of optimisation, checked where they are written down.

Invariant: importing this loads no torch, so recipes can parse and print a config in no time.
Composed by recipes; read by learners/learner.py and learners/losses.py.
"""

import math
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Self


class Precision(StrEnum):
    """The dtype of weights and activations in forward and backward; master weights and optimizer are always float32."""

    FP32 = "fp32"
    BF16 = "bf16"


class AttentionKernel(StrEnum):
    """What computes attention."""

    BUCKETS = "buckets"
    """PyTorch's own, over Samples of like length at once; runs everywhere."""
    FLASH = "flash"
    """flash-attn's variable-length kernel: GPUs, bf16, the package installed."""


class Schedule(StrEnum):
    """How the learning rate goes on after warm-up."""

    CONSTANT = "constant"
    LINEAR = "linear"
    COSINE = "cosine"


class AdvantageKind(StrEnum):
    """What a member's reward is compared with; formulas in learners/advantages.py."""

    LEAVE_ONE_OUT = "leave_one_out"
    """RLOO: the mean of the other members."""
    GROUP_MEAN = "group_mean"
    """Dr. GRPO: the mean of the Group."""
    GROUP_MEAN_OVER_STD = "group_mean_over_std"
    """GRPO: the mean of the Group, in units of its standard deviation."""
    BATCH_NORMALIZED = "batch_normalized"
    """REINFORCE++: mean and standard deviation of the whole step."""
    GROUP_MEAN_OVER_BATCH_STD = "group_mean_over_batch_std"
    """REINFORCE++-baseline: the mean of the Group, in units of the step's standard deviation."""


class LossKind(StrEnum):
    """What is minimised; formulas in learners/losses.py."""

    CROSS_ENTROPY = "cross_entropy"
    """SFT: -log p of each trained token."""
    REINFORCE = "reinforce"
    """Policy gradient without correction; right only when every token was sampled at the current version."""
    CLIPPED = "clipped"
    """PPO's clipped ratio against the recorded log-probabilities, with dual clip; the default with staleness."""
    TRUNCATED = "truncated"
    """REINFORCE times the importance ratio, truncated from above."""
    MASKED = "masked"
    """REINFORCE times the importance ratio, without the tokens whose ratio leaves a range (IcePop)."""


class RatioLevel(StrEnum):
    """Of what the importance ratio is taken."""

    TOKEN = "token"
    """Each token's own: low variance, biased."""
    SEQUENCE = "sequence"
    """The product over a Sample's trained tokens, shared by all of them: unbiased, and far from 1 when it is long."""


class Aggregation(StrEnum):
    """How token losses become the loss of a step; a sequence is a Trajectory, in SFT a Sample."""

    TOKEN_MEAN = "token_mean"
    """Every trained token counts the same, so long sequences count more."""
    SEQUENCE_MEAN = "sequence_mean"
    """Every sequence counts the same: the mean over sequences of the mean over their tokens."""
    SEQUENCE_MEAN_TOKEN_SUM = "sequence_mean_token_sum"
    """The mean over sequences of the sum over their tokens: the gradient of the expected reward itself."""


class KlEstimator(StrEnum):
    """How the divergence from the reference is estimated at each token; formulas in learners/kl.py."""

    K1 = "k1"
    K2 = "k2"
    K3 = "k3"


@dataclass(frozen=True, slots=True, kw_only=True)
class LossConfig:
    """Which loss, and its constants."""

    kind: LossKind = LossKind.CLIPPED
    aggregation: Aggregation = Aggregation.TOKEN_MEAN
    ratio_level: RatioLevel = RatioLevel.TOKEN
    """CLIPPED, TRUNCATED, MASKED: of what the ratio is taken."""
    clip_low: float = 0.2
    """CLIPPED: no gradient below a ratio of 1 - clip_low where it would push lower still."""
    clip_high: float = 0.2
    """CLIPPED: no gradient above a ratio of 1 + clip_high where it would push higher still."""
    dual_clip: float | None = 3.0
    """CLIPPED: for a negative advantage the loss is at most dual_clip * |advantage| (arXiv 1912.09729); None: no such
    bound."""
    truncation: float = 2.0
    """TRUNCATED: largest importance weight."""
    mask_low: float = 0.5
    """MASKED: tokens with a smaller ratio are left out."""
    mask_high: float = 5.0
    """MASKED: tokens with a larger ratio are left out."""
    kl_coef: float = 0.0
    """Weight of the divergence from the reference policy, added to each token's loss; 0 keeps no reference."""
    kl_estimator: KlEstimator = KlEstimator.K3
    temperature: float = 1.0
    """Divides the logits; must be the temperature that was sampled with."""

    def __post_init__(self) -> None:
        if not 0 <= self.clip_low < 1:
            raise ValueError(f"clip_low must be in [0, 1), got {self.clip_low}")
        if self.clip_high < 0:
            raise ValueError(f"clip_high must be >= 0, got {self.clip_high}")
        if self.dual_clip is not None and self.dual_clip <= 1 + self.clip_high:
            raise ValueError(f"dual_clip must exceed 1 + clip_high = {1 + self.clip_high:g}, got {self.dual_clip}")
        if self.truncation <= 0:
            raise ValueError(f"truncation must be > 0, got {self.truncation}")
        if not 0 <= self.mask_low < 1 < self.mask_high:
            raise ValueError(f"mask_low and mask_high must lie around 1, got {self.mask_low} and {self.mask_high}")
        if self.kl_coef < 0:
            raise ValueError(f"kl_coef must be >= 0, got {self.kl_coef}")
        if self.temperature <= 0:
            raise ValueError(f"temperature must be > 0 to train what was sampled, got {self.temperature}")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraConfig:
    """Low-rank adapters (arXiv 2106.09685): W + (alpha / rank) B A, of which only A and B are trained and saved."""

    rank: int = 0
    """Width of an adapter; 0 trains the weights themselves."""
    alpha: float = 32.0
    """Scale: an adapter's output is multiplied by alpha / rank."""
    targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    """Names of the linear maps that get an adapter."""

    def __post_init__(self) -> None:
        if self.rank < 0 or self.alpha <= 0:
            raise ValueError(f"lora.rank must be >= 0 and lora.alpha > 0, got {self.rank} and {self.alpha}")
        if self.rank and not self.targets:
            raise ValueError("lora.targets is empty: name the linear maps to adapt, such as q_proj v_proj")
        if barred := {"lm_head", "embed_tokens"} & set(self.targets):
            raise ValueError(f"lora.targets may name maps of the decoder's layers only, not {sorted(barred)[0]}")


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerConfig:
    """How a Learner trains."""

    lr: float = 5e-4
    """Peak learning rate."""
    schedule: Schedule = Schedule.CONSTANT
    warmup_steps: int = 0
    """Optimizer steps over which the rate rises linearly to `lr`."""
    warmup_ratio: float = 0.0
    """The same as a share of `total_steps`, rounded up; excludes warmup_steps."""
    total_steps: int | None = None
    """Optimizer steps at which linear and cosine schedules end; recipes that know their end fill it in."""
    final_lr_ratio: float = 0.0
    """Where linear and cosine schedules end, as a share of `lr`."""
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    """Applies to matrices only, never to norms and biases."""
    decay_embeddings: bool = True
    """Whether weight decay applies to the embedding (and to an output layer tied to it) too."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this norm over all parameters and ranks."""
    precision: Precision = Precision.FP32
    max_tokens: int = 8192
    """Tokens of a micro-batch; no Sample may be longer."""
    chunk_tokens: int = 512
    """Rows of logits that exist at once."""
    freeze: tuple[str, ...] = ()
    """Parameters whose name contains one of these are not trained; "embed_tokens" freezes a tied lm_head too."""
    activation_checkpointing: bool = False
    """Recompute each layer in the backward: less memory, a third more compute."""
    cpu_offload: bool = False
    """Keep weights, gradients and optimizer state of a GPU's learner in host memory, and step there."""
    attention: AttentionKernel = AttentionKernel.BUCKETS
    liger: bool = False
    """Use Liger's kernels for norms, rotary embedding and MLPs: GPUs, the package installed."""
    sequence_parallel: int = 1
    """So many neighbouring ranks share each micro-batch, for contexts that are too long for one; divides the ranks."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    max_nonfinite_steps: int = 10
    """So many steps with a non-finite gradient in a row end the run."""
    reference: Path | None = None
    """Hugging Face directory of the frozen policy for a loss with kl_coef; None: the recipe's starting policy."""

    def __post_init__(self) -> None:
        if self.lr <= 0:
            raise ValueError(f"lr must be > 0, got {self.lr}")
        if self.warmup_steps < 0:
            raise ValueError(f"warmup_steps must be >= 0, got {self.warmup_steps}")
        if not 0 <= self.warmup_ratio < 1 or (self.warmup_ratio and self.warmup_steps):
            raise ValueError(
                f"warmup_ratio must be in [0, 1) and excludes warmup_steps, got {self.warmup_ratio} and "
                f"{self.warmup_steps}"
            )
        if self.total_steps is not None and self.schedule is not Schedule.CONSTANT:
            self._require_room_after_warm_up(self.total_steps)
        if not 0 <= self.final_lr_ratio <= 1:
            raise ValueError(f"final_lr_ratio must be in [0, 1], got {self.final_lr_ratio}")
        if self.max_grad_norm <= 0:
            raise ValueError(f"max_grad_norm must be > 0 (a large value never clips), got {self.max_grad_norm}")
        if self.max_tokens < 2 or self.chunk_tokens < 1:
            raise ValueError(
                f"max_tokens must be >= 2 and chunk_tokens >= 1, got {self.max_tokens} and {self.chunk_tokens}"
            )
        if self.sequence_parallel < 1:
            raise ValueError(f"sequence_parallel must be >= 1, got {self.sequence_parallel}")
        if self.attention is AttentionKernel.FLASH and self.precision is not Precision.BF16:
            raise ValueError("attention=flash computes in half precision only; set precision=bf16")
        if self.lora.rank and self.freeze:
            raise ValueError("lora freezes every weight of the model itself; leave freeze empty")
        if self.max_nonfinite_steps < 1:
            raise ValueError(f"max_nonfinite_steps must be >= 1, got {self.max_nonfinite_steps}")

    @property
    def needs_total_steps(self) -> bool:
        """Whether the rate depends on where the run ends."""
        return self.schedule is not Schedule.CONSTANT or self.warmup_ratio > 0

    def for_run_of(self, num_steps: int | None) -> Self:
        """This config with total_steps, where the rate depends on it and none was given, and warmup_steps counted.

        ValueError when it depends on it and the run has no known end. 250 steps, warmup_ratio 0.1 -> warmup_steps 25.
        """
        if not self.needs_total_steps:
            return self
        total_steps = self.total_steps if self.total_steps is not None else num_steps
        if total_steps is None:
            raise ValueError(
                f"a {self.schedule} schedule with warmup_ratio {self.warmup_ratio:g} needs to know where the run ends; "
                "give learner.total_steps, or a limit in steps or epochs"
            )
        warmup_steps = math.ceil(self.warmup_ratio * total_steps) or self.warmup_steps
        return replace(self, total_steps=total_steps, warmup_steps=warmup_steps, warmup_ratio=0.0)

    def _require_room_after_warm_up(self, total_steps: int) -> None:
        if total_steps <= self.warmup_steps:
            raise ValueError(
                f"a {self.schedule} schedule needs total_steps > warmup_steps ({self.warmup_steps}), "
                f"got {total_steps}; set learner.total_steps to the steps of the run"
            )
