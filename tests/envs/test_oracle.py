"""The oracle's steps are complete commands; its replies are what a policy of that style would say."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from envs.conversation import ScriptedConversation
from envs.errors import HarnessTimeout, TaskError, TurnLimit
from envs.nop import NopHarness
from envs.oracle import Claim, SolutionScript, oracle_conversation, script_conversation, solution_steps
from envs.sandbox import ExecResult
from envs.steps import steps_of
from envs.task import Environment, Limits, Provenance, Step, Task, VerifierSpec
from envs.terminus2.harness import Terminus2
from envs.terminus2.parser import parse_reply
from envs.terminus2.prompts import COMPACT, FULL, Prompts, ReplyFormat, in_format
from tests.fakes.screen_sandbox import ScreenSandbox


def make_task(root: Path, script: str | None) -> Task:
    (root / "solution").mkdir()
    if script is not None:
        (root / "solution" / "solve.sh").write_text(script)
    return Task(
        id="t",
        instruction="Do it",
        environment=Environment(),
        verifier=VerifierSpec(),
        limits=Limits(),
        provenance=Provenance(),
        path=root,
    )


@pytest.mark.parametrize(
    ("script", "steps"),
    [
        ("ls\ncat a.txt\n", ["ls", "cat a.txt"]),
        ("#!/bin/bash\nset -euo pipefail\nset -e\n\n# why\n  # indented\nls\nexit 0\n", ["ls"]),
        ("ls", ["ls"]),
        ("cat > a <<'X'\nif (\n# kept\n\nX\nls\n", ["cat > a <<'X'\nif (\n# kept\n\nX", "ls"]),
        ("cat <<A <<B\n1\nA\n2\nB\nls\n", ["cat <<A <<B\n1\nA\n2\nB", "ls"]),
        ("cat <<-X\n\tone\n\tX\n", ["cat <<-X\n\tone\n\tX"]),
        ('echo "a\n# b\n\nc"\nls\n', ['echo "a\n# b\n\nc"', "ls"]),
        ("echo 'it\nis'\n", ["echo 'it\nis'"]),
        ("make \\\n  all\nls\n", ["make \\\n  all", "ls"]),
        ("echo \\\\\nls\n", ["echo \\\\", "ls"]),
        ("for i in 1 2\ndo\n  echo $i\ndone\nls\n", ["for i in 1 2\ndo\n  echo $i\ndone", "ls"]),
        ("if true; then\n  ls\nfi\n", ["if true; then\n  ls\nfi"]),
        ("f() {\n  ls\n}\nf\n", ["f() {\n  ls\n}", "f"]),
        ("ls |\n  wc -l\n", ["ls |\n  wc -l"]),
        ("true &&\n  ls\n", ["true &&\n  ls"]),
        ("( cd /tmp\nls )\n", ["( cd /tmp\nls )"]),
        ("x=$(cat <<X\n1\nX\n)\n", ["x=$(cat <<X\n1\nX\n)"]),
        ('python3 - <<\'X\'\nprint(\'$1\', """\n""")\nX\n', ['python3 - <<\'X\'\nprint(\'$1\', """\n""")\nX']),
        ("awk '{print $1}' a\n", ["awk '{print $1}' a"]),
        ("make || exit 1\n", ["make || exit 1"]),
        ("set -x\nset aside\n", ["set aside"]),
    ],
)
def test_steps_are_complete_commands(tmp_path: Path, script: str, steps: list[str]) -> None:
    assert solution_steps(make_task(tmp_path, script)) == steps


@pytest.mark.parametrize(
    "script",
    [
        'cd "$(dirname "$0")"\n',
        "cp ${BASH_SOURCE%/*}/a .\n",
        'echo "$1"\n',
        "exit 1\nls\n",
        "echo 'never closed\n",
        "\n",
    ],
)
def test_a_script_that_must_run_as_a_file_is_refused(tmp_path: Path, script: str) -> None:
    with pytest.raises(TaskError, match="SolutionScript"):
        solution_steps(make_task(tmp_path, script))


def test_a_task_without_solution_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="missing"):
        solution_steps(make_task(tmp_path, None))


async def told(task: Task, prompts: Prompts, *, claim: Claim | None = None, confirm: bool = True) -> list[str]:
    conversation = oracle_conversation(task, prompts, claim=claim, confirm=confirm)
    await Terminus2(prompts, confirm=confirm).run(task, ScreenSandbox("$"), conversation)
    with pytest.raises(TurnLimit):
        await conversation.ask("more?")
    return [turn.reply for turn in conversation.turns]


async def test_compact_replies_hold_nothing_to_spare(tmp_path: Path) -> None:
    assert await told(make_task(tmp_path, "ls\nmv a b\n"), COMPACT) == [
        '{"analysis":"","plan":"","commands":[{"keystrokes":"ls\\n"}]}',
        '{"analysis":"","plan":"","commands":[{"keystrokes":"mv a b\\n"}],"task_complete":true}',
        '{"analysis":"","plan":"","commands":[],"task_complete":true}',
    ]


async def test_full_replies_look_before_they_claim(tmp_path: Path) -> None:
    replies = await told(make_task(tmp_path, "ls\nmv a b\n"), FULL)
    parsed = [parse_reply(reply) for reply in replies]
    assert [[c.keystrokes for c in p.commands] for p in parsed] == [["ls\n"], ["mv a b\n"], [], []]
    assert [p.is_complete for p in parsed] == [False, False, True, True]
    assert not any(p.warnings for p in parsed)
    assert all(json.loads(reply)["analysis"] and json.loads(reply)["plan"] for reply in replies)


@pytest.mark.parametrize(
    ("claim", "confirm", "num_turns"),
    [
        (Claim.WITH_LAST_COMMAND, True, 3),
        (Claim.WITH_LAST_COMMAND, False, 2),
        (Claim.AFTER_LOOK, True, 4),
        (Claim.AFTER_LOOK, False, 3),
    ],
)
@pytest.mark.parametrize("prompts", [COMPACT, FULL])
async def test_the_claim_is_made_where_it_is_asked_for(
    tmp_path: Path, prompts: Prompts, claim: Claim, confirm: bool, num_turns: int
) -> None:
    replies = await told(make_task(tmp_path, "ls\nls\n"), prompts, claim=claim, confirm=confirm)
    assert len(replies) == num_turns


@pytest.mark.parametrize("style", [COMPACT, FULL])
async def test_the_oracle_speaks_xml_without_a_warning(tmp_path: Path, style: Prompts) -> None:
    prompts = in_format(style, ReplyFormat.XML)
    replies = await told(make_task(tmp_path, "echo '<a> & b'\nls\n"), prompts, claim=Claim.AFTER_LOOK)
    parsed = [prompts.read(reply, was_cut=False) for reply in replies]
    assert [[c.keystrokes for c in p.commands] for p in parsed if p] == [["echo '<a> & b'\n"], ["ls\n"], [], []]
    assert [(p.is_complete, p.error, p.warnings) for p in parsed if p] == [(k > 1, "", ()) for k in range(4)]


def test_a_solution_that_xml_cannot_hold_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="reply_format json"):
        oracle_conversation(make_task(tmp_path, "echo '</keystrokes>'\n"), in_format(FULL, ReplyFormat.XML))


async def test_the_oracle_plays_the_steps_of_a_task_one_after_the_other(tmp_path: Path) -> None:
    task = make_task(tmp_path, None)
    for name in ("one", "two"):
        (tmp_path / "steps" / name / "solution").mkdir(parents=True)
        (tmp_path / "steps" / name / "solution" / "solve.sh").write_text(f"echo {name}\n")
    task = replace(task, steps=tuple(Step(name=name, instruction=name) for name in ("one", "two")))
    conversation = oracle_conversation(task, COMPACT)
    for step in steps_of(task):
        await Terminus2(COMPACT).run(step.task, ScreenSandbox("$"), conversation)
    typed = [c.keystrokes for turn in conversation.turns for c in parse_reply(turn.reply).commands]
    assert typed == ["echo one\n", "echo two\n"]
    assert len(script_conversation(task)._replies) == 2


def test_a_tab_is_typed_behind_ctrl_v(tmp_path: Path) -> None:
    conversation = oracle_conversation(make_task(tmp_path, "printf 'a\tb'\n"), COMPACT)
    assert "\\u0016\\t" in conversation._replies[0]


async def test_a_whole_script_is_uploaded_and_run_by_one_command(tmp_path: Path) -> None:
    task = make_task(tmp_path, "echo $0\n")
    sandbox = ScreenSandbox("")
    conversation = script_conversation(task)
    await SolutionScript().run(task, sandbox, conversation)
    assert sandbox.files == {"/solution/solve.sh": b"echo $0\n"}
    assert sandbox.commands == ["bash /solution/solve.sh"]
    assert (conversation.prompt, len(conversation.turns)) == ("Do it", 1)
    late = ScreenSandbox(ExecResult(exit_code=124, stdout=b"", stderr=b""))
    with pytest.raises(HarnessTimeout):
        await SolutionScript().run(task, late, script_conversation(task))


async def test_nop_does_nothing(tmp_path: Path) -> None:
    sandbox = ScreenSandbox("$")
    await NopHarness().run(make_task(tmp_path, None), sandbox, ScriptedConversation(()))
    assert sandbox.commands == []
