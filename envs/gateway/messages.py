"""Anthropic's messages: blocks in, blocks out, whole or as a stream.

Invariant: see envs/gateway/protocol.py. Called by envs/gateway/app.py.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

from envs.gateway.dialogue import Said, Tool, ToolCall, make_call, spell_json
from envs.gateway.protocol import (
    Event,
    Fields,
    Json,
    Refused,
    check_dialogue,
    make_id,
    pieces,
    read_objects,
    read_text,
    read_tool,
)
from envs.gateway.session import Answer, Session, Wanted


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageRequest:
    """What a client asked for."""

    model: str
    said: list[Said]
    tools: list[Tool]
    wanted: Wanted
    is_stream: bool


def read_messages(body: Json, *, counts_only: bool = False) -> MessageRequest:
    """The request; `counts_only` is that of count_tokens, which samples nothing. Raises Refused."""
    fields = Fields(body=body)
    system = read_text(fields.get("system"), "system")
    said = [Said(role="system", content=system)] if system else []
    for item in fields.items("messages"):
        said += _read_message(item)
    check_dialogue(said)
    tools = [_read_tool(item) for item in fields.items("tools")]
    choice = fields.mapping("tool_choice").get("type", "auto")
    if choice not in ("auto", "none"):
        raise Refused(400, f"tool_choice {choice!r} cannot be enforced; use auto or none", param="tool_choice")
    max_tokens = fields.count("max_tokens", 1)
    if max_tokens is None and not counts_only:
        raise Refused(400, "max_tokens: field required", param="max_tokens")
    request = MessageRequest(
        model=fields.text("model"),
        said=said,
        tools=tools if choice == "auto" else [],
        wanted=Wanted(
            max_tokens=max_tokens, temperature=fields.number("temperature", 0, 1), top_p=fields.number("top_p", 1e-9, 1)
        ),
        is_stream=fields.flag("stream"),
    )
    fields.neutral("stop_sequences", [])
    fields.neutral("thinking", {"type": "disabled"})
    fields.neutral("top_k", 0)
    fields.ignore("metadata", "service_tier", "container", "context_management")
    fields.finish()
    return request


async def answer_messages(session: Session, request: MessageRequest) -> Answer:
    """The session's answer."""
    return await session.reply(request.said, request.tools, request.wanted, parse=bool(request.tools))


def spell_messages(request: MessageRequest, answer: Answer) -> Json:
    """The answer as one object."""
    return _head(request, answer) | {
        "content": _spell_blocks(answer),
        "stop_reason": _stop_reason(answer),
        "usage": _spell_usage(answer, len(answer.completion.ids)),
    }


def stream_messages(request: MessageRequest, answer: Answer) -> Iterator[Event]:
    """The answer as its stream of events."""
    begun: Json = _head(request, answer) | {"content": [], "stop_reason": None, "usage": _spell_usage(answer, 0)}
    yield _event({"type": "message_start", "message": begun})
    for index, block in enumerate(_spell_blocks(answer)):
        if block["type"] == "text":
            empty: Json = {"type": "text", "text": ""}
            deltas = [{"type": "text_delta", "text": piece} for piece in pieces(block["text"])]
        else:
            empty = block | {"input": {}}
            deltas = [{"type": "input_json_delta", "partial_json": spell_json(block["input"])}]
        yield _event({"type": "content_block_start", "index": index, "content_block": empty})
        for delta in deltas:
            yield _event({"type": "content_block_delta", "index": index, "delta": delta})
        yield _event({"type": "content_block_stop", "index": index})
    ending: Json = {"stop_reason": _stop_reason(answer), "stop_sequence": None}
    num_sampled = len(answer.completion.ids)
    yield _event({"type": "message_delta", "delta": ending, "usage": {"output_tokens": num_sampled}})
    yield _event({"type": "message_stop"})


def _event(data: Json) -> Event:
    return Event(name=data["type"], data=data)


def _head(request: MessageRequest, answer: Answer) -> Json:
    head: Json = {"id": make_id("msg_"), "type": "message", "role": "assistant", "model": request.model}
    return head | {"stop_sequence": None}


def _spell_usage(answer: Answer, num_sampled: int) -> Json:
    """Anthropic counts cached tokens beside the others, not among them."""
    return {
        "input_tokens": len(answer.prompt_ids) - answer.num_known,
        "cache_read_input_tokens": answer.num_known,
        "cache_creation_input_tokens": 0,
        "output_tokens": num_sampled,
    }


def _stop_reason(answer: Answer) -> str:
    if answer.completion.finish_reason == "length":
        return "max_tokens"
    return "tool_use" if answer.said.calls else "end_turn"


def _spell_blocks(answer: Answer) -> list[Json]:
    blocks: list[Json] = []
    if answer.said.content or not answer.said.calls:
        blocks.append({"type": "text", "text": answer.said.content})
    return blocks + [_spell_call(call) for call in answer.said.calls]


def _spell_call(call: ToolCall) -> Json:
    return {"type": "tool_use", "id": make_id("toolu_"), "name": call.name, "input": call.values()}


def _read_message(item: Json) -> list[Said]:
    """A message's blocks: words and calls in one record, each tool result in one of its own, before the words."""
    role, content = item.get("role"), item.get("content")
    if role not in ("user", "assistant", "system"):
        raise Refused(400, f"a message has role {role!r}; known are user and assistant", param="messages")
    if not isinstance(content, list):
        return [Said(role=str(role), content=read_text(content, "messages.content"))]
    blocks = read_objects(cast(object, content), "messages.content")
    results = [b for b in blocks if b.get("type") == "tool_result"]
    uses = [b for b in blocks if b.get("type") == "tool_use"]
    words = [b for b in blocks if b.get("type") not in ("tool_result", "tool_use")]
    said = [Said(role="tool", content=read_text(b.get("content"), "tool_result.content")) for b in results]
    calls = tuple(make_call(str(b.get("name")), cast(Any, b.get("input")) or {}) for b in uses)
    if words or calls or not results:
        said.append(Said(role=str(role), content=read_text(words, "messages.content"), calls=calls))
    return said


def _read_tool(item: Json) -> Tool:
    if item.get("type") not in (None, "custom"):
        raise Refused(400, f"a tool of type {item.get('type')!r} is not known; use custom tools", param="tools")
    return read_tool(item.get("name"), item.get("description"), item.get("input_schema"))
