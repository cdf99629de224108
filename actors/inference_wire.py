"""The wire between a rollout worker and an inference server: many requests on one connection, each answered in Parts.

Invariant: a request gets Parts in order, then exactly one last Part or one error; or its connection ends and it fails
as ServerGone, with the Parts that came. A connection that ends cancels what it asked for. A plain socket because a Ray
call costs about 1.2 ms of CPU and a frame here a tenth of it. Used by actors/inference_server.py (`serve`) and
actors/inference_route.py (`Channel`); imports neither Ray nor vLLM.
"""

import asyncio
import hmac
import itertools
import logging
import socket
import struct
from array import array
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, cast

import msgpack

from actors.inference_errors import NonFiniteLogprobs, RequestDropped, ServerGone, ServerNotReady
from actors.inference_request import Part, Request
from actors.weight_stage import parse_version, version_label
from envs.errors import ContextLimit, EpisodeError, SamplerError
from envs.sampler import SamplingParams
from trajectories.schema import VersionSpan

logger = logging.getLogger(__name__)

LENGTH = struct.Struct("<I")
KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 25_000}
"""A peer silent for 10 s is asked every 5 s; 25 s (the last is in ms) without an answer, or in which it takes nothing
of what was sent, end the connection."""
ERRORS: dict[str, type[EpisodeError]] = {
    error.__name__: error
    for error in (ServerGone, RequestDropped, ServerNotReady, NonFiniteLogprobs, ContextLimit, SamplerError)
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where a server listens, and the secret that opens it."""

    host: str
    port: int
    token: str


Handler = Callable[[Request, str], AsyncGenerator[Part]]
"""Answers one request; the string is an id that is unique on this server. The last Part has a finish reason."""


async def serve(handle: Handler, host: str, token: str, *, load: Callable[[], int]) -> tuple[asyncio.Server, Address]:
    """Listens on a free port of `host`; every answer carries `load()`, the number of requests in the server."""
    numbers = itertools.count()

    async def on_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        _end_when_unreachable(writer.transport)
        await _serve_connection(reader, writer, handle, token, load, next(numbers))

    server = await asyncio.start_server(on_connection, host, 0)
    return server, Address(host=host, port=server.sockets[0].getsockname()[1], token=token)


class Channel(asyncio.Protocol):
    """A client's connection to one server; opened by `Channel.open`, useless once `is_closed`."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._received = bytearray()
        self._pending: dict[int, _Pending] = {}
        self._numbers = itertools.count()
        self.is_closed = False
        self.server_load = 0
        """Requests in the server, by its last answer."""

    @classmethod
    async def open(cls, name: str, address: Address) -> "Channel":
        """Raises ServerGone when nobody listens."""
        loop = asyncio.get_running_loop()
        try:
            _, channel = await loop.create_connection(lambda: cls(name), address.host, address.port)
        except OSError as error:
            raise ServerGone(f"{name}: no connection to {address.host}:{address.port} ({error})") from error
        channel._transport.write(_frame(address.token))
        return channel

    @property
    def num_pending(self) -> int:
        """Requests of this client that the server has not answered."""
        return len(self._pending)

    async def request(self, request: Request, parts: list[Part]) -> None:
        """Appends the reply's Parts to `parts` as they come; returns after the last one.

        Raises the server's error as it was raised there. Cancelling it cancels the server's work.
        """
        if self.is_closed:
            raise ServerGone(f"{self._name}: connection closed")
        number = next(self._numbers)
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._pending[number] = _Pending(parts=parts, ended=future)
        self._transport.write(_frame([number, *_pack_request(request)]))
        try:
            await future
        except asyncio.CancelledError:
            if not self.is_closed:
                self._transport.write(_frame([number]))
            raise
        finally:
            self._pending.pop(number, None)

    def close(self) -> None:
        """Ends the connection; what is pending fails as ServerGone."""
        self._end("connection closed")
        self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the event loop."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transports are no subclasses of asyncio's
        _end_when_unreachable(transport)

    def data_received(self, data: bytes) -> None:
        """Called by the event loop: hands on each Part, and resolves the requests whose answers are complete."""
        self._received += data
        begin = 0
        while len(self._received) - begin >= LENGTH.size:
            end = begin + LENGTH.size + LENGTH.unpack_from(self._received, begin)[0]
            if len(self._received) < end:
                break
            number, self.server_load, *answer = msgpack.unpackb(self._received[begin + LENGTH.size : end])
            pending = self._pending.get(number)
            if pending is not None and not pending.ended.done():
                pending.take(answer)
            begin = end
        del self._received[:begin]

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by the event loop."""
        self._end(f"connection lost ({exc!r})" if exc else "connection lost")

    def _end(self, reason: str) -> None:
        self.is_closed = True
        for pending in self._pending.values():
            if not pending.ended.done():
                pending.ended.set_exception(ServerGone(f"{self._name}: {reason}"))


async def _serve_connection(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    handle: Handler,
    token: str,
    load: Callable[[], int],
    connection: int,
) -> None:
    tasks: dict[int, asyncio.Task[None]] = {}
    try:
        offered = await _read(reader)
        if not (isinstance(offered, str) and hmac.compare_digest(offered, token)):
            logger.warning("connection=%d refused: wrong token", connection)
            return
        while True:
            number, *fields = await _read(reader)
            if fields:
                tasks[number] = asyncio.create_task(
                    _answer(writer, handle, number, fields, load, f"{connection}-{number}")
                )
                tasks[number].add_done_callback(lambda task, number=number: _finish(writer, tasks, number, task))
            elif number in tasks:
                tasks[number].cancel()
    except (asyncio.IncompleteReadError, OSError):
        pass  # the client went away; what it asked for is cancelled below
    finally:
        for task in tuple(tasks.values()):
            task.cancel()
        writer.close()


async def _answer(
    writer: asyncio.StreamWriter,
    handle: Handler,
    number: int,
    fields: list[Any],
    load: Callable[[], int],
    request_id: str,
) -> None:
    try:
        is_whole = False
        async with aclosing(handle(_unpack_request(fields), request_id)) as parts:
            async for part in parts:
                is_whole = bool(part.finish_reason)
                if not writer.is_closing():
                    writer.write(_frame([number, load(), *_pack_part(part)]))
        assert is_whole, "a reply ended without its last part"
    except EpisodeError as error:
        if not writer.is_closing():
            writer.write(_frame([number, load(), type(error).__name__, str(error)]))


def _end_when_unreachable(transport: asyncio.BaseTransport) -> None:
    """Has the kernel end a connection whose other end no longer answers: a lost node sends no farewell."""
    peer = transport.get_extra_info("socket")
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE.items():
        if hasattr(socket, name):  # Linux has them all
            peer.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _finish(
    writer: asyncio.StreamWriter, tasks: dict[int, asyncio.Task[None]], number: int, task: asyncio.Task[None]
) -> None:
    """Forgets a task; a bug in it is logged here and fails the request there, instead of leaving it without answer."""
    tasks.pop(number, None)
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("request failed", exc_info=error)
        if not writer.is_closing():
            writer.write(_frame([number, 0, SamplerError.__name__, f"the server failed: {error!r}"]))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pending:
    """A request on its way: where its Parts go, and what is set at its end."""

    parts: list[Part]
    ended: "asyncio.Future[None]"

    def take(self, answer: list[Any]) -> None:
        if len(answer) == 2:
            kind, message = answer
            self.ended.set_exception(ERRORS.get(kind, SamplerError)(message))
            return
        part = _unpack_part(answer)
        self.parts.append(part)
        if part.finish_reason:
            self.ended.set_result(None)


def _pack_request(request: Request) -> list[Any]:
    params = request.params
    numbers = [params.temperature, params.top_p, params.top_k, params.max_tokens, params.seed]
    return [_pack_ids(request.prompt_ids), _pack_ids(request.stop_ids), numbers, request.priority, request.salt]


def _unpack_request(fields: list[Any]) -> Request:
    prompt, stop, (temperature, top_p, top_k, max_tokens, seed), priority, salt = fields
    params = SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k, max_tokens=max_tokens, seed=seed)
    return Request(
        prompt_ids=_unpack_ids(prompt), params=params, stop_ids=_unpack_ids(stop), priority=priority, salt=salt
    )


def _pack_part(part: Part) -> list[Any]:
    return [
        _pack_ids(part.ids),
        array("d", part.logprobs).tobytes(),
        [[version_label(span.version), span.num_tokens] for span in part.spans],
        part.finish_reason,
    ]


def _unpack_part(answer: list[Any]) -> Part:
    ids, logprobs, spans, finish_reason = answer
    return Part(
        ids=tuple(_unpack_ids(ids)),
        logprobs=tuple(array("d", logprobs)),
        spans=tuple(VersionSpan(version=parse_version(label), num_tokens=num) for label, num in spans),
        finish_reason=finish_reason,
    )


def _pack_ids(ids: Sequence[int]) -> bytes:
    return array("i", ids).tobytes()


def _unpack_ids(data: bytes) -> Sequence[int]:
    return array("i", data)


def _frame(message: Any) -> bytes:
    body: bytes = msgpack.Packer().pack(message)
    return LENGTH.pack(len(body)) + body


async def _read(reader: asyncio.StreamReader) -> Any:
    (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
    return msgpack.unpackb(await reader.readexactly(length))
