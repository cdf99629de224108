"""BashTools: calls of a reply become commands in a shell that remembers its directory."""

import json
from pathlib import Path
from typing import Any

import pytest

from envs.bash_tools import BashTools, BashToolsConfig
from envs.conversation import SampledConversation, ScriptedConversation
from envs.errors import TurnLimit
from envs.sampler import SamplingParams
from envs.task import Environment, Limits, Provenance, Task, VerifierSpec
from tests.envs.tokens import text_ids, tiny_renderer
from tests.fakes.directory_sandbox import DirectorySandbox
from tests.fakes.sampler import FakeSampler

TASK = Task(
    id="t",
    instruction='Write {"hello"} to a.txt',
    environment=Environment(),
    verifier=VerifierSpec(),
    limits=Limits(),
    provenance=Provenance(),
    path=Path("/nowhere"),
)
SUBMIT = '<tool_call>{"name": "submit", "arguments": {}}</tool_call>'


def bash(command: Any, **arguments: Any) -> str:
    call = {"name": "bash", "arguments": {"command": command} | arguments}
    return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"


async def told(box: Path, *replies: str, config: BashToolsConfig | None = None) -> list[str]:
    """What each reply but the last was answered, without the wrapping."""
    conversation = ScriptedConversation([*replies, SUBMIT])
    await BashTools(config or BashToolsConfig()).run(TASK, DirectorySandbox(box), conversation)
    observations = [turn.observation for turn in conversation.turns][:-1]
    return [text.removeprefix("<tool_response>\n").removesuffix("\n</tool_response>") for text in observations]


async def test_output_of_both_streams_and_the_exit_status_are_told(tmp_path: Path) -> None:
    assert await told(tmp_path / "b", bash("echo out; echo err >&2; exit 3")) == ["out\nerr\n[exit status 3]"]
    assert await told(tmp_path / "c", bash("true")) == ["[exit status 0]"]


async def test_the_directory_lasts_and_variables_do_not(tmp_path: Path) -> None:
    box = tmp_path / "b"
    replies = [bash("mkdir 'a b'; cd 'a b'; X=1"), bash('pwd; echo "X=$X"'), bash("rmdir '../a b'"), bash("pwd")]
    answers = await told(box, *replies)
    assert answers[1] == f"{box}/app/a b\nX=\n[exit status 0]"
    assert answers[3] == f"{box}/app\n[exit status 0]", "a directory that is gone leads back to the Task's"


async def test_the_calls_of_one_reply_are_made_in_order_and_those_after_submit_are_not(tmp_path: Path) -> None:
    conversation = ScriptedConversation([f"First {bash('echo 1 >a')} then {bash('cat a')}", SUBMIT + bash("rm a")])
    sandbox = DirectorySandbox(tmp_path / "b")
    await BashTools().run(TASK, sandbox, conversation)
    assert conversation.turns[0].observation == (
        "<tool_response>\n[exit status 0]\n</tool_response>\n<tool_response>\n1\n[exit status 0]\n</tool_response>"
    )
    assert await sandbox.read_file("/app/a") == b"1\n"


async def test_a_call_past_its_deadline_is_killed_and_keeps_what_it_printed(tmp_path: Path) -> None:
    answers = await told(tmp_path / "b", bash("echo early; sleep 20", timeout=0.2), bash("exit 124"))
    assert answers == ["early\n[killed: it did not end within 0.2 s]", "[exit status 124]"]


async def test_a_call_may_not_ask_for_more_than_the_deadline(tmp_path: Path) -> None:
    config = BashToolsConfig(call_timeout_s=0.2)
    (answer,) = await told(tmp_path / "b", bash("sleep 20", timeout=600), config=config)
    assert answer == "[killed: it did not end within 0.2 s]"


async def test_a_long_output_is_cut_in_its_middle(tmp_path: Path) -> None:
    config = BashToolsConfig(max_output_bytes=10)
    (answer,) = await told(tmp_path / "b", bash("printf aaaaaaaaaabbbbbbbbbb"), config=config)
    assert answer == "aaaaa\n[... 10 bytes left out ...]\nbbbbb\n[exit status 0]"


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        ("<tool_call>{oops}</tool_call>", "the tool call is not JSON"),
        ("<tool_call>[1]</tool_call>", "the tool call is not a JSON object"),
        ('<tool_call>{"arguments": {}}</tool_call>', "no 'name'"),
        ('<tool_call>{"name": "bash", "arguments": "ls"}</tool_call>', "the arguments of bash are not a JSON object"),
        ('<tool_call>{"name": "bash"', "does not end with </tool_call>"),
        ('<tool_call>{"name": "python", "arguments": {}}</tool_call>', "there is no tool 'python'"),
        (bash(3), "bash needs 'command'"),
        (bash("a\0b"), "bash needs 'command'"),
        (bash("ls", timeout="1"), "'timeout' must be a number"),
        (bash("ls", timeout=0), "'timeout' must be a number"),
        ("I am done.", "No tool was called"),
        (f"<think>{bash('ls')}</think>Done.", "No tool was called"),
    ],
)
async def test_a_call_that_cannot_be_made_is_told_why(tmp_path: Path, reply: str, reason: str) -> None:
    (answer,) = await told(tmp_path / "b", reply)
    assert reason in answer


async def test_the_prompt_names_the_tools_and_the_task(tmp_path: Path) -> None:
    conversation = ScriptedConversation([SUBMIT])
    await BashTools().run(TASK, DirectorySandbox(tmp_path / "b"), conversation)
    tools = conversation.prompt.split("<tools>\n")[1].split("\n</tools>")[0]
    assert [json.loads(line)["name"] for line in tools.split("\n")] == ["bash", "submit"]
    assert conversation.prompt.endswith('Task:\nWrite {"hello"} to a.txt\n')


async def test_a_reply_that_was_cut_is_not_done(tmp_path: Path) -> None:
    reply = bash("touch a")
    params = SamplingParams(max_tokens=len(text_ids(reply)))
    sampler = FakeSampler(lambda ids: text_ids(reply))
    conversation = SampledConversation(tiny_renderer(), sampler, params, max_turns=1, context_tokens=10_000, key="t")
    sandbox = DirectorySandbox(tmp_path / "b")
    with pytest.raises(TurnLimit):
        await BashTools().run(TASK, sandbox, conversation)
    assert sandbox.calls == []
