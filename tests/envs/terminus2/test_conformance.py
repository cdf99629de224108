"""terminus-2 to the letter: the table of replies, and what a reply that was cut is worth."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envs.terminus2.parser import ParsedReply
from envs.terminus2.prompts import FULL, ReplyFormat, in_format
from envs.terminus2.xml_parser import parse_xml_reply
from tests.envs.terminus2.conformance import JSON_ROWS, XML_ROWS, Row

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
