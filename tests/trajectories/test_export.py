"""Export: both formats by example, the filters, and a file that is whole or absent."""

import json
from pathlib import Path

import pytest

from tests.trajectories.records import trajectory, turn
from trajectories.export import ConversationFormat, ExportCounts, export_conversations
from trajectories.schema import Outcome, Trajectory

TWO_TURNS = trajectory(turn(reply="ls", observation="a.txt"), turn(reply="done"), sampler="tiny-rloo")


def _rows(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_messages_are_what_trl_reads(tmp_path: Path):
    export_conversations([TWO_TURNS], tmp_path / "out.jsonl")
    assert _rows(tmp_path / "out.jsonl") == [
        {
            "messages": [
                {"role": "user", "content": "List the files."},
                {"role": "assistant", "content": "ls"},
                {"role": "user", "content": "a.txt"},
                {"role": "assistant", "content": "done"},
            ],
            "task_id": "t0",
            "trajectory_id": "g0-0",
            "reward": 1.0,
            "outcome": "completed",
            "num_turns": 2,
            "model": "tiny-rloo",
        }
    ]


def test_sharegpt_is_what_llama_factory_reads(tmp_path: Path):
    export_conversations([TWO_TURNS], tmp_path / "out.jsonl", format=ConversationFormat.SHAREGPT)
    assert _rows(tmp_path / "out.jsonl")[0]["conversations"] == [
        {"from": "human", "value": "List the files."},
        {"from": "gpt", "value": "ls"},
        {"from": "human", "value": "a.txt"},
        {"from": "gpt", "value": "done"},
    ]


@pytest.mark.parametrize("format", ConversationFormat)
def test_a_conversation_alternates_and_ends_with_a_reply(tmp_path: Path, format: ConversationFormat):
    ragged = trajectory(
        turn(reply="a", observation=""), turn(reply="b", observation="never answered"), outcome=Outcome.TURN_LIMIT
    )
    export_conversations([ragged], tmp_path / "out.jsonl", format=format)
    conversation = next(iter(_rows(tmp_path / "out.jsonl")[0].values()))
    assert isinstance(conversation, list)
    assert [list(message.values()) for message in conversation] == [
        [speaker, text]
        for speaker, text in zip(
            ["user", "assistant"] * 2 if format is ConversationFormat.MESSAGES else ["human", "gpt"] * 2,
            ["List the files.", "a", "", "b"],
            strict=True,
        )
    ]


MIXED = [
    TWO_TURNS,
    trajectory(turn(), reward=0.0),
    trajectory(turn(), reward=1.0),
    trajectory(turn(), outcome=Outcome.AGENT_ERROR, reward=1.0),
    trajectory(turn(), outcome=Outcome.SANDBOX_ERROR, reward=1.0),
    trajectory(reward=1.0),
]


@pytest.mark.parametrize(
    ("min_reward", "min_turns", "expected"),
    [
        (1.0, 1, ExportCounts(read=6, written=2, excluded=1, unsolved=2, short=1)),
        (1.0, 2, ExportCounts(read=6, written=1, excluded=1, unsolved=2, short=2)),
        (None, 1, ExportCounts(read=6, written=4, excluded=1, unsolved=0, short=1)),
    ],
)
def test_filters_by_reward_and_turns_and_counts_all(
    tmp_path: Path, min_reward: float | None, min_turns: int, expected: ExportCounts
):
    path = tmp_path / "out.jsonl"
    assert export_conversations(MIXED, path, min_reward=min_reward, min_turns=min_turns) == expected
    assert len(_rows(path)) == expected.written


def test_a_failed_export_leaves_the_old_file_and_nothing_else(tmp_path: Path):
    path = tmp_path / "out.jsonl"
    export_conversations([TWO_TURNS], path)
    before = path.read_text()

    def broken():
        yield TWO_TURNS
        raise OSError("the store went away")

    with pytest.raises(OSError, match="went away"):
        export_conversations(broken(), path)
    assert path.read_text() == before
    assert list(tmp_path.iterdir()) == [path]


def test_bytes_that_are_no_utf8_do_not_break_the_file(tmp_path: Path):
    strange: Trajectory = trajectory(turn(reply="caf\u00e9 \udc80\n\u2028"))
    export_conversations([strange], tmp_path / "out.jsonl")
    (line,) = (tmp_path / "out.jsonl").read_bytes().splitlines()
    assert json.loads(line)["messages"][1]["content"] == "café ?\n\u2028"


def test_a_conversation_without_a_reply_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="min_turns must be >= 1"):
        export_conversations([], tmp_path / "out.jsonl", min_turns=0)
