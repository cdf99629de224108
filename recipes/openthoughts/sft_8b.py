"""OpenThoughts-Agent, SFT of Qwen3-8B: the values of the paper (arXiv 2606.24855, appendix) as defaults.

    python -m recipes.openthoughts.sft_8b --policy /models/Qwen3-8B --data /data/OpenThoughts-Agent-SFT-100K/data

Held here: learning rate 4e-5, cosine, warm-up over a tenth, 7 epochs, 96 conversations a step, 32,768 tokens, AdamW
(0.9, 0.98), weight decay 0.04, gradient norm 1, the order of the data kept, conversations of any reward, thinking kept
in the history (decision 039), one GPU for each conversation of a step.

Where sources disagree. Gradient norm: 1 in the appendix, 1e-4 in the published 8B configuration, 1e-3 in its variant
for 100,000 conversations. Weight decay: 0.04 in the appendix and that variant, none in the configuration. Epochs: 7,
but 5 in that variant. The configurations shuffle, the appendix does not.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import tyro

from actors.cluster import Resources
from actors.learner_group import LearnerGroupConfig
from learners.config import LearnerConfig, Precision, Schedule
from recipes import sft
from recipes.demonstrations import Overlong
from recipes.launch import launch

TEMPLATE = Path(__file__).with_name("chatml.jinja")
"""Qwen3's own messages without tools, every one of them kept as it was written."""


def learner_config(*, max_grad_norm: float) -> LearnerConfig:
    """What both sizes share."""
    return LearnerConfig(
        lr=4e-5,
        schedule=Schedule.COSINE,
        warmup_ratio=0.1,
        betas=(0.9, 0.98),
        weight_decay=0.04,
        max_grad_norm=max_grad_norm,
        precision=Precision.BF16,
        max_tokens=32_768,
        activation_checkpointing=True,
    )


@dataclass(frozen=True, kw_only=True)
class Config(sft.Config):
    """Fine-tune Qwen3-8B on OpenThoughts-Agent's traces."""

    run: Path = Path("runs/openthoughts-sft-8b")
    data: tuple[Path, ...] = (Path("OpenThoughts-Agent-SFT-100K/data"),)
    min_reward: float | None = None
    overlong: Overlong = Overlong.CUT
    shuffle: bool = False
    template: Path | None = TEMPLATE
    epochs: float | None = 7.0
    batch_size: int = 96
    learner: LearnerConfig = field(default_factory=lambda: learner_config(max_grad_norm=1.0))
    learners: Annotated[LearnerGroupConfig, tyro.conf.arg(name="learner")] = field(
        default_factory=lambda: LearnerGroupConfig(num_ranks=96, resources=Resources(num_cpus=8, num_gpus=1, threads=8))
    )


async def main(config: Config) -> dict[str, Any]:
    """Fine-tunes and returns the summary that it wrote."""
    return await sft.main(config)


if __name__ == "__main__":
    launch(Config, main)
