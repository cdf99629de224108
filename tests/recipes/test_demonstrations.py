"""Every kind of source becomes the same Samples; what is left out is counted or named; a restart reads them back."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from recipes.demonstrations import Demonstrations, Overlong, Selection, load_demonstrations
from tests.envs.tokens import tiny_renderer
from tests.trajectories.records import group, tokens, trajectory, turn
from trajectories.samples import trajectory_samples
from trajectories.schema import Outcome
from trajectories.store import StoreWriter, read_sample

ALL = Selection(min_reward=None, min_turns=1, limit=None, shuffle_seed=None, max_tokens=100, overlong=Overlong.REFUSE)
SAID = [("user", "u"), ("assistant", "a"), ("user", "v"), ("assistant", "b")]
MESSAGES = [{"role": role, "content": content} for role, content in SAID]
CALL = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": {"name": "bash"}}]}
THOUGHT = {"role": "assistant", "content": "42", "reasoning_content": "six times seven"}
SHAREGPT = [{"from": {"user": "human", "assistant": "gpt"}[role], "value": content} for role, content in SAID]


def write_jsonl(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_parquet(path: Path, *rows: dict[str, Any]) -> Path:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path)
    return path


def run_of(path: Path, *trajectories: Any) -> Path:
    with StoreWriter(path / "store", "test") as writer:
        writer.append(group(*trajectories))
    return path


async def load(tmp_path: Path, source: Path, selection: Selection = ALL) -> Demonstrations:
    return await load_demonstrations([source], selection, tiny_renderer(), tmp_path / "samples", lambda: None)


def texts(tmp_path: Path, demonstrations: Demonstrations) -> list[tuple[str, str]]:
    """(all, trained) text of each."""
    decode = tiny_renderer().tokenizer.decode
    samples = [read_sample(tmp_path / "samples", item.sample.location) for item in demonstrations.items]
    return [
        (decode(s.ids.tolist(), skip_special_tokens=False), decode(s.ids[s.mask].tolist(), skip_special_tokens=False))
        for s in samples
    ]


EXPECTED = ("<|user|>u<|end|><|assistant|>a<|end|><|user|>v<|end|><|assistant|>b<|end|>", "a<|end|>b<|end|>")


@pytest.mark.parametrize("write", [write_jsonl, write_parquet])
@pytest.mark.parametrize(
    "row",
    [
        {"messages": MESSAGES, "reward": 1.0},
        {"conversations": SHAREGPT},
        {"conversations": MESSAGES, "agent": "terminus-2", "episode": "episode-3", "result": "1.0"},
    ],
    ids=["messages", "sharegpt", "openthoughts"],
)
async def test_rows_of_every_form_become_the_same_sample(tmp_path: Path, row: dict[str, Any], write: Any) -> None:
    suffix = "jsonl" if write is write_jsonl else "parquet"
    demonstrations = await load(tmp_path, write(tmp_path / f"rows.{suffix}", row, row))
    assert texts(tmp_path, demonstrations) == [EXPECTED] * 2
    assert (demonstrations.items[0].sample.num_tokens, demonstrations.items[0].sample.num_trained) == (12, 4)
    assert demonstrations.counts == {"read": 2, "kept": 2}


async def test_a_folder_of_files_is_read_in_the_order_of_names(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    write_jsonl(folder / "b.jsonl", {"messages": [*MESSAGES[:1], {"role": "assistant", "content": "z"}]})
    write_parquet(folder / "a.parquet", {"messages": MESSAGES})
    (folder / "README.md").write_text("about")
    trained = [trained for _, trained in texts(tmp_path, await load(tmp_path, folder))]
    assert trained == ["a<|end|>b<|end|>", "z<|end|>"]


async def test_a_store_gives_its_valid_trajectories(tmp_path: Path) -> None:
    said = (turn(reply="a", observation="v"), turn(reply="b"))
    run = run_of(
        tmp_path / "run",
        trajectory(*said, member=0),
        trajectory(*said, member=1, reward=0.0),
        trajectory(*said, member=2, outcome=Outcome.SANDBOX_ERROR, reward=None),
    )
    demonstrations = await load(tmp_path, run)
    assert [trained for _, trained in texts(tmp_path, demonstrations)] == ["a<|end|>b<|end|>"] * 2
    assert demonstrations.counts == {"read": 3, "kept": 2, "excluded": 1}


async def test_a_store_is_trained_as_the_policy_played_it(tmp_path: Path) -> None:
    """A reply at its limit has no end token of its own; after `forget` a new context begins. As RL trains the same."""
    renderer = tiny_renderer()
    first, hel = renderer.first("List the files."), tuple(renderer.encode_text("hel", is_words=True))
    prefix_len, new_ids = renderer.next(first, hel, "go on")
    ls = (*renderer.encode_text("ls", is_words=True), *renderer.stop_ids[:1])
    cut = replace(turn(tokens(first, hel), reply="hel", observation="go on"), finish_reason="length")
    onward = turn(tokens(new_ids, ls, prefix_len=prefix_len), observation="sum up")
    fresh = turn(tokens(renderer.first("sum up"), ls))
    played = trajectory(cut, onward, fresh)
    demonstrations = await load(tmp_path, run_of(tmp_path / "run", played))
    assert demonstrations.counts["kept"] == 2
    samples = [read_sample(tmp_path / "samples", item.sample.location) for item in demonstrations.items]
    for sample, exact in zip(samples, trajectory_samples(played), strict=True):
        assert sample.ids.tolist() == exact.ids.tolist() and sample.mask.tolist() == exact.mask.tolist()


async def test_what_is_left_out_is_counted(tmp_path: Path) -> None:
    rows = [
        {"messages": MESSAGES, "reward": 1},
        {"messages": MESSAGES, "reward": 0.0},
        {"messages": MESSAGES, "result": "AgentTimeoutError"},
        {"messages": MESSAGES[:2], "reward": 1.0},
        {"messages": MESSAGES * 3, "reward": 1.0},
    ]
    selection = replace(ALL, min_reward=1.0, min_turns=2, max_tokens=20, overlong=Overlong.DROP)
    demonstrations = await load(tmp_path, write_jsonl(tmp_path / "rows.jsonl", *rows), selection)
    assert demonstrations.counts == {"read": 5, "kept": 1, "below_min_reward": 2, "below_min_turns": 1, "too_long": 1}


async def test_a_long_conversation_is_refused_dropped_or_cut(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", {"messages": MESSAGES})
    with pytest.raises(ValueError, match=r"rows\.jsonl row 1 has 12 tokens, over learner\.max_tokens=6"):
        await load(tmp_path, path, replace(ALL, max_tokens=6))
    cut = await load(tmp_path, path, replace(ALL, max_tokens=6, overlong=Overlong.CUT))
    assert texts(tmp_path, cut) == [("<|user|>u<|end|><|assistant|>a<|end|>", "a<|end|>")]
    with pytest.raises(ValueError, match="passes the filters"):  # nothing trained is left of it
        await load_demonstrations(
            [path], replace(ALL, max_tokens=3, overlong=Overlong.CUT), tiny_renderer(), tmp_path / "other", lambda: None
        )


async def test_a_restart_reads_back_what_was_rendered_whatever_became_of_the_source(tmp_path: Path) -> None:
    rows = [{"messages": [MESSAGES[0], {"role": "assistant", "content": text}]} for text in "abcdefgh"]
    path = write_jsonl(tmp_path / "rows.jsonl", *rows)
    selection = replace(ALL, shuffle_seed=3, limit=5)
    first = await load(tmp_path, path, selection)
    assert len(first.items) == 5
    order = texts(tmp_path, first)
    assert order != sorted(order)
    path.unlink()
    assert await load(tmp_path, path, selection) == first


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": "x"}, "row 2: no list of messages in a column messages or conversations"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "row 2: role must be one of .*'robot'"),
        ({"messages": [{"role": "user", "content": None}]}, "row 2: the content of a message must be text"),
        ({"messages": MESSAGES, "reward": "high"}, "row 2: reward must be a number"),
        ({"messages": [CALL]}, "row 2: a message has tool_calls beside its content"),
        ({"messages": [THOUGHT]}, "row 2: a message has reasoning_content beside its content"),
        ({"messages": MESSAGES, "tools": [{"type": "function"}]}, "row 2: a column tools"),
    ],
)
async def test_a_row_that_is_no_conversation_is_named(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", {"messages": MESSAGES}, row)
    with pytest.raises(ValueError, match=message):
        await load(tmp_path, path)


async def test_rows_without_a_reward_are_not_selected_by_it_in_silence(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", {"messages": MESSAGES})
    unjudged = write_jsonl(tmp_path / "nan.jsonl", {"messages": MESSAGES, "reward": math.nan})
    named = write_jsonl(tmp_path / "result.jsonl", {"messages": MESSAGES, "result": "nan"})
    for source in (path, unjudged, named):
        with pytest.raises(ValueError, match=r"row 1 has no reward to select it by; give --min-reward None"):
            await load(tmp_path, source, replace(ALL, min_reward=1.0))


async def test_columns_that_are_empty_say_nothing(tmp_path: Path) -> None:
    empty = [message | {"tool_calls": None, "reasoning_content": ""} for message in MESSAGES]
    path = write_jsonl(tmp_path / "rows.jsonl", {"messages": empty, "tools": []})
    assert (await load(tmp_path, path)).counts["kept"] == 1


async def test_a_source_that_is_nothing_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "missing", tmp_path / "data.csv", tmp_path):
        with pytest.raises(ValueError, match="no conversations here; give a run directory"):
            await load(tmp_path / "x", path)
