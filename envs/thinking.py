"""Replies without their thinking, as text and as ids: what templates that drop earlier thinking keep of a reply.

Invariant: ids are only left out, never made again from text. Called by envs/renderer.py.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence

THINK_END = "</think>"


def without_thinking(reply: str) -> str:
    """What stands after the last end of thinking, without the newlines there: "<think>w</think>\\n\\nb" -> "b"."""
    return reply.rpartition(THINK_END)[2].lstrip("\n") if THINK_END in reply else reply


def ids_without_thinking(ids: Sequence[int], decode: Callable[[Sequence[int]], str]) -> Sequence[int]:
    """The ids after the last end of thinking and after the tokens there that are only newlines.

    A token that holds both newlines and words stays whole, for it was sampled so.
    """
    num_ends = decode(ids).count(THINK_END)
    if not num_ends:
        return ids
    begin = bisect_left(range(len(ids) + 1), num_ends, key=lambda length: decode(ids[:length]).count(THINK_END))
    while begin < len(ids) and set(decode(ids[begin : begin + 1])) == {"\n"}:
        begin += 1
    return ids[begin:]
