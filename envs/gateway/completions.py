"""OpenAI's completions: the continuation of a prompt that the client has templated, as text or as ids.

Invariant: see envs/gateway/protocol.py. Called by envs/gateway/app.py.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import cast

from envs.gateway.chat import read_neutral, read_wanted, spell_usage
from envs.gateway.prompts import ChatPrompts
from envs.gateway.protocol import Event, Fields, Json, Refused, make_id, now, pieces, read_text
from envs.gateway.session import Answer, Session, Wanted


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest:
    """What a client asked for."""

    model: str
    prompt: str | Sequence[int]
    wanted: Wanted
    is_stream: bool
    has_usage: bool
    has_logprobs: bool
    has_ids: bool


def read_completion(body: Json, *, num_tokens: int) -> CompletionRequest:
    """The request; ids in it are below `num_tokens`. Raises Refused."""
    fields = Fields(body=body)
    options = fields.mapping("stream_options")
    request = CompletionRequest(
        model=fields.text("model"),
        prompt=_read_prompt(fields.get("prompt"), num_tokens),
        wanted=read_wanted(fields, "max_tokens"),
        is_stream=fields.flag("stream"),
        has_usage=bool(options.get("include_usage")),
        has_logprobs=fields.count("logprobs") is not None,
        has_ids=fields.flag("return_token_ids"),
    )
    if (fields.count("logprobs") or 0) > 1:
        raise Refused(400, "logprobs above 1 are not recorded; use 1 or leave it out", param="logprobs")
    read_neutral(fields)
    fields.neutral("best_of", 1)
    fields.neutral("echo", False)
    fields.neutral("suffix", "")
    fields.finish()
    return request


async def answer_completion(session: Session, request: CompletionRequest) -> Answer:
    """The session's answer."""
    return await session.complete(request.prompt, request.wanted)


def spell_completion(request: CompletionRequest, answer: Answer, prompts: ChatPrompts) -> Json:
    """The answer as one object."""
    choice: Json = {"index": 0, "text": answer.text, **_ending(request, answer, prompts)}
    return _head(request) | {"choices": [choice], "usage": spell_usage(answer)}


def stream_completion(request: CompletionRequest, answer: Answer, prompts: ChatPrompts) -> Iterator[Event]:
    """The answer as a stream of chunks."""
    head = _head(request)
    for piece in pieces(answer.text):
        choice: Json = {"index": 0, "text": piece, "finish_reason": None, "logprobs": None}
        yield Event(data=head | {"choices": [choice]})
    yield Event(data=head | {"choices": [{"index": 0, "text": "", **_ending(request, answer, prompts)}]})
    if request.has_usage:
        yield Event(data=head | {"choices": [], "usage": spell_usage(answer)})
    yield Event(data="[DONE]")


def _ending(request: CompletionRequest, answer: Answer, prompts: ChatPrompts) -> Json:
    ending: Json = {"finish_reason": answer.completion.finish_reason, "logprobs": None}
    if request.has_logprobs:
        ending["logprobs"] = {
            "tokens": [prompts.spell([token_id]) for token_id in answer.completion.ids],
            "token_logprobs": list(answer.completion.logprobs),
        }
    if request.has_ids:
        ending |= {"token_ids": list(answer.completion.ids), "prompt_token_ids": list(answer.prompt_ids)}
    return ending


def _head(request: CompletionRequest) -> Json:
    return {"id": make_id("cmpl-"), "object": "text_completion", "created": now(), "model": request.model}


def _read_prompt(value: object, num_tokens: int) -> str | list[int]:
    listed = cast(list[object], value) if isinstance(value, list) else []
    prompt: object = listed[0] if len(listed) == 1 else cast(object, value)
    if isinstance(prompt, int):
        prompt = [prompt]
    if isinstance(prompt, str) and prompt:
        return read_text(prompt, "prompt")
    ids = cast(list[object], prompt)
    if isinstance(prompt, list) and ids and all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        known = cast(list[int], prompt)
        if unknown := [i for i in known if not 0 <= i < num_tokens]:
            raise Refused(400, f"prompt has the token id {unknown[0]}; ids are 0 to {num_tokens - 1}", param="prompt")
        return known
    raise Refused(400, "prompt must be one text or one list of token ids, and not empty", param="prompt")
