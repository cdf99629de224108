"""FakeEndpoint: an OpenAI-compatible chat endpoint that answers, throttles and fails as a test says."""

import asyncio
import socket
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from envs.gateway.server import serve_app


@dataclass(frozen=True, kw_only=True)
class Fails:
    """An answer that is none."""

    status: int
    code: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    message: str = "told to fail"


@dataclass(frozen=True, kw_only=True)
class Says:
    """Status 200, with this text as its body."""

    body: str | bytes
    media_type: str = "application/json"


@dataclass(frozen=True, kw_only=True)
class Hangs:
    """No answer for so long."""

    seconds: float


class FakeEndpoint:
    """Answers "reply K" to the K-th request that is answered; `script` says what to do with the first requests."""

    def __init__(
        self,
        script: Sequence[Fails | Hangs | Says | None] = (),
        *,
        capacity: int | None = None,
        has_usage: bool = True,
        delay_s: float = 0.0,
    ) -> None:
        """`capacity`: more requests than this at once are answered 429."""
        self._script = list(script)
        self._capacity = capacity
        self._has_usage = has_usage
        self._delay_s = delay_s
        self._running = 0
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str] = []
        self.num_answered = 0
        self.num_throttled = 0
        self.most_at_once = 0

    async def chat(self, request: Request) -> Response:
        self.bodies.append(await request.json())
        self.keys.append(request.headers["authorization"].removeprefix("Bearer "))
        todo = self._script.pop(0) if self._script else None
        if isinstance(todo, Hangs):
            await asyncio.sleep(todo.seconds)
        if isinstance(todo, Fails):
            return _error(todo)
        if isinstance(todo, Says):
            return Response(todo.body, media_type=todo.media_type)
        if self._capacity is not None and self._running >= self._capacity:
            self.num_throttled += 1
            return _error(Fails(status=429, code="rate_limit_exceeded", headers={"Retry-After": "0.01"}))
        self._running += 1
        self.most_at_once = max(self.most_at_once, self._running)
        try:
            await asyncio.sleep(self._delay_s)
        finally:
            self._running -= 1
        self.num_answered += 1
        message = {"role": "assistant", "content": f"reply {self.num_answered}"}
        usage = {"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110} if self._has_usage else None
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        head = {"id": "x", "object": "chat.completion", "created": 0, "model": "m"}
        return JSONResponse(head | {"choices": [choice], "usage": usage})

    @asynccontextmanager
    async def served(self) -> AsyncGenerator[str]:
        """The base URL, for the length of the block."""
        app = Starlette(routes=[Route("/v1/chat/completions", self.chat, methods=["POST"])])
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            async with serve_app(app, listener):
                yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1"


def _error(fails: Fails) -> Response:
    error = {"message": fails.message, "type": "error", "param": None, "code": fails.code}
    return JSONResponse({"error": error}, status_code=fails.status, headers=fails.headers)
