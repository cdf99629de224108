"""The numbers that go with each demo policy; everything else is the recipes' defaults.

Invariant: thresholds, rates and step counts here were chosen on tasks of the training split.
"""

from dataclasses import dataclass, field

from actors.inference_config import InferencePoolConfig
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
    rl_learner: LearnerConfig
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
}
