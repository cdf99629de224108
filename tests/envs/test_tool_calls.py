"""Tool calls in a reply: each block one call or one error, whatever stands around and inside it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envs.tool_calls import ToolCall, parse_tool_calls


def calls(reply: str) -> list[ToolCall]:
    return [block.call for block in parse_tool_calls(reply)]


def test_blocks_become_calls_in_their_order() -> None:
    reply = '<tool_call>{"name": "a"}</tool_call> x <tool_call>{"name": "b", "arguments": {"c": 1}}</tool_call>'
    assert calls(reply) == [ToolCall(name="a"), ToolCall(name="b", arguments={"c": 1})]
    assert [reply[block.begin : block.end] for block in parse_tool_calls(reply)] == reply.split(" x ")
    assert calls("no call") == []


def test_a_string_may_spell_the_tags() -> None:
    reply = '<tool_call>{"name": "a", "arguments": {"c": "</tool_call><tool_call>"}}\n</tool_call>'
    (block,) = parse_tool_calls(reply)
    assert block.call == ToolCall(name="a", arguments={"c": "</tool_call><tool_call>"})
    assert (block.begin, block.end) == (0, len(reply))


def test_arguments_may_be_spelled_as_a_string() -> None:
    assert calls('<tool_call>{"name": "a", "arguments": "{\\"b\\": 2}"}</tool_call>') == [
        ToolCall(name="a", arguments={"b": 2})
    ]


@pytest.mark.parametrize("first", ['{"name": "a"}', "oops"])
def test_a_block_that_is_not_closed_leaves_the_next_one_whole(first: str) -> None:
    broken, whole = calls(f'<tool_call>{first}<tool_call>{{"name": "b"}}</tool_call>')
    assert broken.error == "the tool call does not end with </tool_call>"
    assert whole == ToolCall(name="b")


@pytest.mark.parametrize(
    ("block", "error"),
    [
        ('{"name": "a"} and more', "not JSON: Extra data"),
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("5", "not a JSON object"),
        ('{"name": ""}', "no 'name'"),
        ('{"name": "a", "arguments": "x"}', "the arguments of a are not a JSON object"),
    ],
)
def test_what_cannot_be_called_is_told_why(block: str, error: str) -> None:
    (call,) = calls(f"<tool_call>{block}</tool_call>")
    assert error in call.error


def test_calls_that_were_only_thought_of_are_none() -> None:
    call = '<tool_call>{"name": "a"}</tool_call>'
    assert calls(f"<think>{call}</think>") == []
    assert calls(f"<think>{call}</think>{call}") == [ToolCall(name="a")]


PIECES = st.sampled_from(["<tool_call>", "</tool_call>", "</think>", '{"name": "a"}', "{", "}", " ", "x"])


@given(st.lists(PIECES, max_size=12).map("".join))
def test_any_reply_is_cut_into_blocks_that_follow_each_other(reply: str) -> None:
    blocks = parse_tool_calls(reply)
    edges = [edge for block in blocks for edge in (block.begin, block.end)]
    assert edges == sorted(edges) and all(block.begin < block.end <= len(reply) for block in blocks)
    assert all(bool(block.call.error) != bool(block.call.name) for block in blocks)
