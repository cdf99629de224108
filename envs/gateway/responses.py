"""OpenAI's responses: items in, items out, and earlier responses by their id.

Invariant: see envs/gateway/protocol.py. An earlier response is known within its own session only. Called by
envs/gateway/app.py.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

from envs.gateway.chat import read_wanted
from envs.gateway.dialogue import Said, Tool, make_call
from envs.gateway.protocol import (
    Event,
    Fields,
    Json,
    Refused,
    check_dialogue,
    make_id,
    now,
    pieces,
    read_text,
    read_tool,
)
from envs.gateway.session import Answer, Session, Wanted

_TEXTS = ("input_text", "output_text", "text")


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseRequest:
    """What a client asked for."""

    model: str
    instructions: str
    said: list[Said]
    """Without what `previous` holds."""
    previous: str | None
    tools: list[Tool]
    wanted: Wanted
    is_stream: bool


def read_response(body: Json) -> ResponseRequest:
    """The request. Raises Refused."""
    fields = Fields(body=body)
    given = fields.get("input")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else fields.items("input")
    if (choice := fields.get("tool_choice")) not in (None, "auto", "none"):
        raise Refused(400, f'tool_choice={choice!r} cannot be enforced; use "auto" or "none"', param="tool_choice")
    previous = fields.get("previous_response_id")
    tools = [_read_tool(item) for item in fields.items("tools")]
    request = ResponseRequest(
        model=fields.text("model"),
        instructions=read_text(fields.get("instructions"), "instructions"),
        said=_merge([_read_item(item) for item in items]),
        previous=None if previous is None else fields.text("previous_response_id"),
        tools=[] if choice == "none" else tools,
        wanted=read_wanted(fields, "max_output_tokens"),
        is_stream=fields.flag("stream"),
    )
    fields.neutral("text", {"format": {"type": "text"}})
    fields.neutral("truncation", "disabled")
    fields.neutral("include", [])
    fields.neutral("background", False)
    fields.ignore("store", "metadata", "user", "parallel_tool_calls", "reasoning", "service_tier", "prompt_cache_key")
    fields.ignore("safety_identifier")
    fields.finish()
    return request


async def answer_response(session: Session, request: ResponseRequest) -> tuple[str, Answer]:
    """The new response's id and the session's answer; both are kept for requests that go on from there."""
    if request.previous is not None and request.previous not in session.kept:
        raise Refused(404, f"no response {request.previous} in this session", param="previous_response_id")
    said = _merge([*(session.kept[request.previous] if request.previous else []), *request.said])
    system = [Said(role="system", content=request.instructions)] if request.instructions else []
    check_dialogue(said)
    answer = await session.reply([*system, *said], request.tools, request.wanted, parse=bool(request.tools))
    response_id = make_id("resp_")
    session.kept[response_id] = [*said, answer.said]
    return response_id, answer


def spell_response(request: ResponseRequest, response_id: str, answer: Answer) -> Json:
    """The response as one object."""
    is_cut = answer.completion.finish_reason == "length"
    num_in, num_out = len(answer.prompt_ids), len(answer.completion.ids)
    return _head(request, response_id) | {
        "status": "incomplete" if is_cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "output": _spell_items(answer, "incomplete" if is_cut else "completed"),
        "usage": {
            "input_tokens": num_in,
            "output_tokens": num_out,
            "total_tokens": num_in + num_out,
            "input_tokens_details": {"cached_tokens": answer.num_known},
            "output_tokens_details": {"reasoning_tokens": 0},
        },
    }


def stream_response(request: ResponseRequest, response_id: str, answer: Answer) -> Iterator[Event]:
    """The response as its stream of events."""
    whole = spell_response(request, response_id, answer)
    begun: Json = _head(request, response_id) | {"status": "in_progress", "output": [], "usage": None}
    events: list[Json] = [
        {"type": "response.created", "response": begun},
        {"type": "response.in_progress", "response": begun},
    ]
    for index, item in enumerate(whole["output"]):
        events += _message_events(index, item) if item["type"] == "message" else _call_events(index, item)
    ending = "response.completed" if whole["status"] == "completed" else "response.incomplete"
    events.append({"type": ending, "response": whole})
    for number, event in enumerate(events):
        yield Event(name=event["type"], data=event | {"sequence_number": number})


def _message_events(index: int, item: Json) -> Iterator[Json]:
    part = item["content"][0]
    where: Json = {"item_id": item["id"], "output_index": index, "content_index": 0}
    empty: Json = item | {"content": [], "status": "in_progress"}
    yield {"type": "response.output_item.added", "output_index": index, "item": empty}
    yield {"type": "response.content_part.added", **where, "part": part | {"text": ""}}
    for piece in pieces(part["text"]):
        yield {"type": "response.output_text.delta", **where, "delta": piece, "logprobs": []}
    yield {"type": "response.output_text.done", **where, "text": part["text"], "logprobs": []}
    yield {"type": "response.content_part.done", **where, "part": part}
    yield {"type": "response.output_item.done", "output_index": index, "item": item}


def _call_events(index: int, item: Json) -> Iterator[Json]:
    where: Json = {"item_id": item["id"], "output_index": index}
    empty: Json = item | {"arguments": "", "status": "in_progress"}
    yield {"type": "response.output_item.added", "output_index": index, "item": empty}
    yield {"type": "response.function_call_arguments.delta", **where, "delta": item["arguments"]}
    done: Json = {"arguments": item["arguments"], "name": item["name"]}
    yield {"type": "response.function_call_arguments.done", **where, **done}
    yield {"type": "response.output_item.done", "output_index": index, "item": item}


def _head(request: ResponseRequest, response_id: str) -> Json:
    return {
        "id": response_id,
        "object": "response",
        "created_at": now(),
        "model": request.model,
        "error": None,
        "incomplete_details": None,
        "instructions": request.instructions or None,
        "metadata": {},
        "parallel_tool_calls": True,
        "previous_response_id": request.previous,
        "temperature": request.wanted.temperature,
        "top_p": request.wanted.top_p,
        "tool_choice": "auto",
        "tools": [{**tool.spec()["function"], "type": "function", "strict": None} for tool in request.tools],
    }


def _spell_items(answer: Answer, status: str) -> list[Json]:
    items: list[Json] = []
    if answer.said.content or not answer.said.calls:
        part: Json = {"type": "output_text", "text": answer.said.content, "annotations": [], "logprobs": []}
        message: Json = {"type": "message", "id": make_id("msg_"), "role": "assistant"}
        items.append(message | {"status": status, "content": [part]})
    for call in answer.said.calls:
        function: Json = {"type": "function_call", "id": make_id("fc_"), "call_id": make_id("call_"), "status": status}
        items.append(function | {"name": call.name, "arguments": call.arguments})
    return items


def _read_item(item: Json) -> Said:
    kind = item.get("type", "message")
    if kind == "function_call":
        call = make_call(str(item.get("name")), cast(Any, item.get("arguments")) or {})
        return Said(role="assistant", content="", calls=(call,))
    if kind == "function_call_output":
        return Said(role="tool", content=read_text(item.get("output"), "input.output", _TEXTS))
    role = {"developer": "system"}.get(str(item.get("role")), item.get("role"))
    if kind != "message" or role not in ("system", "user", "assistant"):
        raise Refused(400, f"an input item of type {kind!r} and role {role!r} is not known here", param="input")
    return Said(role=str(role), content=read_text(item.get("content"), "input.content", _TEXTS))


def _merge(said: list[Said]) -> list[Said]:
    """Words and calls of one reply come as several items; together they are one message."""
    merged: list[Said] = []
    for each in said:
        if merged and each.calls and each.role == merged[-1].role == "assistant":
            last = merged.pop()
            content = "\n".join(part for part in (last.content, each.content) if part)
            each = Said(role="assistant", content=content, calls=(*last.calls, *each.calls))
        merged.append(each)
    return merged


def _read_tool(item: Json) -> Tool:
    if item.get("type") != "function":
        raise Refused(400, f"a tool of type {item.get('type')!r} is not known; use functions", param="tools")
    return read_tool(item.get("name"), item.get("description"), item.get("parameters"))
