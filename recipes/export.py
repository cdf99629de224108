"""Export: a store's Trajectories as conversation JSONL that TRL and LLaMA-Factory read.

python -m recipes.export --data runs/harvest --out harvest.jsonl
python -m recipes.export --data runs/harvest --out sharegpt.jsonl --format sharegpt
"""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipes.launch import launch
from trajectories.export import ConversationFormat, export_conversations
from trajectories.store import scan


@dataclass(frozen=True, kw_only=True)
class Config:
    """Export Trajectories as conversations."""

    data: tuple[Path, ...] = (Path("runs/harvest"),)
    """Run directories whose stores hold the Trajectories."""
    out: Path = Path("conversations.jsonl")
    format: ConversationFormat = ConversationFormat.MESSAGES
    """messages (TRL) or sharegpt (LLaMA-Factory)."""
    min_reward: float | None = 1.0
    """Keep Trajectories with at least this reward; None keeps all."""
    min_turns: int = 1


async def main(config: Config) -> dict[str, Any]:
    """Exports and returns how many Trajectories were read and written."""
    trajectories = (
        trajectory for run in config.data for _, group in scan(run / "store") for trajectory in group.trajectories
    )
    counts = export_conversations(
        trajectories, config.out, format=config.format, min_reward=config.min_reward, min_turns=config.min_turns
    )
    print(f"exported {counts.written} of {counts.read} trajectories to {config.out}")
    return dataclasses.asdict(counts)


if __name__ == "__main__":
    launch(Config, main)
