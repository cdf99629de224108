"""The families of the shell tasks: what each asks for, the files before and after, and one way to do it.

Invariant: a family's instruction names every word and file that it was given, in that order of kinds, so two tasks
with different names never read the same. Called by envs/tasksets/shell.py alone.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random

_WORDS = """
amber apple arrow basil beach birch bread brick cedar chalk cloud coral crane daisy delta eagle flame frost ginger grape
hazel honey ivory jade jelly kite lemon lilac maple melon mint moss nutmeg ocean olive onyx opal peach pearl plum quartz
raven river sage shell spruce stone tiger topaz tulip walnut zebra
"""
_STEMS = """
agenda album atlas audit badge batch bill board book cache card chart clip desk diary draft entry event field form guide
index issue item label ledger list log map memo menu note order page paper plan poll quote record report route score
sheet table ticket today vote
"""

WORDS = tuple(_WORDS.split())
"""52 words that files hold; none contains another, so grep finds exactly what was meant."""

STEMS = tuple(_STEMS.split())
"""47 file names without their extension, which is always .txt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One task as a family lays it out; the dicts map file names to their whole text."""

    instruction: str
    before: dict[str, str]
    after: dict[str, str]
    moves: tuple[tuple[str, str], ...]
    """(command, what it prints), in order; a look comes before the action that needs it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """What a family draws from: the named ones appear in the instruction, the spare ones only in files."""

    words: tuple[str, ...]
    files: tuple[str, ...]
    spare_words: Iterator[str]
    spare_files: Iterator[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """How many names its instruction holds, and how a task is laid out from them."""

    num_words: int
    num_files: int
    lay_out: Callable[[Random, Names], Plan]


def _lines(*lines: str) -> str:
    return "".join(f"{line}\n" for line in lines)


def _take(spare: Iterator[str], count: int) -> list[str]:
    return [next(spare) for _ in range(count)]


def _write(rng: Random, names: Names) -> Plan:
    (word,), (file,) = names.words, names.files
    return Plan(
        instruction=f"Write {word} to {file}",
        before={},
        after={file: _lines(word)},
        moves=((f"echo {word} > {file}", ""),),
    )


def _append(rng: Random, names: Names) -> Plan:
    (word,), (file,) = names.words, names.files
    text = _lines(*_take(names.spare_words, rng.randint(1, 2)))
    return Plan(
        instruction=f"Append {word} to {file}",
        before={file: text},
        after={file: text + _lines(word)},
        moves=((f"echo {word} >> {file}", ""),),
    )


def _rename(rng: Random, names: Names) -> Plan:
    source, target = names.files
    text = _lines(*_take(names.spare_words, rng.randint(1, 2)))
    return Plan(
        instruction=f"Rename {source} to {target}",
        before={source: text},
        after={target: text},
        moves=((f"mv {source} {target}", ""),),
    )


def _copy(rng: Random, names: Names) -> Plan:
    source, target = names.files
    text = _lines(*_take(names.spare_words, rng.randint(1, 2)))
    return Plan(
        instruction=f"Copy {source} to {target}",
        before={source: text},
        after={source: text, target: text},
        moves=((f"cp {source} {target}", ""),),
    )


def _count(rng: Random, names: Names) -> Plan:
    (word,), (source, target) = names.words, names.files
    num_hits = rng.randint(1, 3)
    lines = [word] * num_hits + _take(names.spare_words, rng.randint(1, 2))
    rng.shuffle(lines)
    return Plan(
        instruction=f"Count {word} in {source} into {target}",
        before={source: _lines(*lines)},
        after={source: _lines(*lines), target: _lines(str(num_hits))},
        moves=((f"grep -c {word} {source} > {target}", ""),),
    )


def _sort(rng: Random, names: Names) -> Plan:
    source, target = names.files
    lines = _take(names.spare_words, rng.randint(3, 4))
    if lines == sorted(lines):
        lines.reverse()
    return Plan(
        instruction=f"Sort {source} into {target}",
        before={source: _lines(*lines)},
        after={source: _lines(*lines), target: _lines(*sorted(lines))},
        moves=((f"sort {source} > {target}", ""),),
    )


def _hide(rng: Random, names: Names, word: str, files: tuple[str, ...]) -> tuple[dict[str, str], str]:
    """Files of one or two words each, one of which holds `word`; and that one's name."""
    chosen = rng.choice(files)
    texts: dict[str, str] = {}
    for file in files:
        lines = _take(names.spare_words, rng.randint(1, 2))
        if file == chosen:
            lines[rng.randrange(len(lines))] = word
        texts[file] = _lines(*lines)
    return texts, chosen


def _find(rng: Random, names: Names) -> Plan:
    (word,), (*places, target) = names.words, names.files
    before, chosen = _hide(rng, names, word, tuple(places))
    return Plan(
        instruction=f"Find {word} in {' '.join(places)} and write the file name to {target}",
        before=before,
        after=before | {target: _lines(chosen)},
        moves=((f"grep -l {word} {' '.join(places)}", _lines(chosen)), (f"echo {chosen} > {target}", "")),
    )


def _remove(rng: Random, names: Names) -> Plan:
    (word,), places = names.words, names.files
    before, chosen = _hide(rng, names, word, places)
    return Plan(
        instruction=f"Find {word} in {' '.join(places)} and remove that file",
        before=before,
        after={file: text for file, text in before.items() if file != chosen},
        moves=((f"grep -l {word} {' '.join(places)}", _lines(chosen)), (f"rm {chosen}", "")),
    )


def _follow(rng: Random, names: Names) -> Plan:
    (word,), (pointer,) = names.words, names.files
    target = next(names.spare_files)
    return Plan(
        instruction=f"Write {word} to the file named in {pointer}",
        before={pointer: _lines(target)},
        after={pointer: _lines(target), target: _lines(word)},
        moves=((f"cat {pointer}", _lines(target)), (f"echo {word} > {target}", "")),
    )


def _replace(rng: Random, names: Names) -> Plan:
    (old, new), (file,) = names.words, names.files
    lines = [old, *_take(names.spare_words, rng.randint(1, 2))]
    rng.shuffle(lines)
    return Plan(
        instruction=f"Replace {old} by {new} in {file}",
        before={file: _lines(*lines)},
        after={file: _lines(*(new if line == old else line for line in lines))},
        moves=((f"sed -i s/{old}/{new}/ {file}", ""),),
    )


def _join(rng: Random, names: Names) -> Plan:
    first, second, target = names.files
    texts = {file: _lines(*_take(names.spare_words, rng.randint(1, 2))) for file in (first, second)}
    return Plan(
        instruction=f"Join {first} and {second} into {target}",
        before=texts,
        after=texts | {target: texts[first] + texts[second]},
        moves=((f"cat {first} {second} > {target}", ""),),
    )


def _both(rng: Random, names: Names) -> Plan:
    (word,), (source, target) = names.words, names.files
    text = _lines(*_take(names.spare_words, rng.randint(1, 2)))
    return Plan(
        instruction=f"Copy {source} to {target} and append {word} to {target}",
        before={source: text},
        after={source: text, target: text + _lines(word)},
        moves=((f"cp {source} {target}", ""), (f"echo {word} >> {target}", "")),
    )


def _longest(rng: Random, names: Names) -> Plan:
    first, second, target = names.files
    num_lines = {first: rng.randint(1, 4), second: rng.randint(1, 4)}
    if num_lines[first] == num_lines[second]:
        num_lines[second] += 1
    texts = {file: _lines(*_take(names.spare_words, count)) for file, count in num_lines.items()}
    longest = max(num_lines, key=num_lines.__getitem__)
    table = _lines(*(f" {count} {file}" for file, count in num_lines.items()), f" {sum(num_lines.values())} total")
    return Plan(
        instruction=f"Write to {target} which has more lines, {first} or {second}",
        before=texts,
        after=texts | {target: _lines(longest)},
        moves=((f"wc -l {first} {second}", table), (f"echo {longest} > {target}", "")),
    )


def _chain(rng: Random, names: Names) -> Plan:
    (word,), (pointer,) = names.words, names.files
    middle, target = _take(names.spare_files, 2)
    before = {pointer: _lines(middle), middle: _lines(target)}
    return Plan(
        instruction=f"Write {word} to the file named in the file named in {pointer}",
        before=before,
        after=before | {target: _lines(word)},
        moves=(
            (f"cat {pointer}", _lines(middle)),
            (f"cat {middle}", _lines(target)),
            (f"echo {word} > {target}", ""),
        ),
    )


FAMILIES = {
    "write": Family(num_words=1, num_files=1, lay_out=_write),
    "append": Family(num_words=1, num_files=1, lay_out=_append),
    "rename": Family(num_words=0, num_files=2, lay_out=_rename),
    "copy": Family(num_words=0, num_files=2, lay_out=_copy),
    "count": Family(num_words=1, num_files=2, lay_out=_count),
    "sort": Family(num_words=0, num_files=2, lay_out=_sort),
    "find": Family(num_words=1, num_files=4, lay_out=_find),
    "remove": Family(num_words=1, num_files=3, lay_out=_remove),
    "follow": Family(num_words=1, num_files=1, lay_out=_follow),
    "replace": Family(num_words=2, num_files=1, lay_out=_replace),
    "join": Family(num_words=0, num_files=3, lay_out=_join),
    "both": Family(num_words=1, num_files=2, lay_out=_both),
    "longest": Family(num_words=0, num_files=3, lay_out=_longest),
    "chain": Family(num_words=1, num_files=1, lay_out=_chain),
}
"""Every family by name; the last five are the harder ones."""

EASY_FAMILIES = tuple(
    family
    for simple in ("write", "append", "rename", "copy", "count", "sort")
    for family in (simple, "find", "remove" if simple in ("write", "rename", "count") else "follow")
)
"""The default, in turn: two in three tasks (find, remove, follow) need a look before the action."""

HARD_FAMILIES = ("replace", "join", "both", "longest", "chain")
"""More names, more steps or more looks a task."""
