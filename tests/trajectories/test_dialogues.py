"""Dialogues by hand: what each Turn saw decides which conversation it belongs to."""

from dataclasses import replace

from tests.trajectories.records import tokens, trajectory, turn
from trajectories.dialogues import Dialogue, dialogues
from trajectories.schema import Turn

PROMPT = "List the files."


def say(*texts: str) -> tuple[dict[str, str], ...]:
    return tuple({"role": ("user", "assistant")[k % 2], "content": text} for k, text in enumerate(texts))


def told(*turns: Turn) -> list[Dialogue]:
    return dialogues(trajectory(*turns))


def test_turns_that_go_on_are_one_dialogue() -> None:
    first = turn(tokens((1, 2), (3, 4)), reply="a", observation="x")
    second = turn(tokens((5,), (6,), prefix_len=4), reply="b", observation="y")
    assert told(first, second) == [Dialogue(messages=say(PROMPT, "a", "x", "b"))]


def test_turns_without_tokens_are_one_dialogue() -> None:
    assert told(turn(reply="a"), turn(reply="b", observation="z")) == [Dialogue(messages=say(PROMPT, "a", "", "b"))]
    assert told() == []


def test_a_reply_at_its_limit_is_cut() -> None:
    first = replace(turn(tokens((1, 2), (3, 4)), reply="a", observation="x"), finish_reason="length")
    second = turn(tokens((5,), (6,), prefix_len=4), reply="b")
    assert told(first, second) == [Dialogue(messages=say(PROMPT, "a", "x", "b"), cut=frozenset({1}))]


def test_what_a_harness_forgot_is_another_dialogue() -> None:
    first = turn(tokens((1, 2), (3, 4)), reply="a", observation="sum up")
    fresh = turn(tokens((7, 8), (9,), prefix_len=1), reply="b", observation="y")
    assert told(first, fresh) == [Dialogue(messages=say(PROMPT, "a")), Dialogue(messages=say("sum up", "b"))]


def test_after_an_aside_the_dialogue_goes_on_where_it_was() -> None:
    first = turn(tokens((1, 2), (3, 4)), reply="a", observation="by the way")
    aside = turn(tokens((7, 8), (9,), prefix_len=1), reply="b", observation="x")
    third = turn(tokens((2, 3, 4, 5), (6,), prefix_len=1), reply="c")
    assert told(first, aside, third) == [
        Dialogue(messages=say("by the way", "b")),
        Dialogue(messages=say(PROMPT, "a", "x", "c")),
    ]


def test_what_was_unwound_is_told_apart_and_its_beginning_trained_once() -> None:
    first = turn(tokens((1, 2), (3, 4)), reply="a", observation="x")
    second = turn(tokens((5,), (6,), prefix_len=4), reply="b", observation="y")
    third = turn(tokens((8,), (9,), prefix_len=4), reply="c")
    assert told(first, second, third) == [
        Dialogue(messages=say(PROMPT, "a", "x", "b")),
        Dialogue(messages=say(PROMPT, "a", "y", "c"), known=frozenset({1})),
    ]


def test_a_reply_whose_thinking_is_left_out_afterwards_stays_in_its_dialogue() -> None:
    first = turn(tokens((1, 2), (30, 31, 3, 4)), reply="<think>t</think>a", observation="x")
    second = turn(tokens((3, 4, 5), (6,), prefix_len=2), reply="b")
    assert told(first, second) == [Dialogue(messages=say(PROMPT, "<think>t</think>a", "x", "b"))]


def test_so_it_does_after_an_aside_and_after_an_unwinding() -> None:
    first = turn(tokens((1, 2), (30, 31, 3, 4)), reply="a", observation="by the way")
    aside = turn(tokens((7, 8), (9,), prefix_len=1), reply="b", observation="x")
    onward = turn(tokens((2, 3, 4, 5), (6,), prefix_len=1), reply="c")
    assert told(first, aside, onward)[1] == Dialogue(messages=say(PROMPT, "a", "x", "c"))
    second = turn(tokens((3, 4, 8), (32, 33, 9), prefix_len=2), reply="b", observation="x")
    third = turn(tokens((5,), (6,), prefix_len=4), reply="c")
    assert told(first, second, third) == [
        Dialogue(messages=say(PROMPT, "a", "by the way", "b")),
        Dialogue(messages=say(PROMPT, "a", "x", "c"), known=frozenset({1})),
    ]


def test_a_prompt_that_retells_the_dialogue_begins_anew() -> None:
    first = turn(tokens((1, 2), (30, 31, 3, 4)), reply="a", observation=f"{PROMPT}\n\na'\n\nx")
    retold = turn(tokens((40, 5), (6,), prefix_len=2), reply="b")
    assert told(first, retold) == [
        Dialogue(messages=say(PROMPT, "a")),
        Dialogue(messages=say(f"{PROMPT}\n\na'\n\nx", "b")),
    ]
