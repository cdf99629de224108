"""The numbers that go with each demo policy; everything else is the recipes' defaults.

Invariant: thresholds, rates and step counts here were chosen on tasks of the training split.
"""

from dataclasses import dataclass, field

from actors.cluster import Resources
from actors.inference_config import DType, InferencePoolConfig, ServerConfig
from actors.learner_group import LearnerGroupConfig
from envs.build import EpisodeConfig
from envs.sampler import SamplingParams
from envs.terminus2.harness import Malformed
from learners.config import LearnerConfig
from recipes.sft import StopRule


@dataclass(frozen=True, kw_only=True)
class Preset:
    """How one policy goes through the demo."""

    num_demonstrations: int
    """Tasks that the oracle plays."""
    sft_epochs: float
    """At most so many passes, should the stop rule never be met."""
    sft_batch_size: int
    stop: StopRule
    sft_learner: LearnerConfig
    sft_ranks: LearnerGroupConfig = field(default_factory=LearnerGroupConfig)
    rl_learner: LearnerConfig
    num_heldout: int = 480
    """Held-out Tasks of each evaluation."""
    num_taught: int
    """Tasks that the trained policy plays as teacher."""
    rl_steps: int
    groups_per_step: int
    group_size: int
    max_staleness: int
    episode: EpisodeConfig
    pool: InferencePoolConfig = field(default_factory=InferencePoolConfig)


PRESETS = {
    "tiny": Preset(
        num_demonstrations=1200,
        sft_epochs=60,
        sft_batch_size=32,
        stop=StopRule(probability=0.42, every_steps=2),
        sft_learner=LearnerConfig(lr=3e-3, warmup_steps=20),
        rl_learner=LearnerConfig(lr=6e-4),
        num_taught=300,
        rl_steps=28,
        groups_per_step=32,
        group_size=8,
        max_staleness=1,
        episode=EpisodeConfig(
            malformed=Malformed.END, max_turns=6, context_tokens=512, sampling=SamplingParams(max_tokens=80)
        ),
    ),
    "smollm2": Preset(
        num_demonstrations=480,
        sft_epochs=4,
        sft_batch_size=16,
        stop=StopRule(probability=0.3, every_steps=3, num_demonstrations=36),
        sft_learner=LearnerConfig(lr=2e-4, warmup_steps=5, freeze=("embed_tokens",)),
        sft_ranks=LearnerGroupConfig(resources=Resources(threads=2)),
        rl_learner=LearnerConfig(lr=2e-5, freeze=("embed_tokens",), max_tokens=4096),
        num_heldout=80,
        num_taught=32,
        rl_steps=5,
        groups_per_step=8,
        group_size=8,
        max_staleness=1,
        episode=EpisodeConfig(
            malformed=Malformed.END, max_turns=6, context_tokens=768, sampling=SamplingParams(max_tokens=96)
        ),
        pool=InferencePoolConfig(
            server=ServerConfig(dtype=DType.BFLOAT16, max_num_seqs=64, kv_cache_gb=1.0, threads=2)
        ),
    ),
}
