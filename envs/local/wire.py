"""Frames between the host and the agent inside a box (envs/local/agent.c), and the connection that carries them.

Invariant: every request is answered exactly once, or fails when the connection ends; answers come in any order.
Native-endian 32-bit words. Request: bytes that follow, operation, id, body. Answer: bytes that follow, operation, id,
status, sizes of two byte strings, the strings. A string in a request is its length, NUL included, and its bytes.
FILL has no body: the entries of a PUT are in the open file that comes with it.
Called by envs/local/sandbox.py.
"""

import asyncio
import contextlib
import re
import socket
import struct
from collections.abc import Callable, Iterable, Mapping
from enum import IntEnum
from typing import NamedTuple, cast

_WORD = struct.Struct("=I")
_REQUEST = struct.Struct("=III")
_ANSWER = struct.Struct("=IIIiII")
_TWO = struct.Struct("=II")
_FOUR = struct.Struct("=IIII")

_PROGRAM = re.compile(r" *(?:exec +)?(tmux|[A-Za-z0-9_@%+:,.-]*/[A-Za-z0-9_@%+:,./-]*)(?= |$)")
"""A path, or the one program that is no shell builtin and is called all the time."""
_PIECE = re.compile(r"""( +)|([A-Za-z0-9_@%+:,./=-]+)|'([^']*)'|"([^"$`\\!]*)"|\\([^\n])""")
_MAX_WORDS = 256
_MAX_REQUEST_BYTES = 8 << 20


class Operation(IntEnum):
    """What is asked of the agent; READY is its own first word."""

    READY = 0
    EXEC = 1
    PUT = 2
    GET = 3
    KILL = 4
    FILL = 5


class Kind(IntEnum):
    """What one entry of a PUT makes."""

    DIR = 0
    FILE = 1
    APPEND = 2
    LINK = 3
    TIME = 4
    """No file but the time of one: `data` is its seconds since 1970, 8 bytes."""


class Answer(NamedTuple):
    """What the agent says: status is an exit code or -errno."""

    status: int
    first: bytes
    second: bytes


def encode_exec(
    command: str, *, timeout_s: float, max_output: int, cwd: str, stdin: bytes, env: Mapping[str, str]
) -> bytes:
    """The body of EXEC. Raises ValueError for a NUL byte in a string, or over 8 MiB in all."""
    words = plain_words(command)
    strings = [*words, *(f"{key}={value}" for key, value in env.items())]
    timeout_ms = max(1, int(min(timeout_s * 1000, 2**31)))
    head = _FOUR.pack(timeout_ms, max_output, len(words), len(strings) - len(words))
    body = b"".join([head, _text(cwd), _text(command), _WORD.pack(len(stdin)), stdin, *map(_text, strings)])
    if len(body) > _MAX_REQUEST_BYTES:
        raise ValueError(f"a command with its stdin must be under 8 MiB, got {len(body)} bytes; write a file first")
    return body


def plain_words(command: str) -> list[str]:
    r"""The words of a command that means the same without a shell, which saves 1 ms of starting one; else [].

    "/usr/bin/printf 'a b' \;" -> ["/usr/bin/printf", "a b", ";"]; "echo $HOME" -> [].
    """
    start = _PROGRAM.match(command)
    if start is None:
        return []
    words, at, is_inside = [start[1]], start.end(), False
    while at < len(command):
        piece = _PIECE.match(command, at)
        if piece is None:
            return []  # a shell must read it
        at = piece.end()
        if piece[1]:
            is_inside = False
        elif is_inside:
            words[-1] += piece[piece.lastindex or 0]
        else:
            words.append(piece[piece.lastindex or 0])
            is_inside = True
    return words if len(words) <= _MAX_WORDS else []


def encode_put(kind: Kind, path: str, data: bytes = b"", *, mode: int = 0o755) -> bytes:
    """One entry of a PUT's body, which holds any number of them; for a link `data` is its target."""
    if kind is Kind.LINK:
        data += b"\0"
    return b"".join([_TWO.pack(kind, mode), _text(path), _WORD.pack(len(data)), data])


def encode_get(path: str, max_bytes: int) -> bytes:
    """The body of GET."""
    return _WORD.pack(max_bytes) + _text(path)


def _text(text: str) -> bytes:
    data = text.encode("utf-8", "surrogateescape")
    if b"\0" in data:
        raise ValueError(f"a NUL byte cannot go into a command, path or variable: {text[:80]!r}")
    return _WORD.pack(len(data) + 1) + data + b"\0"


class Connection(asyncio.Protocol):
    """The host's end of a box's control socket. `ready` resolves when the agent runs; None says it never came."""

    def __init__(self, on_lost: Callable[[], None]) -> None:
        loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[Answer | None] = loop.create_future()
        self.is_open = False
        self._loop = loop
        self._on_lost = on_lost
        self._waiting: dict[int, asyncio.Future[Answer | None]] = {}
        self._received = bytearray()
        self._next_id = 1
        self._transport: asyncio.Transport | None = None

    async def request(
        self, operation: Operation, body: bytes | Iterable[bytes], *, deadline_s: float, file: int | None = None
    ) -> Answer | None:
        """The answer, or None when the connection ended first. Raises TimeoutError after `deadline_s`.

        `file`: an open descriptor that goes with the request, while nothing else waits to be written.
        """
        if not self.is_open or self._transport is None:
            return None
        parts = [body] if isinstance(body, bytes) else list(body)
        identifier, self._next_id = self._next_id, self._next_id % 0xFFFFFFF0 + 1
        size = _REQUEST.size - _WORD.size + sum(map(len, parts))
        future = self._waiting[identifier] = self._loop.create_future()
        try:
            frame = b"".join([_REQUEST.pack(size, operation, identifier), *parts])
            if file is None:
                self._transport.write(frame)
            else:
                _send_with(self._transport, frame, file)
            async with asyncio.timeout(deadline_s):
                return await future
        finally:
            self._waiting.pop(identifier, None)

    @property
    def is_attached(self) -> bool:
        """Whether a socket was given to this connection, which then closes it."""
        return self._transport is not None

    def close(self) -> None:
        """Ends the connection, and with it the agent and the box."""
        self.is_open = False
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by asyncio."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transports are no subclasses of asyncio's
        self.is_open = True

    def data_received(self, data: bytes) -> None:
        """Called by asyncio."""
        received = self._received
        received += data
        at = 0
        while len(received) - at >= _ANSWER.size:
            size, operation, identifier, status, first, second = _ANSWER.unpack_from(received, at)
            end = at + _WORD.size + size
            if len(received) < end:
                break
            middle = at + _ANSWER.size + first
            parts = bytes(received[at + _ANSWER.size : middle]), bytes(received[middle : middle + second])
            self._resolve(operation, identifier, Answer(status, *parts))
            at = end
        del received[:at]

    def _resolve(self, operation: int, identifier: int, answer: Answer) -> None:
        future = self.ready if operation == Operation.READY else self._waiting.get(identifier)
        if future is not None and not future.done():
            future.set_result(answer)

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by asyncio."""
        self.is_open = False
        for future in [self.ready, *self._waiting.values()]:
            if not future.done():
                future.set_result(None)
        self._on_lost()


def _send_with(transport: asyncio.Transport, frame: bytes, file: int) -> None:
    """Past the transport, which has no way to send a descriptor. A short frame fits a socket that holds nothing."""
    assert transport.get_write_buffer_size() == 0, "a descriptor would overtake what waits"
    with transport.get_extra_info("socket").dup() as ours, contextlib.suppress(BrokenPipeError, ConnectionResetError):
        socket.send_fds(ours, [frame], [file])  # one that ended is told by connection_lost
