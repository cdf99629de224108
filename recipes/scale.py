"""Scale: gives a run more or fewer rollout workers and inference servers while it runs.

The wish is left in the run directory, from where the run (rloo, harvest, evaluate) takes it within seconds; what it
did, or why it could not, is in its events.jsonl. A worker that goes ends its Groups first, a server what it samples.

    python -m recipes.scale runs/rloo --workers 4 --servers 2
"""

import json
from dataclasses import dataclass
from pathlib import Path

import tyro

from recipes.elastic import Wish, ask
from recipes.launch import launch


@dataclass(frozen=True, kw_only=True)
class Config:
    """Change how many workers and servers a run has."""

    run: tyro.conf.Positional[Path]
    """Run directory."""
    workers: int | None = None
    """Rollout workers from now on."""
    servers: int | None = None
    """Inference servers from now on."""

    def __post_init__(self) -> None:
        if self.workers is self.servers is None:
            raise ValueError("nothing to change: give --workers, --servers or both")
        Wish(workers=self.workers, servers=self.servers)


async def main(config: Config) -> None:
    """Leaves the wish and says what now holds."""
    path = config.run / "config.json"
    if not path.exists() or "rollouts" not in json.loads(path.read_text())["config"]:
        raise ValueError(f"{config.run} is no run with rollouts: give the run directory of rloo, harvest or evaluate")
    wish = ask(config.run, Wish(workers=config.workers, servers=config.servers))
    counts = {"workers": wish.workers, "servers": wish.servers}
    wished = ", ".join(f"{count} {name}" for name, count in counts.items() if count is not None)
    print(f"{config.run} shall have {wished}; see {config.run / 'events.jsonl'}")


if __name__ == "__main__":
    launch(Config, main)
