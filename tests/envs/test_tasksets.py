"""The task sets: distinct, split, deterministic, solvable by their own solutions and by nothing else."""

import asyncio
import itertools
import shutil
from pathlib import Path

import pytest

from envs.errors import TaskError
from envs.harbor import load_task
from envs.task import Task
from envs.tasksets import humaneval, resolve_tasks, shell
from envs.tasksets.shell_families import EASY_FAMILIES, FAMILIES, HARD_FAMILIES, STEMS, WORDS
from envs.verifier import Verdict, verify
from tests.envs.task_dirs import load_tasks
from tests.fakes.directory_sandbox import DirectorySandbox

EVERY_FAMILY = tuple(FAMILIES)


async def judge(task: Task, root: Path, *commands: str) -> Verdict:
    """The Verdict after these commands, in a plain directory."""
    sandbox = DirectorySandbox(root)
    shutil.copytree(task.path / "environment", root / "environment")
    if (root / "environment" / "files").is_dir():
        shutil.copytree(root / "environment" / "files", root / "app", dirs_exist_ok=True)
    for command in commands:
        assert (await sandbox.exec(command, timeout_s=20)).exit_code == 0, command
    return await verify(task, sandbox, timeout_s=60)


def write_one(root: Path, family: str) -> tuple[shell.ShellTask, Task]:
    """The first task of a family, in both forms."""
    shell.write_task_set(root / "tasks", split="train", count=1, families=[family])
    (task,) = shell.make_tasks(split="train", count=1, families=[family])
    return task, load_task(root / "tasks" / task.id)


def test_no_instruction_is_in_both_splits_whatever_the_seed() -> None:
    instructions = {
        split: {
            task.instruction
            for seed in (0, 1)
            for task in shell.make_tasks(split=split, count=count, seed=seed, families=EVERY_FAMILY)
        }
        for split, count in (("train", 3000), ("heldout", 1500))
    }
    assert not instructions["train"] & instructions["heldout"]
    assert len(instructions["train"]) > 3000


def test_tasks_of_one_set_are_distinct_and_the_families_take_turns() -> None:
    tasks = shell.make_tasks(split="heldout", count=600)
    assert len({task.instruction for task in tasks}) == 600
    assert len({task.id for task in tasks}) == 600
    assert [task.family for task in tasks[:36]] == list(EASY_FAMILIES) * 2
    assert [task.id for task in tasks] == sorted(task.id for task in tasks)


def test_one_in_five_combinations_is_held_out() -> None:
    splits = [shell.split_of(names) for names in itertools.product(WORDS, STEMS)]
    assert 0.18 < splits.count("heldout") / len(splits) < 0.22
    assert shell.split_of(["a", "b"]) == shell.split_of(["b", "a"])


def test_the_same_arguments_give_the_same_tasks_and_another_seed_others() -> None:
    first, again, other = (shell.make_tasks(split="train", count=90, seed=seed) for seed in (0, 0, 1))
    assert first == again
    assert not {task.instruction for task in first} & {task.instruction for task in other if task.family == "find"}


def test_names_cannot_be_confused() -> None:
    assert (len(set(WORDS)), len(set(STEMS))) == (52, 47)
    assert not set(WORDS) & set(STEMS)
    assert not [(short, long) for short in WORDS for long in WORDS if short != long and short in long]


def test_a_family_or_split_or_count_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="split must be one of train, heldout, got 'test'"):
        shell.make_tasks(split="test", count=1)
    with pytest.raises(ValueError, match=r"families must be names among write, .*, got 'nap'"):
        shell.make_tasks(split="train", count=1, families=["nap"])
    with pytest.raises(ValueError, match="families must be names"):
        shell.make_tasks(split="train", count=1, families=[])
    with pytest.raises(ValueError, match="count must be >= 1, got 0"):
        shell.make_tasks(split="train", count=0)
    with pytest.raises(ValueError, match=r"family 'rename' has no more than about \d+ distinct tasks"):
        shell.make_tasks(split="heldout", count=2000, families=["rename"])


@pytest.mark.parametrize("family", EVERY_FAMILY)
async def test_the_solution_of_each_family_solves_it_and_prints_what_the_task_says(family: str, tmp_path: Path) -> None:
    shell.write_task_set(tmp_path / "tasks", split="heldout", count=2, families=[family])
    for task in shell.make_tasks(split="heldout", count=2, families=[family]):
        root = tmp_path / task.id
        harbor_task = load_task(tmp_path / "tasks" / task.id)
        solution = (harbor_task.path / "solution" / "solve.sh").read_text()
        assert solution.splitlines() == list(task.commands)
        assert (await judge(harbor_task, root, *task.commands)).reward == 1.0
        replay = DirectorySandbox(tmp_path / f"{task.id}-again")
        shutil.copytree(harbor_task.path / "environment" / "files", replay.root / "app", dirs_exist_ok=True)
        printed = [(await replay.exec(command, timeout_s=5)).stdout.decode() for command in task.commands]
        assert printed == list(task.outputs)
        assert harbor_task.provenance.family == family
        assert harbor_task.provenance.split == "heldout"
        assert harbor_task.environment.network_mode == "no-network"


@pytest.mark.parametrize("family", EVERY_FAMILY)
async def test_doing_nothing_solves_no_family(family: str, tmp_path: Path) -> None:
    _, task = write_one(tmp_path, family)
    assert (await judge(task, tmp_path / "box")).reward == 0.0


@pytest.mark.parametrize(
    ("family", "commands"),
    [
        ("write", ["printf %s {w0} > {f0}"]),
        ("rename", ["cp {f0} {f1}", "rm {f0}"]),
        ("count", ["grep {w0} {f0} | wc -l > {f1}"]),
        ("sort", ["sort -o {f1} {f0}"]),
        ("find", ["grep -l {w0} {f0} {f1} {f2} > {f3}"]),
        ("remove", ["rm $(grep -l {w0} {f0} {f1} {f2})"]),
        ("follow", ["echo {w0} > $(cat {f0})"]),
    ],
)
async def test_other_ways_to_the_same_end_count(family: str, commands: list[str], tmp_path: Path) -> None:
    task, harbor_task = write_one(tmp_path, family)
    _, _, *names = task.id.split("-")
    words = [name for name in names if name in WORDS]
    files = [f"{name}.txt" for name in names if name in STEMS]
    slots = {f"w{i}": word for i, word in enumerate(words)} | {f"f{i}": file for i, file in enumerate(files)}
    filled = [command.format(**slots) for command in commands]
    assert (await judge(harbor_task, tmp_path / "box", *filled)).reward == 1.0


@pytest.mark.parametrize(
    ("spoil", "evidence"),
    [
        ("touch extra", "files: "),
        ("touch .hidden", "files: .hidden"),
        ("mkdir folder", "files: "),
        ("for f in *; do echo more >> $f; done", " says '"),
        ("for f in *; do mv $f /logs/moved; ln -s /logs/moved $f; done", "is not a plain readable file"),
        ("for f in *; do rm $f; mkdir $f; done", "is not a plain readable file"),
        ("for f in *; do rm $f; mkfifo $f; done", "is not a plain readable file"),
        ("rm -rf /app", "/app is gone"),
        ("for f in *; do head -c 100000 /dev/zero | tr '\\0' x > $f; done", " says 'xxx"),
    ],
)
async def test_a_solved_task_with_anything_else_changed_gets_0(spoil: str, evidence: str, tmp_path: Path) -> None:
    task, harbor_task = write_one(tmp_path, "write")
    verdict = await judge(harbor_task, tmp_path / "box", *task.commands, "mkdir /logs", spoil)
    assert verdict.reward == 0.0
    assert evidence in verdict.evidence


def test_written_tasks_load_as_harbor_tasks(tmp_path: Path) -> None:
    ids = shell.write_task_set(tmp_path, split="train", count=300)
    tasks = load_tasks(tmp_path)
    assert [task.id for task in tasks] == ids
    in_memory = shell.make_tasks(split="train", count=300)
    assert [task.instruction for task in tasks] == [task.instruction for task in in_memory]


def test_the_corpus_holds_every_name_and_nothing_held_out() -> None:
    texts = shell.corpus()
    joined = "\n".join(texts)
    assert all(word in joined for word in WORDS)
    assert all(f"{stem}.txt" in joined for stem in STEMS)
    heldout = shell.make_tasks(split="heldout", count=500, families=EVERY_FAMILY)
    assert not {task.instruction for task in heldout} & set(texts)


def test_humaneval_is_the_164_problems(tmp_path: Path) -> None:
    ids = humaneval.write_task_set(tmp_path)
    tasks = load_tasks(tmp_path)
    assert [task.id for task in tasks] == ids
    assert len(tasks) == 164
    for task in tasks:
        assert "/app/solution.py" in task.instruction
        check = (task.path / "tests" / "check.py").read_text()
        assert "def check(candidate)" in check
        assert not (task.path / "environment" / "files").exists()


@pytest.fixture(scope="module")
def problems(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("humaneval")
    humaneval.write_task_set(root)
    return root


@pytest.mark.parametrize("index", [0, 32, 38, 72, 163])
async def test_a_humaneval_solution_passes_its_check(index: int, problems: Path, tmp_path: Path) -> None:
    task = load_task(problems / f"humaneval-{index:03d}")
    verdict = await judge(task, tmp_path / "box", (task.path / "solution" / "solve.sh").read_text())
    assert (verdict.reward, verdict.evidence) == (1.0, "check passed\n")


@pytest.mark.slow
async def test_every_humaneval_solution_passes_its_check(problems: Path, tmp_path: Path) -> None:
    slots = asyncio.Semaphore(2)

    async def solve(task: Task) -> float:
        async with slots:
            return (await judge(task, tmp_path / task.id, (task.path / "solution" / "solve.sh").read_text())).reward

    rewards = await asyncio.gather(*(solve(task) for task in load_tasks(problems)))
    assert sum(rewards) == 164


@pytest.mark.parametrize(
    "source",
    [
        "def has_close_elements(numbers, threshold):\n    return False\n",
        "import os\nos._exit(0)\n",
        "import sys\nsys.exit(0)\n",
        "def has_close_elements(numbers, threshold):\n    raise SystemExit(0)\n",
        "def has_close_elements(",
        "def another(): pass\n",
        "open('/logs/verifier/reward.json', 'w').write('{\"reward\": 1}')\nimport os\nos._exit(0)\n",
        "print('check passed')\n",
    ],
)
async def test_a_wrong_or_cheating_solution_gets_0(source: str, problems: Path, tmp_path: Path) -> None:
    write = f"cat > /app/solution.py <<'EOF'\n{source}EOF\n"
    assert (await judge(load_task(problems / "humaneval-000"), tmp_path / "box", write)).reward == 0.0


async def test_a_missing_solution_gets_0_and_says_so(problems: Path, tmp_path: Path) -> None:
    verdict = await judge(load_task(problems / "humaneval-000"), tmp_path / "box")
    assert verdict.reward == 0.0
    assert "solution.py" in verdict.evidence


def test_a_set_is_written_once_and_reused(tmp_path: Path) -> None:
    first = resolve_tasks("shell:heldout", cache_dir=tmp_path, count=9)
    marker = first[0].path / "marker"
    marker.touch()
    again = resolve_tasks("shell:heldout", cache_dir=tmp_path, count=9)
    assert [task.path for task in again] == [task.path for task in first]
    assert marker.exists()
    assert len(list(tmp_path.iterdir())) == 1
    resolve_tasks("shell:heldout:hard", cache_dir=tmp_path, count=9)
    resolve_tasks("shell:heldout", cache_dir=tmp_path, count=9, seed=1)
    assert len(list(tmp_path.iterdir())) == 3


def test_a_set_that_could_not_be_written_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="has no more than about"):
        resolve_tasks("shell:heldout:rename", cache_dir=tmp_path, count=900)
    assert list(tmp_path.iterdir()) == []


def test_the_loser_of_a_race_takes_the_winners_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = shell.write_task_set

    def write_while_another_wins(directory: Path, **options: object) -> list[str]:
        monkeypatch.setattr(shell, "write_task_set", write)
        resolve_tasks("shell:heldout", cache_dir=tmp_path, count=9)
        return write(directory, **options)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(shell, "write_task_set", write_while_another_wins)
    assert len(resolve_tasks("shell:heldout", cache_dir=tmp_path, count=9)) == 9
    assert len(list(tmp_path.iterdir())) == 1


def test_slices_and_limits_take_the_named_part(tmp_path: Path) -> None:
    def ids(spec: str, limit: int | None = None) -> list[str]:
        return [task.id[:5] for task in resolve_tasks(spec, cache_dir=tmp_path, count=20, limit=limit)]

    assert ids("shell:train[2:5]") == ["00002", "00003", "00004"]
    assert ids("shell:train[:2]") == ["00000", "00001"]
    assert ids("shell:train[18:]") == ["00018", "00019"]
    assert ids("shell:train[2:9]", limit=1) == ["00002"]
    assert len(ids("shell:train")) == 20


def test_hard_and_named_families_can_be_asked_for(tmp_path: Path) -> None:
    hard = resolve_tasks("shell:train:hard", cache_dir=tmp_path, count=5)
    assert [task.provenance.family for task in hard] == list(HARD_FAMILIES)
    two = resolve_tasks("shell:train:find,chain", cache_dir=tmp_path, count=4)
    assert [task.provenance.family for task in two] == ["find", "chain"] * 2


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("nowhere", "neither a directory of Harbor tasks"),
        ("shell", "no such shell set; the sets are shell:train"),
        ("shell:test", "no such shell set"),
        ("shell:train:nap", "families must be names among"),
        ("shell:train[5:5]", "the slice is empty"),
        ("shell:train[50:]", "shell:train ends before task 50"),
    ],
)
def test_a_spec_that_means_nothing_gets_one_line(tmp_path: Path, spec: str, words: str) -> None:
    with pytest.raises(TaskError) as caught:
        resolve_tasks(spec, cache_dir=tmp_path, count=9)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_directory_of_tasks_is_a_set(tmp_path: Path) -> None:
    shell.write_task_set(tmp_path / "mine", split="train", count=3)
    assert len(resolve_tasks(str(tmp_path / "mine"), cache_dir=tmp_path / "cache")) == 3
    assert not (tmp_path / "cache").exists()
