"""Export: Trajectories as conversation JSONL that TRL and LLaMA-Factory read.

Invariant: a conversation alternates user and assistant, begins with user and ends with assistant; the file appears
whole or not at all. Called by recipes/export and recipes/demo.
"""

import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from trajectories.schema import DEFAULT_TREATMENTS, Outcome, Trajectory, Treatment
from trajectories.validity import SOLVED_REWARD, member_reward


class ConversationFormat(StrEnum):
    """Which trainer reads the file."""

    MESSAGES = "messages"
    """TRL: {"messages": [{"role": "user", "content": ...}, {"role": "assistant", "content": ...}]}."""
    SHAREGPT = "sharegpt"
    """LLaMA-Factory: {"conversations": [{"from": "human", "value": ...}, {"from": "gpt", "value": ...}]}."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportCounts:
    """What became of the Trajectories: they add up to `read`."""

    read: int
    written: int
    excluded: int
    """Their Outcome counts in no sum (a sandbox that failed, a cancelled rollout)."""
    unsolved: int
    """Below `min_reward`."""
    short: int
    """Under `min_turns` Turns."""


def export_conversations(
    trajectories: Iterable[Trajectory],
    path: Path,
    *,
    format: ConversationFormat = ConversationFormat.MESSAGES,
    min_reward: float | None = SOLVED_REWARD,
    min_turns: int = 1,
    treatments: Mapping[Outcome, Treatment] = DEFAULT_TREATMENTS,
) -> ExportCounts:
    """Writes one line a Trajectory that passes the filters to `path`, replacing it once all are written.

    `min_reward` 1 keeps the solved ones, None keeps every valid one. A last observation that nobody answered is left
    out. Columns beside the conversation: task_id, trajectory_id, reward, outcome, num_turns, model.
    """
    if min_turns < 1:
        raise ValueError(f"min_turns must be >= 1: a conversation needs a reply, got {min_turns}")
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    counts: Counter[str] = Counter()
    try:
        with open(partial, "w", encoding="utf-8") as file:
            for trajectory in trajectories:
                fate = _fate(trajectory, min_reward, min_turns, treatments)
                counts[fate] += 1
                if fate == "written":
                    file.write(_line(trajectory, format, treatments) + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    return ExportCounts(
        read=counts.total(),
        written=counts["written"],
        excluded=counts["excluded"],
        unsolved=counts["unsolved"],
        short=counts["short"],
    )


def _fate(
    trajectory: Trajectory, min_reward: float | None, min_turns: int, treatments: Mapping[Outcome, Treatment]
) -> str:
    reward = member_reward(trajectory, treatments)
    if reward is None:
        return "excluded"
    if min_reward is not None and reward < min_reward:
        return "unsolved"
    return "short" if len(trajectory.turns) < min_turns else "written"


def _line(trajectory: Trajectory, format: ConversationFormat, treatments: Mapping[Outcome, Treatment]) -> str:
    messages = trajectory.messages()
    if messages[-1]["role"] == "user":
        messages.pop()
    row: dict[str, Any] = {
        "task_id": trajectory.task_id,
        "trajectory_id": trajectory.id,
        "reward": member_reward(trajectory, treatments),
        "outcome": trajectory.outcome.value,
        "num_turns": len(trajectory.turns),
        "model": trajectory.provenance.get("sampler", ""),
    }
    match format:
        case ConversationFormat.MESSAGES:
            row = {"messages": messages} | row
        case ConversationFormat.SHAREGPT:
            speakers = {"user": "human", "assistant": "gpt"}
            turns = [{"from": speakers[message["role"]], "value": message["content"]} for message in messages]
            row = {"conversations": turns} | row
    # Lone surrogates (bytes of a terminal that are no UTF-8) have no place in JSON: other readers refuse them.
    return json.dumps(row, ensure_ascii=False, allow_nan=False).encode("utf-8", "replace").decode()
