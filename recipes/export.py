"""Export: a store's Trajectories as conversation JSONL that TRL and LLaMA-Factory read, or as a Harbor job directory.

python -m recipes.export --data runs/harvest --out harvest.jsonl
python -m recipes.export --data runs/harvest --out sharegpt.jsonl --format sharegpt
python -m recipes.export --data runs/harvest --out jobs/harvest --format harbor
"""

import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Any

from recipes.launch import launch
from trajectories.export import ConversationFormat, export_conversations
from trajectories.harbor_job import HarborJob, write_harbor_job
from trajectories.schema import Trajectory
from trajectories.store import scan


class ExportFormat(StrEnum):
    """Who reads the export."""

    MESSAGES = "messages"
    SHAREGPT = "sharegpt"
    HARBOR = "harbor"


@dataclass(frozen=True, kw_only=True)
class Config:
    """Export Trajectories as conversations, or as a Harbor job."""

    data: tuple[Path, ...] = (Path("runs/harvest"),)
    """Run directories whose stores hold the Trajectories."""
    out: Path = Path("conversations.jsonl")
    """A file; with format harbor the job directory."""
    format: ExportFormat = ExportFormat.MESSAGES
    """messages (TRL), sharegpt (LLaMA-Factory) or harbor (`harbor view`, `harbor traces export`)."""
    min_reward: float | None = 1.0
    """Keep Trajectories with at least this reward; None keeps all. Of conversations: a Harbor job holds every one."""
    min_turns: int = 1
    """Of conversations, too."""

    def __post_init__(self) -> None:
        if self.format is ExportFormat.HARBOR and (self.min_reward != 1.0 or self.min_turns != 1):
            raise ValueError(
                "a Harbor job holds every trajectory: leave out --min-reward and --min-turns, filter where it is read "
                "(harbor traces export --filter success)"
            )


async def main(config: Config) -> dict[str, Any]:
    """Exports and returns how many Trajectories were read and written."""
    if config.format is ExportFormat.HARBOR:
        num_trials = write_harbor_job(_trajectories(config.data), config.out, harbor_job_of(config.data[0]))
        print(f"exported {num_trials} trials to {config.out}; look at them with: harbor view {config.out.parent}")
        return {"written": num_trials}
    counts = export_conversations(
        _trajectories(config.data),
        config.out,
        format=ConversationFormat(config.format.value),
        min_reward=config.min_reward,
        min_turns=config.min_turns,
    )
    print(f"exported {counts.written} of {counts.read} trajectories to {config.out}")
    return dataclasses.asdict(counts)


def harbor_job_of(run: Path) -> HarborJob:
    """What a run directory says of the job: its task set, its attempts, when it began; it ends now."""
    path = run / "config.json"
    if not path.is_file():
        raise ValueError(f"{run}: no config.json; give the directory of a run")
    record = json.loads(path.read_text())
    config = record["config"]
    return HarborJob(
        tasks=config.get("tasks") or run.name,
        num_attempts=config.get("attempts") or 1,
        began=datetime.fromtimestamp(record["time"], UTC),
        ended=datetime.now(UTC),
    )


def _trajectories(runs: tuple[Path, ...]) -> Iterator[Trajectory]:
    return (each for run in runs for _, group in scan(run / "store") for each in group.trajectories)


if __name__ == "__main__":
    launch(Config, main)
