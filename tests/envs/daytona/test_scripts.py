"""What the scripts print is read back as it was; they run in tests/envs/daytona/test_contract.py."""

import base64
import subprocess

import pytest

from envs.daytona.scripts import DIR, SETUP, Command, kill_all_script, parse_result, start_script, wait_script
from envs.sandbox import ExecResult


def command(**fields: object) -> Command:
    given = {"id": "c1", "command": "echo hi", "timeout_s": 5.0, "cwd": "/app", "env": {}, "stdin": b"", **fields}
    return Command(max_output_bytes=100, **given)  # pyright: ignore[reportArgumentType]


def test_a_result_is_its_status_and_both_streams() -> None:
    out = base64.encodebytes(bytes(range(256))).decode()
    assert parse_result(f"7\n{out}.\n.\n") == ExecResult(exit_code=7, stdout=bytes(range(256)), stderr=b"")
    assert parse_result("0\n.\nZXJy\n.\n") == ExecResult(exit_code=0, stdout=b"", stderr=b"err")
    assert parse_result("running\n") is None


@pytest.mark.parametrize("text", ["", "0\n", "0\naGk=\n.\n", "x\n.\n.\n", "0\na\n.\n.\n", "Segmentation fault\n"])
def test_anything_else_is_no_result(text: str) -> None:
    with pytest.raises(ValueError, match="not"):
        parse_result(text)


def test_results_that_were_read_are_forgotten_with_the_next_command() -> None:
    assert f"rm -rf {DIR}/a {DIR}/b\n" in start_script(command(), spent=["a", "b"])


@pytest.mark.parametrize(
    "script",
    [
        start_script(command(command="echo 'it''s' \"$HOME\"\n", env={"A": "b 'c'"}, stdin=b"x\0y"), spent=[]),
        start_script(command(cwd="/a b"), spent=["z"]),
        wait_script("c1", wait_s=2.5),
        kill_all_script(["1.5", "2.6"]),
        SETUP,
    ],
    ids=["start with everything", "start", "wait", "kill all", "setup"],
)
def test_every_script_is_valid_bash(script: str) -> None:
    checked = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True, timeout=10, check=False)
    assert (checked.returncode, checked.stderr) == (0, "")
    assert "{{" not in script and "}}" not in script, "a brace was left from formatting"
