"""The gateway as a Starlette application: routes, authentication, and errors in each protocol's own shape.

Invariant: no request reaches a session without that session's token, and no failure leaves in another protocol's shape.
Served by envs/gateway/door.py; tests call it in-process.

    POST /v1/chat/completions, /v1/completions, /v1/responses    OpenAI
    POST /v1/messages, /v1/messages/count_tokens                 Anthropic
    GET  /v1/models, /v1/models/NAME, /health
"""

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, TypeVar, cast

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from envs.errors import ContextLimit, EpisodeError, TurnLimit
from envs.gateway.chat import answer_chat, read_chat, spell_chat, stream_chat
from envs.gateway.completions import answer_completion, read_completion, spell_completion, stream_completion
from envs.gateway.messages import answer_messages, read_messages, spell_messages, stream_messages
from envs.gateway.prompts import ChatPrompts
from envs.gateway.protocol import Event, Json, Refused
from envs.gateway.responses import answer_response, read_response, spell_response, stream_response
from envs.gateway.session import Session, SessionClosed, Sessions, TooManyRequests
from envs.renderer import TemplateRefused

logger = logging.getLogger(__name__)
T = TypeVar("T")

MAX_BODY_BYTES = 32 << 20
_ANTHROPIC_TYPES = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    413: "request_too_large", 429: "rate_limit_error", 500: "api_error", 503: "overloaded_error",
}  # fmt: skip
_OPENAI_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error", 503: "server_error"}

Endpoint = Callable[[Request], Awaitable[Response]]
Act = Callable[[Session, Json], Awaitable[Response]]


def make_app(sessions: Sessions, prompts: ChatPrompts, *, model: str) -> Starlette:
    """The application; `model` is the one name that requests may ask for."""

    def checked(asked: str) -> None:
        if asked != model:
            raise Refused(404, f"no model {asked!r} here; ask for {model!r}", code="model_not_found", param="model")

    async def chat(session: Session, body: Json) -> Response:
        request = read_chat(body)
        checked(request.model)
        answer = await answer_chat(session, request)
        if request.is_stream:
            return _stream(stream_chat(request, answer, prompts))
        return JSONResponse(spell_chat(request, answer, prompts))

    async def completions(session: Session, body: Json) -> Response:
        request = read_completion(body, num_tokens=prompts.num_tokens)
        checked(request.model)
        answer = await answer_completion(session, request)
        if request.is_stream:
            return _stream(stream_completion(request, answer, prompts))
        return JSONResponse(spell_completion(request, answer, prompts))

    async def responses(session: Session, body: Json) -> Response:
        request = read_response(body)
        checked(request.model)
        response_id, answer = await answer_response(session, request)
        if request.is_stream:
            return _stream(stream_response(request, response_id, answer))
        return JSONResponse(spell_response(request, response_id, answer))

    async def messages(session: Session, body: Json) -> Response:
        request = read_messages(body)
        checked(request.model)
        answer = await answer_messages(session, request)
        return (
            _stream(stream_messages(request, answer))
            if request.is_stream
            else JSONResponse(spell_messages(request, answer))
        )

    async def count_tokens(session: Session, body: Json) -> Response:
        request = read_messages(body, counts_only=True)
        checked(request.model)
        return JSONResponse({"input_tokens": session.count_tokens(request.said, request.tools)})

    async def models(session: Session, body: Json) -> Response:
        return JSONResponse({"object": "list", "data": [_model(model)]})

    async def health(request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def one_model(request: Request) -> Response:
        async def act(session: Session, body: Json) -> Response:
            checked(request.path_params["name"])
            return JSONResponse(_model(model))

        return await _endpoint(sessions, act)(request)

    def post(path: str, act: Act) -> Route:
        return Route(path, _endpoint(sessions, act), methods=["POST"])

    return Starlette(
        routes=[
            post("/v1/chat/completions", chat),
            post("/v1/completions", completions),
            post("/v1/responses", responses),
            post("/v1/messages", messages),
            post("/v1/messages/count_tokens", count_tokens),
            Route("/v1/models", _endpoint(sessions, models), methods=["GET"]),
            Route("/v1/models/{name:path}", one_model, methods=["GET"]),
            Route("/health", health, methods=["GET"]),
        ],
        exception_handlers={HTTPException: _on_http_exception},
    )


def _endpoint(sessions: Sessions, act: Act) -> Endpoint:
    """Authenticates, reads the body, acts while the client listens, and spells what is refused."""

    async def endpoint(request: Request) -> Response:
        session: Session | None = None
        try:
            session = _authenticate(sessions, request)
            body = await _read_body(request)
            return await _while_connected(request, act(session, body))
        except Exception as error:
            refused = _refusal(error)
            if refused is None:
                if session is not None:
                    session.bug = error
                raise
            logger.info("path=%s status=%d refused: %s", request.url.path, refused.status, refused.message)
            return _spell_error(request, refused)

    return endpoint


def _authenticate(sessions: Sessions, request: Request) -> Session:
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer":
        token = request.headers.get("x-api-key", "")
    session = sessions.find(token.strip())
    if session is None:
        problem = "this token opens no session (send Authorization: Bearer TOKEN, or x-api-key: TOKEN)"
        raise Refused(401, problem, code="invalid_api_key")
    return session


async def _read_body(request: Request) -> Json:
    if request.method == "GET":
        return {}
    data = bytearray()
    async for chunk in request.stream():
        data += chunk
        if len(data) > MAX_BODY_BYTES:
            raise Refused(413, f"a body may hold {MAX_BODY_BYTES} bytes")
    try:
        body = cast(object, json.loads(bytes(data)))
        json.dumps(body, ensure_ascii=False, allow_nan=False).encode()  # no other reader takes NaN for JSON
    except RecursionError:
        raise Refused(400, "the body is nested too deeply") from None
    except UnicodeEncodeError:
        raise Refused(400, "the body is not Unicode text (it holds half a surrogate pair)") from None
    except ValueError as error:
        raise Refused(400, f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise Refused(400, "the body must be a JSON object")
    return cast(Json, body)


async def _while_connected(request: Request, work: Awaitable[T]) -> T:
    """The result; a client that goes away ends the work, so that no reply is recorded that nobody got."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnect
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _refusal(error: Exception) -> Refused | None:
    """What the client is told; None for a bug."""
    match error:
        case Refused():
            return error
        case ContextLimit():
            problem = f"This model's maximum context length is exceeded: {error}"  # clients look for these words
            return Refused(400, problem, code="context_length_exceeded")
        case TurnLimit():
            return Refused(403, str(error), code="turn_limit")
        case SessionClosed():
            return Refused(401, str(error), code="invalid_api_key")
        case TooManyRequests():
            return Refused(429, str(error), code="rate_limit_exceeded")
        case TemplateRefused():
            return Refused(400, str(error), param="messages")
        case EpisodeError():
            return Refused(503, str(error), code="server_error")
        case ClientDisconnect():
            return Refused(499, "the client went away")
        case _:
            return None


def _spell_error(request: Request, refused: Refused) -> Response:
    headers = {} if refused.retry_after_s is None else {"Retry-After": str(refused.retry_after_s)}
    body: Json
    if request.url.path.startswith("/v1/messages"):
        kind = _ANTHROPIC_TYPES.get(refused.status, "invalid_request_error")
        too_long = "prompt is too long: " if refused.code == "context_length_exceeded" else ""
        body = {"type": "error", "error": {"type": kind, "message": too_long + refused.message}}
    else:
        kind = _OPENAI_TYPES.get(refused.status, "invalid_request_error")
        error = {"message": refused.message, "type": kind, "param": refused.param, "code": refused.code}
        body = {"error": error}
    return JSONResponse(body, status_code=refused.status, headers=headers)


async def _on_http_exception(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    problem = f"{request.method} {request.url.path}: no such endpoint"
    return _spell_error(request, Refused(status, problem, code="not_found"))


def _stream(events: Iterable[Event]) -> Response:
    return StreamingResponse(
        (event.encode() for event in events), media_type="text/event-stream", headers={"Cache-Control": "no-cache"}
    )


def _model(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "thresher", "type": "model", "display_name": name}
