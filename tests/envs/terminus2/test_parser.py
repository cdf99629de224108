"""The parser, rule by rule: what is an error, what is a warning, what is mended."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envs.terminus2.parser import Command, ParsedReply, parse_reply

LS = Command(keystrokes="ls\n", duration_s=0.1)
BRACES = "AUTO-CORRECTED: closed unbalanced braces - please fix this in future responses"
EXTRACTED = "AUTO-CORRECTED: extracted JSON from mixed content - please fix this in future responses"


def reply(commands: Any = None, **fields: Any) -> str:
    default = [{"keystrokes": "ls\n", "duration": 0.1}]
    return json.dumps({"analysis": "a", "plan": "p", "commands": default if commands is None else commands} | fields)


def test_a_clean_reply_is_commands_and_nothing_else() -> None:
    assert parse_reply(reply()) == ParsedReply(commands=(LS,))


def test_keystrokes_are_taken_verbatim() -> None:
    keys = ["", "C-c", 'echo "}{" \\ \t é\n', " "]
    commands = parse_reply(reply([{"keystrokes": key, "duration": 1} for key in keys])).commands
    assert [command.keystrokes for command in commands] == keys


def test_no_commands_are_fine() -> None:
    assert parse_reply(reply([])) == ParsedReply()


@pytest.mark.parametrize(
    ("value", "is_complete", "num_warnings"),
    [
        (True, True, 0),
        (False, False, 0),
        ("true", True, 0),
        ("Yes", True, 0),
        ("1", True, 0),
        ("no", False, 0),
        (1, True, 1),
        (0, False, 1),
        (None, False, 0),
        ([True], True, 1),
    ],
)
def test_task_complete(value: Any, is_complete: bool, num_warnings: int) -> None:
    parsed = parse_reply(reply(task_complete=value))
    assert (parsed.is_complete, len(parsed.warnings), parsed.commands) == (is_complete, num_warnings, (LS,))


@pytest.mark.parametrize(
    ("duration", "seconds", "warning"),
    [
        (2, 2.0, ""),
        (0, 0.0, ""),
        (600, 600.0, ""),
        (10**400, 1e9, ""),
        ("2", 1.0, "invalid duration"),
        (None, 1.0, "invalid duration"),
        (True, 1.0, "invalid duration"),
        (-1, 1.0, "invalid duration"),
        (float("nan"), 1.0, "invalid duration"),
        (float("inf"), 1.0, "invalid duration"),
        (..., 1.0, "missing duration"),
    ],
)
def test_duration(duration: Any, seconds: float, warning: str) -> None:
    command = {"keystrokes": "ls\n"} | ({} if duration is ... else {"duration": duration})
    parsed = parse_reply(reply([command]))
    assert parsed.commands == (Command(keystrokes="ls\n", duration_s=seconds),)
    assert [warning in w for w in parsed.warnings] == ([True] if warning else [])


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", "No valid JSON"),
        ("I am done.", "No valid JSON"),
        ("}{", "No valid JSON"),
        ('{"analysis": "never closed', "No valid JSON"),
        ("{'analysis': 1}", "Invalid JSON"),
        (reply().replace('"p",', '"p"'), "Invalid JSON"),
        (reply().replace("\\n", "\n"), "Invalid JSON"),
        ("{" * 5000 + "}" * 5000, "Invalid JSON"),
        ('{"a":' * 5000 + "1" + "}" * 5000, "Invalid JSON"),
        ('{"plan": ' + "9" * 5000 + "}", "Invalid JSON"),
        ("{}", "Missing required fields: analysis, plan, commands"),
        ('{"analysis": "", "commands": []}', "Missing required fields: plan"),
        (reply("ls"), "'commands' must be a list"),
        (reply({}), "'commands' must be a list"),
        (reply(["ls"]), "Command 1 must be an object"),
        (reply([{"duration": 1}]), "'keystrokes' is missing"),
        (reply([{"keystrokes": "a\n", "duration": 1}, {"keystrokes": 3}]), "Command 2: required field 'keystrokes'"),
        (reply("ls", task_complete=True), "'commands' must be a list"),
    ],
)
def test_errors_stop_the_turn(text: str, error: str) -> None:
    parsed = parse_reply(text)
    assert error in parsed.error
    assert (parsed.commands, parsed.is_complete) == ((), False)


@pytest.mark.parametrize("commands", [["ls"], [{"duration": 1}], [{"keystrokes": 3}]])
def test_bad_commands_are_a_warning_when_the_task_is_complete(commands: list[Any]) -> None:
    parsed = parse_reply(reply(commands, task_complete=True))
    assert (parsed.error, parsed.is_complete, parsed.commands) == ("", True, ())
    assert "Command 1" in parsed.warnings[-1]


@pytest.mark.parametrize(
    ("text", "warnings"),
    [
        ("Sure: " + reply(), ["before the JSON object"]),
        (reply() + " done", ["after the JSON object"]),
        ("```json\n" + reply() + "\n```", ["before the JSON object", "after the JSON object"]),
        (reply() + reply([]), ["after the JSON object"]),
        ("\n " + reply() + " \n", []),
        (reply(analysis=3), ["'analysis' should be a string"]),
        (reply(plan=None), ["'plan' should be a string"]),
        (reply(extra=1), []),
        ('{"plan":"","analysis":"","commands":[]}', ["wrong order: plan, analysis, commands"]),
        ('{"commands":[],"task_complete":false,"analysis":"","plan":""}', ["wrong order"]),
        (reply([{"keystrokes": "a\n", "duration": 1, "enter": True}]), ["unknown fields: enter"]),
        (reply([{"keystrokes": "a", "duration": 1}]), []),
        (reply([{"keystrokes": "a", "duration": 1}, {"keystrokes": "b\n", "duration": 1}]), ["end with a newline"]),
    ],
)
def test_warnings_let_the_turn_pass(text: str, warnings: list[str]) -> None:
    parsed = parse_reply(text)
    assert parsed.error == ""
    assert len(parsed.warnings) == len(warnings)
    assert all(expected in got for expected, got in zip(warnings, parsed.warnings, strict=True))


def test_missing_closing_braces_are_appended() -> None:
    parsed = parse_reply(reply()[:-1])
    assert (parsed.error, parsed.commands, parsed.warnings) == ("", (LS,), (BRACES,))


def test_an_object_inside_broken_json_is_extracted() -> None:
    parsed = parse_reply("{thinking} " + reply())
    assert (parsed.error, parsed.commands, parsed.warnings) == ("", (LS,), (EXTRACTED,))


def test_a_mend_that_does_not_help_keeps_the_first_error() -> None:
    assert "No valid JSON" in parse_reply('{"analysis": {"a": 1}').error


@given(st.text(alphabet='{}[]":,\\ntrue1keystrokesanalysisplancommands ', max_size=60) | st.text(max_size=40))
def test_any_text_gives_an_answer(text: str) -> None:
    parsed = parse_reply(text)
    assert not (parsed.error and parsed.commands)
