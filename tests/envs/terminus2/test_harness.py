"""The loop of terminus-2: what ends a rollout, what is told, and what is never done."""

import json
from pathlib import Path
from typing import Any

import pytest

from envs.conversation import SampledConversation, ScriptedConversation
from envs.errors import MalformedReply, SandboxDied, SandboxError, TurnLimit
from envs.sampler import SamplingParams
from envs.sandbox import ExecResult
from envs.task import Environment, Limits, Provenance, Task, VerifierSpec
from envs.terminus2.harness import Malformed, Terminus2
from envs.terminus2.prompts import COMPACT, FULL, ReplyFormat, in_format
from tests.envs.tokens import special_id, text_ids, tiny_renderer
from tests.fakes.sampler import FakeSampler
from tests.fakes.screen_sandbox import ScreenSandbox

TASK = Task(
    id="t",
    instruction="Write {{ hello }} to a.txt",
    environment=Environment(),
    verifier=VerifierSpec(),
    limits=Limits(),
    provenance=Provenance(),
    path=Path("/nowhere"),
)
DONE = '{"analysis":"","plan":"","commands":[],"task_complete":true}'


def reply(*keystrokes: str, **fields: Any) -> str:
    commands = [{"keystrokes": keys, "duration": 0.1} for keys in keystrokes]
    return json.dumps({"analysis": "", "plan": "", "commands": commands} | fields)


LS = reply("ls\n")


async def test_completion_claimed_twice_ends_the_rollout() -> None:
    sandbox = ScreenSandbox("$", "$ ls\na\n$")
    conversation = ScriptedConversation([LS, DONE, DONE, LS])
    await Terminus2(FULL).run(TASK, sandbox, conversation)
    assert len(conversation.turns) == 3
    assert len(sandbox.commands) == 3, "one exec to start and one a Turn; the last one runs nothing"
    assert "Are you sure" in conversation.turns[1].observation


async def test_the_full_prompt_holds_instruction_and_screen() -> None:
    conversation = ScriptedConversation([DONE, DONE])
    await Terminus2(FULL).run(TASK, ScreenSandbox("root@box:/app#"), conversation)
    assert conversation.prompt.endswith(
        "Task Description:\nWrite {{ hello }} to a.txt\n\nCurrent terminal state:\nroot@box:/app#\n"
    )
    for rule in ('"analysis"', '"plan"', '"commands"', '"keystrokes"', '"duration"', '"task_complete"', "C-c", "60"):
        assert rule in conversation.prompt


async def test_new_output_is_told_from_the_prompt_line_on_and_an_unchanged_terminal_as_a_screen() -> None:
    conversation = ScriptedConversation([LS, reply(""), DONE, DONE])
    await Terminus2(FULL).run(TASK, ScreenSandbox("x\n$", "x\n$ ls\na\n$"), conversation)
    assert conversation.turns[0].observation == "New Terminal Output:\n$ ls\na\n$\n"
    assert conversation.turns[1].observation == "Current Terminal Screen:\nx\n$ ls\na\n$\n"


async def test_a_reply_that_is_not_complete_takes_the_claim_back() -> None:
    conversation = ScriptedConversation([DONE, LS, DONE, DONE, LS])
    await Terminus2(FULL).run(TASK, ScreenSandbox("$"), conversation)
    assert len(conversation.turns) == 4


async def test_a_malformed_reply_is_told_and_leaves_the_claim_standing() -> None:
    sandbox = ScreenSandbox("$")
    conversation = ScriptedConversation([DONE, "I am sure.", DONE, LS])
    await Terminus2(FULL).run(TASK, sandbox, conversation)
    assert len(conversation.turns) == 3
    assert conversation.turns[1].observation == (
        "Previous response had parsing errors:\nERROR: No valid JSON object found\n\n"
        "Please fix these issues and provide a proper JSON response.\n"
    )
    assert len(sandbox.commands) == 2, "nothing is typed for a malformed reply"


async def test_warnings_of_a_malformed_reply_are_told_with_the_error() -> None:
    conversation = ScriptedConversation(["So: {}", DONE, DONE])
    await Terminus2(FULL).run(TASK, ScreenSandbox("$"), conversation)
    assert "\nWARNINGS: Extra text detected before the JSON object\n" in conversation.turns[0].observation


async def test_a_reply_with_warnings_is_done_and_the_warnings_come_first() -> None:
    conversation = ScriptedConversation(["Sure! " + LS, DONE, DONE])
    await Terminus2(FULL).run(TASK, ScreenSandbox("$", "$ ls\n$"), conversation)
    assert conversation.turns[0].observation == (
        "Previous response had warnings:\nWARNINGS: Extra text detected before the JSON object\n\n"
        "New Terminal Output:\n$ ls\n$\n"
    )


async def test_without_confirmation_one_claim_ends_and_its_commands_are_run() -> None:
    sandbox = ScreenSandbox("$")
    conversation = ScriptedConversation([reply("make\n", task_complete=True), LS])
    await Terminus2(COMPACT, confirm=False).run(TASK, sandbox, conversation)
    assert len(conversation.turns) == 1
    assert "make" in sandbox.commands[1]


async def test_the_commands_of_a_confirming_reply_are_run() -> None:
    sandbox = ScreenSandbox("$")
    conversation = ScriptedConversation([DONE, reply("make\n", task_complete=True)])
    await Terminus2(COMPACT).run(TASK, sandbox, conversation)
    assert "make" in sandbox.commands[-1]


async def test_a_malformed_reply_may_end_or_fail_the_rollout() -> None:
    conversation = ScriptedConversation([LS, "babble", LS])
    await Terminus2(COMPACT, malformed=Malformed.END).run(TASK, ScreenSandbox("$"), conversation)
    assert len(conversation.turns) == 2
    with pytest.raises(MalformedReply, match="No valid JSON"):
        await Terminus2(COMPACT, malformed=Malformed.FAIL).run(
            TASK, ScreenSandbox("$"), ScriptedConversation(["babble"])
        )


async def test_a_cut_reply_is_not_done_even_when_it_could_be_mended() -> None:
    mendable = LS[:-1]
    sandbox = ScreenSandbox("$")
    sampler = FakeSampler(lambda ids: text_ids(mendable) if len(sampler.calls) == 1 else [special_id("<|end|>")])
    conversation = SampledConversation(
        tiny_renderer(),
        sampler,
        SamplingParams(max_tokens=len(text_ids(mendable))),
        max_turns=2,
        context_tokens=10_000,
        key="t",
    )
    with pytest.raises(TurnLimit):
        await Terminus2(FULL).run(TASK, sandbox, conversation)
    assert "NONE of the actions" in conversation.turns[0].observation
    assert len(sandbox.commands) == 1


async def test_compact_messages_hold_output_alone() -> None:
    conversation = ScriptedConversation([reply("cat a\n"), reply("echo x > b\n"), DONE, "babble", DONE])
    screens = ("$", "$ cat a\nhi\n\n there\n$", "$ cat a\nhi\n\n there\n$ echo x > b\n$")
    await Terminus2(COMPACT).run(TASK, ScreenSandbox(*screens), conversation)
    assert conversation.prompt == TASK.instruction
    assert [turn.observation for turn in conversation.turns] == [
        "hi\n there\n$",
        "$",
        "$\nsure?",
        "error: not JSON",
        "",
    ]


async def test_compact_messages_are_never_empty() -> None:
    conversation = ScriptedConversation([reply("x"), DONE, DONE])
    await Terminus2(COMPACT).run(TASK, ScreenSandbox(""), conversation)
    assert conversation.turns[0].observation == "..."


async def test_long_output_is_cut_in_its_middle() -> None:
    output = "a" * 300 + "b" * 300
    conversation = ScriptedConversation([reply("cat a\n"), DONE, DONE])
    await Terminus2(COMPACT).run(TASK, ScreenSandbox("$", f"$ cat a\n{output}\n$"), conversation)
    assert conversation.turns[0].observation == "a" * (200 - len("$ cat a\n")) + "\n...\n" + "b" * 198 + "\n$"


async def test_a_sandbox_without_tmux_names_the_remedy() -> None:
    missing = ExecResult(exit_code=127, stdout=b"", stderr=b"bash: tmux: command not found")
    with pytest.raises(SandboxError, match="install it"):
        await Terminus2(FULL).run(TASK, ScreenSandbox(missing), ScriptedConversation([]))
    broken = ExecResult(exit_code=1, stdout=b"", stderr=b"no space left")
    with pytest.raises(SandboxError, match="no space left"):
        await Terminus2(FULL).run(TASK, ScreenSandbox(broken), ScriptedConversation([]))


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (ExecResult(exit_code=1, stdout=b"", stderr=b"no server running"), "no server running"),
        (ExecResult(exit_code=124, stdout=b"", stderr=b""), "did not answer"),
        (ExecResult(exit_code=0, stdout=b"moo\n", stderr=b""), "answered 'moo'"),
    ],
)
async def test_a_terminal_that_is_gone_is_the_policys_doing(answer: ExecResult, message: str) -> None:
    conversation = ScriptedConversation([LS])
    with pytest.raises(SandboxDied, match=message):
        await Terminus2(FULL).run(TASK, ScreenSandbox("$", answer), conversation)
    assert len(conversation.turns) == 1


async def test_long_keystrokes_and_nul_travel_by_file() -> None:
    sandbox = ScreenSandbox("$")
    conversation = ScriptedConversation([reply("x" * 5000 + "\n", "\0", "ls\n"), DONE, DONE])
    await Terminus2(FULL).run(TASK, sandbox, conversation)
    assert sorted(map(len, sandbox.files.values())) == [1, 5001]
    assert "xxx" not in sandbox.commands[1]


async def test_half_a_surrogate_pair_does_no_harm() -> None:
    sandbox = ScreenSandbox("$")
    await Terminus2(FULL).run(TASK, sandbox, ScriptedConversation([reply("echo \ud83d\n"), DONE, DONE]))
    assert "echo ?\n" in sandbox.commands[1]


XML = in_format(FULL, ReplyFormat.XML)
XML_LS = '<response><analysis/><plan/><commands><keystrokes duration="0.1">ls\n</keystrokes></commands></response>'
XML_DONE = "<response><analysis/><plan/><commands/><task_complete>true</task_complete></response>"


async def test_xml_replies_are_played_and_an_error_asks_for_xml() -> None:
    sandbox = ScreenSandbox("$", "$ ls\na\n$")
    conversation = ScriptedConversation([XML_LS, LS, XML_DONE, XML_DONE])
    await Terminus2(XML).run(TASK, sandbox, conversation)
    assert "ls\n" in sandbox.commands[1]
    assert conversation.turns[0].observation == "New Terminal Output:\n$ ls\na\n$\n"
    assert conversation.turns[1].observation.endswith("Please fix these issues and provide a proper XML response.\n")
    assert len(conversation.turns) == 4


async def test_an_xml_reply_that_was_cut_behind_its_end_is_done() -> None:
    sandbox = ScreenSandbox("$")
    sampler = FakeSampler(lambda ids: text_ids(f"{XML_LS} and so on"))
    params = SamplingParams(max_tokens=len(text_ids(XML_LS)) + 4)
    conversation = SampledConversation(tiny_renderer(), sampler, params, max_turns=1, context_tokens=10_000, key="t")
    with pytest.raises(TurnLimit):
        await Terminus2(XML).run(TASK, sandbox, conversation)
    assert "ls\n" in sandbox.commands[1]
