"""Frames of the agent's protocol, and which commands need no shell."""

import struct
import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs.local.wire import Connection, Kind, Operation, encode_exec, encode_put, plain_words


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("/usr/bin/printf 'a b' c", ["/usr/bin/printf", "a b", "c"]),
        ("exec tmux -u  send-keys -- 'a'\"'\"'b' \\; wait", ["tmux", "-u", "send-keys", "--", "a'b", ";", "wait"]),
        ("tmux '' \"\" x='1 2'", ["tmux", "", "", "x=1 2"]),
        ("./run.sh", ["./run.sh"]),
    ],
)
def test_plain_words_are_what_bash_would_pass(command: str, words: list[str]) -> None:
    assert plain_words(command) == words


@pytest.mark.parametrize(
    "command",
    ["echo hi", "", " ", "/bin/echo $HOME", "/bin/ls | wc", "/bin/ls\nls", "tmux ~/x", "A=1 /bin/ls", "/bin/ls a*",
     "/b 'x", "/bin/ls `id`", '/bin/echo "$A"', "/bin/ls &", "/bin/ls >x", "/bin/ls {a,b}", "/bin/ls #x", "tmux2",
     "/bin/l's'",
     "x=/bin/ls y", "/bin/ls \\\n x", "/bin/" + "a b " * 300],
)  # fmt: skip
def test_what_a_shell_must_read_has_no_plain_words(command: str) -> None:
    assert plain_words(command) == []


_PIECES = st.sampled_from(
    ["a", " ", "'", '"', "\\", "x=", "~", ";", "'b c'", '"d"', "$A", "\\;", "é", "*", "!", "-", "  "]
)


@settings(max_examples=60)
@given(st.lists(_PIECES, max_size=9).map("".join))
def test_bash_agrees_on_plain_words(rest: str) -> None:
    command = f"/usr/bin/printf '%s\\0' {rest}"
    words = plain_words(command)
    if words:
        shell = subprocess.run(["bash", "-c", command], capture_output=True, check=False).stdout
        assert subprocess.run(words, capture_output=True, check=False).stdout == shell


def test_an_exec_body_is_limits_words_variables_and_strings() -> None:
    body = encode_exec("echo hi", timeout_s=1.5, max_output=10, cwd="/a", stdin=b"in", env={"A": "1"})
    assert struct.unpack_from("=IIII", body) == (1500, 10, 0, 1)
    assert body[16:] == b"\x03\0\0\0/a\0" + b"\x08\0\0\0echo hi\0" + b"\x02\0\0\0in" + b"\x04\0\0\0A=1\0"


def test_a_put_body_is_kind_mode_path_and_data() -> None:
    assert (
        encode_put(Kind.FILE, "/f", b"xy", mode=0o644) == struct.pack("=II", 1, 0o644) + b"\x03\0\0\0/f\0\x02\0\0\0xy"
    )


async def test_answers_in_pieces_and_in_any_order_reach_their_requests() -> None:
    import asyncio
    import socket

    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    lost: list[bool] = []
    connection = Connection(lambda: lost.append(True))
    await asyncio.get_running_loop().create_connection(lambda: connection, sock=ours)
    one = asyncio.create_task(connection.request(Operation.KILL, b"", deadline_s=5))
    two = asyncio.create_task(connection.request(Operation.GET, [b"a", b"b"], deadline_s=5))
    three = asyncio.create_task(connection.request(Operation.GET, b"", deadline_s=5))
    await asyncio.sleep(0)
    answers = struct.pack("=IIIiII", 23, Operation.GET, 2, 0, 2, 1) + b"xyz"
    answers += struct.pack("=IIIiII", 20, Operation.KILL, 1, -5, 0, 0)
    for at in range(0, len(answers), 7):
        theirs.send(answers[at : at + 7])
        await asyncio.sleep(0)
    assert await two == (0, b"xy", b"z")
    assert await one == (-5, b"", b"")
    theirs.close()
    assert await three is None and lost == [True]
    assert await connection.request(Operation.KILL, b"", deadline_s=5) is None
    connection.close()


async def test_a_request_without_an_answer_ends_at_its_deadline() -> None:
    import asyncio
    import socket

    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    connection = Connection(lambda: None)
    await asyncio.get_running_loop().create_connection(lambda: connection, sock=ours)
    with pytest.raises(TimeoutError), theirs:
        await connection.request(Operation.KILL, b"", deadline_s=0.01)
    connection.close()
    await asyncio.sleep(0)
