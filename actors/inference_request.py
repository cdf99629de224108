"""What one sample asks of a server, the Parts in which the answer comes, and how Parts become one Completion.

Invariant: Parts joined in order are what was sampled, each token once, with the version that sampled it, whichever
servers the Parts came from. Used by both ends of actors/inference_wire.py, the engine and the pool's Sampler.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

from actors.weight_stage import parse_version
from envs.sampler import Completion, SamplingParams
from trajectories.schema import VersionSpan


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What one sample asks for."""

    prompt_ids: Sequence[int]
    params: SamplingParams
    stop_ids: Sequence[int]
    priority: int = 0
    """Lower is served earlier: milliseconds at which the Group was first seen."""
    salt: str = ""
    """Requests of one salt share their prefix cache; "" shares it within the server's current version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Some tokens of a reply, in the order they were sampled."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    spans: tuple[VersionSpan, ...]
    finish_reason: str = ""
    """"stop" or "length" on the last Part; "" while more follows."""


def join_parts(parts: Sequence[Part]) -> Completion:
    """The Completion of all Parts; neighbouring spans of one version become one."""
    spans: list[VersionSpan] = []
    for span in (span for part in parts for span in part.spans):
        if spans and spans[-1].version == span.version:
            span = VersionSpan(version=span.version, num_tokens=spans.pop().num_tokens + span.num_tokens)
        spans.append(span)
    return Completion(
        ids=tuple(i for part in parts for i in part.ids),
        logprobs=tuple(value for part in parts for value in part.logprobs),
        spans=tuple(spans),
        finish_reason=parts[-1].finish_reason,
    )


def rest_of(request: Request, parts: Sequence[Part]) -> Request:
    """What is still to be sampled after `parts`: they join the prompt, and count against the token limit.

    A seed gives way to one made from it and the position, or the same draws would come a second time.
    """
    sampled = [i for part in parts for i in part.ids]
    if not sampled:
        return request
    params = replace(request.params, max_tokens=request.params.max_tokens - len(sampled))
    if params.seed is not None:
        digest = hashlib.blake2b(f"{params.seed}+{len(sampled)}".encode(), digest_size=4).digest()
        params = replace(params, seed=int.from_bytes(digest))
    return replace(request, prompt_ids=[*request.prompt_ids, *sampled], params=params)


def spans_of(starts: Sequence[tuple[str, int]], begin: int, end: int) -> tuple[VersionSpan, ...]:
    """Spans of tokens [begin, end) of a reply whose versions begin at `starts`, (label, first token) each.

    [("0.1", 0), ("0.2", 5)], 4, 7 -> one token of 0.1, two of 0.2; a reply dropped before its first token has no starts
    """
    if begin == end:
        return ()
    ends = [start for _, start in starts[1:]] + [end]
    cut = [(label, min(stop, end) - max(start, begin)) for (label, start), stop in zip(starts, ends, strict=True)]
    return tuple(VersionSpan(version=parse_version(label), num_tokens=num) for label, num in cut if num > 0)
