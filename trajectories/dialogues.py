"""Dialogues: a Trajectory as the conversations that the policy had, for training on their text.

Invariant: each reply is new in exactly one Dialogue, and stands in each after what the policy saw before it.
Called by recipes/demonstrations.py; trajectories/samples.py does the same with exact tokens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trajectories.schema import Trajectory, Turn


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialogue:
    """User and assistant in turn; indices count messages."""

    messages: tuple[Mapping[str, str], ...]
    """{"role", "content"}, ending with a reply."""
    cut: frozenset[int] = frozenset()
    """Replies that ended at their token limit: the policy did not end them itself."""
    known: frozenset[int] = frozenset()
    """Replies that are new in an earlier Dialogue."""


def dialogues(trajectory: Trajectory) -> list[Dialogue]:
    """One for each Turn that no other goes on from, in order; a single one where Turns hold no tokens.

    A harness that forgets or asks aside begins a new one; one that unwinds goes on from an earlier Turn.
    """
    turns = trajectory.turns
    asked = [trajectory.prompt, *(turn.observation for turn in turns)]
    parents = _parents(turns, asked)
    told: set[int] = set()
    found: list[Dialogue] = []
    for leaf in sorted(set(range(len(turns))) - set(parents)):
        path = _path(parents, leaf)
        said = ((role, text) for k in path for role, text in (("user", asked[k]), ("assistant", turns[k].reply)))
        found.append(
            Dialogue(
                messages=tuple({"role": role, "content": text} for role, text in said),
                cut=frozenset(2 * i + 1 for i, k in enumerate(path) if turns[k].finish_reason == "length"),
                known=frozenset(2 * i + 1 for i, k in enumerate(path) if k in told),
            )
        )
        told.update(path)
    return found


def _path(parents: Sequence[int | None], leaf: int) -> list[int]:
    """Turns from the first to `leaf`."""
    path = [leaf]
    while (parent := parents[path[-1]]) is not None:
        path.append(parent)
    return path[::-1]


def _parents(turns: Sequence[Turn], asked: Sequence[str]) -> list[int | None]:
    """For each Turn the one that it goes on from, None where it begins anew; `asked` holds what each was asked.

    It is the last one whose prompt the new prompt begins with: what follows may be its reply, or, where the template
    leaves out thinking, what is left of it.
    """
    parents: list[int | None] = []
    prompts: list[tuple[int, ...]] = []
    before: tuple[int, ...] = ()
    for k, turn in enumerate(turns):
        tokens = turn.tokens
        if tokens is None:  # nothing tells what it saw: all that came before
            parents.append(k - 1 if k else None)
            prompts.append(())
            before = ()
            continue
        prompt = (*before[: tokens.prefix_len], *tokens.new_ids)
        if k and tokens.prefix_len == len(before):
            parents.append(k - 1)
        elif asked[0] and asked[k].startswith(asked[0]):  # a client's prompt that nobody knew holds the whole dialogue
            parents.append(None)
        else:
            parents.append(next((j for j in reversed(range(k)) if _begins(prompt, prompts[j])), None))
        prompts.append(prompt)
        before = (*prompt, *tokens.sampled_ids)
    return parents


def _begins(prompt: tuple[int, ...], start: tuple[int, ...]) -> bool:
    return 0 < len(start) < len(prompt) and prompt[: len(start)] == start
