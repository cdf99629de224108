"""OpenThoughts-Agent, SFT of Qwen3-32B: the values of the paper (arXiv 2606.24855, appendix) as defaults.

    python -m recipes.openthoughts.sft_32b --policy /models/Qwen3-32B --data /data/OpenThoughts-Agent-SFT-100K/data

As recipes/openthoughts/sft_8b.py, but for the gradient norm: the appendix names 1 for the 8B only, so this one takes
1e-4, from the published 32B configuration. That configuration offloads optimizer state to the host, which 96 GPUs of 96
GB do not need: 16 bytes a parameter are 5.5 GB on each.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from learners.config import LearnerConfig
from recipes import sft
from recipes.launch import launch
from recipes.openthoughts import sft_8b


@dataclass(frozen=True, kw_only=True)
class Config(sft_8b.Config):
    """Fine-tune Qwen3-32B on OpenThoughts-Agent's traces."""

    run: Path = Path("runs/openthoughts-sft-32b")
    learner: LearnerConfig = field(default_factory=lambda: sft_8b.learner_config(max_grad_norm=1e-4))


async def main(config: Config) -> dict[str, Any]:
    """Fine-tunes and returns the summary that it wrote."""
    return await sft.main(config)


if __name__ == "__main__":
    launch(Config, main)
