"""What a run directory holds, for the tests that look into one."""

import json
from pathlib import Path
from typing import Any

from trajectories.schema import Group, PolicyVersion
from trajectories.store import scan


def stored(run: Path) -> dict[str, Group]:
    return {group.id: group for _, group in scan(run / "store")}


def rows(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def versions(group: Group) -> set[PolicyVersion]:
    turns = [turn for trajectory in group.trajectories for turn in trajectory.turns]
    return {span.version for turn in turns if turn.tokens for span in turn.tokens.spans}
