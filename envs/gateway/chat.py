"""OpenAI's chat completions: a request read, an answer spelled, whole or as a stream.

Invariant: see envs/gateway/protocol.py. Called by envs/gateway/app.py.

Beyond the protocol, `return_token_ids` adds `prompt_token_ids` and the choice's `token_ids`, as vLLM's server does.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

from envs.gateway.dialogue import Said, Tool, ToolCall, make_call
from envs.gateway.prompts import ChatPrompts
from envs.gateway.protocol import (
    Event,
    Fields,
    Json,
    Refused,
    check_dialogue,
    make_id,
    now,
    pieces,
    read_objects,
    read_text,
    read_tool,
)
from envs.gateway.session import Answer, Session, Wanted

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """What a client asked for."""

    model: str
    said: list[Said]
    tools: list[Tool]
    wanted: Wanted
    is_stream: bool
    has_usage: bool
    has_logprobs: bool
    has_ids: bool

    @property
    def parses_calls(self) -> bool:
        """Whether tool calls are read out of the reply."""
        return bool(self.tools)


def read_chat(body: Json) -> ChatRequest:
    """The request. Raises Refused."""
    fields = Fields(body=body)
    said = [_read_message(item) for item in fields.items("messages")]
    check_dialogue(said)
    tools = [_read_tool(item) for item in fields.items("tools")]
    if (choice := fields.get("tool_choice")) == "none":
        tools = []
    elif choice not in (None, "auto"):
        raise Refused(400, f'tool_choice={choice!r} cannot be enforced; use "auto" or "none"', param="tool_choice")
    options = fields.mapping("stream_options")
    request = ChatRequest(
        model=fields.text("model"),
        said=said,
        tools=tools,
        wanted=read_wanted(fields, "max_completion_tokens", "max_tokens"),
        is_stream=fields.flag("stream"),
        has_usage=bool(options.get("include_usage")),
        has_logprobs=fields.flag("logprobs"),
        has_ids=fields.flag("return_token_ids"),
    )
    read_neutral(fields)
    fields.neutral("response_format", {"type": "text"})
    fields.neutral("top_logprobs", 0)
    fields.neutral("modalities", ["text"])
    fields.neutral("functions")
    fields.neutral("function_call", "auto", "none")
    fields.ignore("parallel_tool_calls", "reasoning_effort", "verbosity", "store")
    fields.finish()
    return request


def read_wanted(fields: Fields, *limits: str) -> Wanted:
    """The sampling fields; `limits` are the names under which the token limit may come."""
    counts = [count for name in limits if (count := fields.count(name, 1)) is not None]
    return Wanted(
        max_tokens=counts[0] if counts else None,
        temperature=fields.number("temperature", 0, 2),
        top_p=fields.number("top_p", 1e-9, 1),
        seed=fields.count("seed"),
    )


def read_neutral(fields: Fields) -> None:
    """What OpenAI's protocols share and a Sampler does not do."""
    fields.neutral("n", 1)
    fields.neutral("stop", [], "")
    fields.neutral("presence_penalty", 0)
    fields.neutral("frequency_penalty", 0)
    fields.neutral("logit_bias", {})
    fields.ignore("user", "metadata", "session_id", "service_tier", "safety_identifier", "prompt_cache_key")


async def answer_chat(session: Session, request: ChatRequest) -> Answer:
    """The session's answer."""
    return await session.reply(request.said, request.tools, request.wanted, parse=request.parses_calls)


def spell_chat(request: ChatRequest, answer: Answer, prompts: ChatPrompts) -> Json:
    """The answer as one object."""
    message: Json = {"role": "assistant", "content": answer.said.content or (None if answer.said.calls else "")}
    if answer.said.calls:
        message["tool_calls"] = [spell_call(call) for call in answer.said.calls]
    choice: Json = {"index": 0, "message": message, "finish_reason": finish_reason(answer), "logprobs": None}
    if request.has_logprobs:
        choice["logprobs"] = _spell_logprobs(answer, prompts)
    response = _head(request, "chat.completion") | {"choices": [choice], "usage": spell_usage(answer)}
    return response | _spell_ids(request, answer, choice)


def stream_chat(request: ChatRequest, answer: Answer, prompts: ChatPrompts) -> Iterator[Event]:
    """The answer as a stream of chunks."""
    head = _head(request, "chat.completion.chunk")

    def chunk(delta: Json, **more: Any) -> Event:
        choice: Json = {"index": 0, "delta": delta, "finish_reason": None, "logprobs": None, **more}
        return Event(data=head | {"choices": [choice]})

    yield chunk({"role": "assistant", "content": ""})
    for piece in pieces(answer.said.content):
        yield chunk({"content": piece})
    for index, call in enumerate(answer.said.calls):
        yield chunk({"tool_calls": [{"index": index, **spell_call(call)}]})
    last: Json = {"finish_reason": finish_reason(answer)}
    if request.has_logprobs:
        last["logprobs"] = _spell_logprobs(answer, prompts)
    more = _spell_ids(request, answer, last)
    end = chunk({}, **last)
    yield Event(data=cast(Json, end.data) | more)
    if request.has_usage:
        yield Event(data=head | {"choices": [], "usage": spell_usage(answer)})
    yield Event(data="[DONE]")


def finish_reason(answer: Answer) -> str:
    """As OpenAI names it."""
    if answer.completion.finish_reason == "length":
        return "length"
    return "tool_calls" if answer.said.calls else "stop"


def spell_usage(answer: Answer) -> Json:
    """Tokens in, out, and known before."""
    num_prompt, num_sampled = len(answer.prompt_ids), len(answer.completion.ids)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_sampled,
        "total_tokens": num_prompt + num_sampled,
        "prompt_tokens_details": {"cached_tokens": answer.num_known},
    }


def spell_call(call: ToolCall) -> Json:
    """A tool call under an id of its own."""
    return {
        "id": make_id("call_"),
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


def _head(request: ChatRequest, kind: str) -> Json:
    return {"id": make_id("chatcmpl-"), "object": kind, "created": now(), "model": request.model}


def _spell_ids(request: ChatRequest, answer: Answer, choice: Json) -> Json:
    """Puts the sampled ids into the choice; the prompt's ids go beside it."""
    if not request.has_ids:
        return {}
    choice["token_ids"] = list(answer.completion.ids)
    return {"prompt_token_ids": list(answer.prompt_ids)}


def _spell_logprobs(answer: Answer, prompts: ChatPrompts) -> Json:
    content: list[Json] = []
    for token_id, logprob in zip(answer.completion.ids, answer.completion.logprobs, strict=True):
        token = prompts.spell([token_id])
        content.append({"token": token, "logprob": logprob, "bytes": list(token.encode()), "top_logprobs": []})
    return {"content": content, "refusal": None}


def _read_message(item: Json) -> Said:
    role = item.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise Refused(400, f"a message has role {role!r}; known are {', '.join(_ROLES)}", param="messages")
    content = read_text(item.get("content"), "messages.content")
    if role != "assistant":
        return Said(role=_ROLES[role], content=content)
    calls = read_objects(item.get("tool_calls"), "messages.tool_calls")
    return Said(role="assistant", content=content, calls=tuple(_read_call(call) for call in calls))


def _read_call(item: Json) -> ToolCall:
    function = item.get("function")
    if not isinstance(function, dict) or not isinstance(cast(Json, function).get("name"), str):
        raise Refused(400, "a tool call needs a function with a name", param="messages.tool_calls")
    named = cast(Json, function)
    return make_call(named["name"], named.get("arguments") or {})


def _read_tool(item: Json) -> Tool:
    function = item.get("function")
    if item.get("type") != "function" or not isinstance(function, dict):
        raise Refused(400, f"a tool of type {item.get('type')!r} is not known; use functions", param="tools")
    named = cast(Json, function)
    return read_tool(named.get("name"), named.get("description"), named.get("parameters"))
