"""terminus-2 to the letter: the table of replies, and what a reply that was cut is worth."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envs.conversation import ScriptedConversation
from envs.harness import Conversation
from envs.terminus2.harness import Terminus2
from envs.terminus2.parser import ParsedReply
from envs.terminus2.prompts import FULL, ReplyFormat, in_format
from envs.terminus2.xml_parser import parse_xml_reply
from tests.envs.terminus2.conformance import JSON_ROWS, XML_ROWS, Row
from tests.envs.terminus2.test_harness import DONE, LS, TASK, reply
from tests.fakes.screen_sandbox import ScreenSandbox

JSON, XML = FULL, in_format(FULL, ReplyFormat.XML)


def check(parsed: ParsedReply | None, row: Row) -> None:
    assert parsed is not None
    assert [(command.keystrokes, command.duration_s) for command in parsed.commands] == list(row.commands)
    assert parsed.is_complete == row.is_complete
    assert bool(parsed.error) == bool(row.error)
    assert row.error in parsed.error
    assert len(parsed.warnings) == len(row.warnings), parsed.warnings
    assert all(expected in said for expected, said in zip(row.warnings, parsed.warnings, strict=True)), parsed.warnings


@pytest.mark.parametrize("row", JSON_ROWS, ids=lambda row: row.shows)
def test_json_replies(row: Row) -> None:
    check(JSON.read(row.reply, was_cut=False), row)


@pytest.mark.parametrize("row", XML_ROWS, ids=lambda row: row.shows)
def test_xml_replies(row: Row) -> None:
    check(XML.read(row.reply, was_cut=False), row)


@pytest.mark.parametrize("row", [*JSON_ROWS[:10], JSON_ROWS[-2]], ids=lambda row: row.shows)
def test_nothing_of_a_json_reply_that_was_cut_is_done(row: Row) -> None:
    assert JSON.read(row.reply, was_cut=True) is None


CLEAN = XML_ROWS[0].reply


def test_an_xml_reply_that_was_cut_after_its_end_is_done_without_what_follows() -> None:
    check(XML.read(f"{CLEAN} And then I", was_cut=True), XML_ROWS[0])


@pytest.mark.parametrize(
    "reply",
    [
        CLEAN.removesuffix("</response>"),
        CLEAN.split("</commands>")[0],
        "<response><analysis/><plan/></response>",
        CLEAN.replace("</response>", "<commands></commands></response>"),
        "",
    ],
)
def test_an_xml_reply_that_was_cut_elsewhere_is_not_done(reply: str) -> None:
    assert XML.read(reply, was_cut=True) is None


@given(st.lists(st.sampled_from([*"<>/ =\"'\n1", "response", "commands", "keystrokes", "duration", "task_complete"])))
def test_any_text_gives_an_answer(parts: list[str]) -> None:
    parsed = parse_xml_reply("".join(parts))
    assert not (parsed.error and parsed.commands)


def test_the_xml_prompt_states_the_xml_format_and_no_other() -> None:
    for word in ("<response>", '<keystrokes duration="0.1">', "&amp;", "C-c", "{{ instruction }}", "60"):
        assert word in XML.initial
    assert "JSON" not in XML.initial + XML.malformed
    assert "<response>" not in JSON.initial
    assert "proper XML response" in XML.malformed


async def observed(sandbox: ScreenSandbox, *replies: str) -> Conversation:
    conversation = ScriptedConversation([*replies, DONE, DONE])
    await Terminus2(FULL).run(TASK, sandbox, conversation)
    return conversation


@pytest.mark.parametrize(("seconds", "slept"), [(0.1, "0.1"), (0, "0"), (60, "60"), (61, "60"), (1e12, "60")])
async def test_a_command_is_waited_for_as_long_as_it_says_and_a_minute_at_most(seconds: float, slept: str) -> None:
    sandbox = ScreenSandbox("$")
    await observed(sandbox, reply(commands=[{"keystrokes": "ls\n", "duration": seconds}]))
    assert f"&& sleep {slept} &&" in sandbox.commands[1]


async def test_commands_are_typed_in_order_each_with_its_wait() -> None:
    sandbox = ScreenSandbox("$")
    await observed(sandbox, reply("cd a\n", "C-c", "make\n"))
    typed = sandbox.commands[1]
    assert [typed.index(word) for word in ("cd a", "C-c", "make")] == sorted(
        typed.index(word) for word in ("cd a", "C-c", "make")
    )
    assert typed.count("sleep 0.1") == 3


async def test_an_output_of_10000_bytes_is_whole_and_a_longer_one_keeps_5000_at_each_end() -> None:
    head = "$ ls\n"
    for num_bytes in (10_000, 10_001):
        output = "a" * (5000 - len(head)) + "b" * (num_bytes - 5000 - len("\n$")) + "\n$"
        told = (await observed(ScreenSandbox("$", head + output), LS)).turns[0].observation
        text = told.removeprefix("New Terminal Output:\n").removesuffix("\n")
        if num_bytes == 10_000:
            assert text == head + output
            continue
        first, marker, last = text.partition("\n[... output limited to 10000 bytes; 1 bytes left out here ...]\n")
        assert (len(first), bool(marker), len(last)) == (5000, True, 5000)
        assert (head + output).startswith(first) and (head + output).endswith(last)


async def test_the_first_look_is_a_screen_then_what_is_new_is_told_and_without_news_the_screen_again() -> None:
    conversation = await observed(ScreenSandbox("$", "$ ls\na\n$", "$ ls\na\n$"), LS, reply(""))
    assert conversation.prompt.endswith("Current terminal state:\n$\n")
    assert conversation.turns[0].observation.startswith("New Terminal Output:\n")
    assert conversation.turns[1].observation.startswith("Current Terminal Screen:\n")


async def test_a_big_paste_goes_in_by_a_file() -> None:
    sandbox = ScreenSandbox("$")
    text = "cat > a <<'X'\n" + "é" * 60_000 + "\nX\n"
    await observed(sandbox, reply(text))
    assert list(sandbox.files.values()) == [text.encode()]
    assert "paste-buffer" in sandbox.commands[1]
    assert len(sandbox.commands[1]) < 1000
