"""The shell task set: procedural terminal tasks, as records and as Harbor task directories.

Invariant: a task's split is a hash of the set of names in its instruction, so no instruction, and no combination of
names, is in both splits, whatever the seed, the count or the families.
Called by envs/tasksets, and by policy builders that need a text corpus of the set (`corpus`).
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from envs.tasksets.shell_families import EASY_FAMILIES, FAMILIES, STEMS, WORDS, Names

SPLITS = ("train", "heldout")
_HELDOUT_ONE_IN = 5
_MAX_DRAWS = 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ShellTask:
    """One task, before it is written."""

    id: str
    family: str
    split: str
    instruction: str
    """One line."""
    before: Mapping[str, str]
    """File name to text, as /app starts."""
    after: Mapping[str, str]
    """File name to text, as /app must end."""
    commands: tuple[str, ...]
    """One way to do it, one command a step."""
    outputs: tuple[str, ...]
    """What each command prints."""


def make_tasks(*, split: str, count: int, seed: int = 0, families: Sequence[str] = EASY_FAMILIES) -> list[ShellTask]:
    """`count` distinct tasks of a split; the same arguments give the same tasks.

    The families take turns, and one that is named twice has two. Ids start with the
    index, so that sorted by id the families still take turns.
    """
    _check(split, count, families)
    sources = {family: _Source(family, split, seed) for family in families}
    return [sources[families[index % len(families)]].draw(index) for index in range(count)]


def write_task_set(
    directory: Path, *, split: str, count: int, seed: int = 0, families: Sequence[str] = EASY_FAMILIES
) -> list[str]:
    """Writes the tasks of `make_tasks` as Harbor task directories and returns their ids."""
    tasks = make_tasks(split=split, count=count, seed=seed, families=families)
    for task in tasks:
        _write_task(directory / task.id, task)
    return [task.id for task in tasks]


def corpus(*, count: int = 2000, seed: int = 0) -> list[str]:
    """Texts of train tasks of every family, for a tokenizer: instruction, commands and outputs, one a string."""
    tasks = make_tasks(split="train", count=count, seed=seed, families=tuple(FAMILIES))
    return [text for task in tasks for text in (task.instruction, *task.commands, *filter(None, task.outputs))]


def split_of(names: Sequence[str]) -> str:
    """The split that tasks with these names in their instruction belong to."""
    digest = hashlib.sha256(" ".join(sorted(names)).encode()).digest()
    return "heldout" if int.from_bytes(digest[:4], "big") % _HELDOUT_ONE_IN == 0 else "train"


def _check(split: str, count: int, families: Sequence[str]) -> None:
    if split not in SPLITS:
        raise ValueError(f"split must be one of {', '.join(SPLITS)}, got {split!r}")
    if count < 1:
        raise ValueError(f"count must be >= 1, got {count}")
    unknown = [family for family in families if family not in FAMILIES]
    if unknown or not families:
        raise ValueError(f"families must be names among {', '.join(FAMILIES)}, got {', '.join(families)!r}")


class _Source:
    """Draws the tasks of one family and split, none twice."""

    def __init__(self, family: str, split: str, seed: int) -> None:
        self._family = family
        self._split = split
        self._rng = Random(f"{seed}/{split}/{family}")
        self._seen: set[str] = set()

    def draw(self, index: int) -> ShellTask:
        family = FAMILIES[self._family]
        for _ in range(_MAX_DRAWS):
            words, stems = self._rng.sample(WORDS, family.num_words), self._rng.sample(STEMS, family.num_files)
            key = " ".join([*words, *stems])
            if key not in self._seen and split_of([*words, *stems]) == self._split:
                self._seen.add(key)
                return self._lay_out(index, words, stems)
        raise ValueError(
            f"family {self._family!r} has no more than about {len(self._seen)} distinct tasks in split "
            f"{self._split!r}; ask for fewer, or add families"
        )

    def _lay_out(self, index: int, words: Sequence[str], stems: Sequence[str]) -> ShellTask:
        family = FAMILIES[self._family]
        names = Names(
            words=tuple(words),
            files=tuple(f"{stem}.txt" for stem in stems),
            spare_words=(word for word in self._rng.sample(WORDS, len(WORDS)) if word not in words),
            spare_files=(f"{stem}.txt" for stem in self._rng.sample(STEMS, len(STEMS)) if stem not in stems),
        )
        plan = family.lay_out(self._rng, names)
        return ShellTask(
            id="-".join([f"{index:05d}", self._family, *words, *stems]),
            family=self._family,
            split=self._split,
            instruction=plan.instruction,
            before=plan.before,
            after=plan.after,
            commands=tuple(command for command, _ in plan.moves),
            outputs=tuple(output for _, output in plan.moves),
        )


_DOCKERFILE = "FROM debian:bookworm-slim\nWORKDIR /app\nCOPY files/ /app/\n"

_TASK_TOML = """\
schema_version = "1.4"

[metadata]
source = "shell"
licence = "Apache-2.0"
family = {family}
split = {split}

[agent]
timeout_sec = 300.0

[verifier]
timeout_sec = 60.0

[environment]
workdir = "/app"
network_mode = "no-network"
"""

# No process is started: it runs thousands of times. The reward is 0 until everything was compared, and the CPU limit
# ends a comparison that the agent made endless, so neither leaves the rollout without a reward.
# A missing newline at the end of a file does not count as a difference.
_TEST_SH = """\
#!/bin/bash
# Reward 1 when /app holds exactly the files of expected/, each with the same text.
LC_ALL=C
shopt -s dotglob nullglob
ulimit -t 5
echo 0 >/logs/verifier/reward.txt
differ() { echo "$1"; exit 0; }
read_text() { IFS= read -r -N 4096 text <"$1"; while [[ $text == *$'\\n' ]]; do text=${text%$'\\n'}; done; }
expected=("${0%/*}"/expected/*)
cd /app || differ "/app is gone"
actual=(*)
[[ "${actual[*]}" == "${expected[*]##*/}" ]] || differ "files: ${actual[*]}; expected: ${expected[*]##*/}"
for path in "${expected[@]}"; do
    file=${path##*/}
    [[ -f $file && ! -L $file && -r $file ]] || differ "$file is not a plain readable file"
    read_text "$path"; wanted=$text
    read_text "$file"
    [[ $text == "$wanted" ]] || differ "$file says '${text:0:200}'; expected '$wanted'"
done
echo 1 >/logs/verifier/reward.txt
echo "all ${#expected[@]} files as expected"
"""


def _write_task(root: Path, task: ShellTask) -> None:
    """Writes one Harbor task directory."""
    _write_files(root / "environment" / "files", task.before)
    _write_files(root / "tests" / "expected", task.after)
    _write_files(root / "environment", {"Dockerfile": _DOCKERFILE})
    _write_files(root / "tests", {"test.sh": _TEST_SH})
    _write_files(root / "solution", {"solve.sh": "".join(f"{command}\n" for command in task.commands)})
    toml = _TASK_TOML.format(family=json.dumps(task.family), split=json.dumps(task.split))
    _write_files(root, {"task.toml": toml, "instruction.md": f"{task.instruction}\n"})


def _write_files(directory: Path, texts: Mapping[str, str]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (directory / name).write_text(text, encoding="utf-8")
