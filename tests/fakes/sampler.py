"""FakeSampler: replies that a test writes, cut, stopped and versioned as a real engine would."""

import asyncio
from collections.abc import Callable, Sequence

from envs.errors import SamplerError
from envs.sampler import Completion, SamplingParams
from trajectories.schema import PolicyVersion, VersionSpan

Reply = Callable[[Sequence[int]], Sequence[int]]
"""Prompt ids to the ids that the policy would go on with, past any limit."""


class FakeSampler:
    """A Sampler. The k-th id of a reply has log-probability -(k + 1) / 8.

    `tokens_per_version`: the policy version rises by one after every so many sampled tokens, in mid-reply too.
    """

    def __init__(
        self,
        reply: Reply,
        *,
        tokens_per_version: int | None = None,
        delay_s: float = 0.0,
        fails_at: int | None = None,
    ) -> None:
        """`fails_at`: the call with this number, from 0, raises SamplerError."""
        self._reply = reply
        self._tokens_per_version = tokens_per_version
        self._delay_s = delay_s
        self._fails_at = fails_at
        self._num_sampled = 0
        self.calls: list[tuple[tuple[int, ...], SamplingParams, str]] = []
        """(prompt ids, params, key) of every call."""

    @property
    def version(self) -> PolicyVersion:
        """The version that samples the next token."""
        return PolicyVersion(
            lineage=0, n=self._num_sampled // self._tokens_per_version if self._tokens_per_version else 0
        )

    async def sample(
        self, prompt_ids: Sequence[int], params: SamplingParams, *, stop_ids: Sequence[int], key: str
    ) -> Completion:
        self.calls.append((tuple(prompt_ids), params, key))
        if self._fails_at == len(self.calls) - 1:
            raise SamplerError("this call was told to fail")
        await asyncio.sleep(self._delay_s)
        ids = _until_stop(self._reply(prompt_ids), stop_ids)[: params.max_tokens]
        if not ids[-1:] or (ids[-1] not in stop_ids and len(ids) < params.max_tokens):
            raise ValueError(f"the fake's reply ends neither with a stop id nor at the limit: {ids}")
        return Completion(
            ids=tuple(ids),
            logprobs=tuple(-(k + 1) / 8 for k in range(len(ids))),
            spans=self._spans(len(ids)),
            finish_reason="stop" if ids[-1] in stop_ids else "length",
        )

    def _spans(self, num_tokens: int) -> tuple[VersionSpan, ...]:
        versions: list[PolicyVersion] = []
        for _ in range(num_tokens):
            versions.append(self.version)
            self._num_sampled += 1
        return tuple(VersionSpan(version=v, num_tokens=versions.count(v)) for v in sorted(set(versions)))


def scripted(*replies: Sequence[int]) -> Reply:
    """One reply after another, whoever asks."""
    remaining = iter(replies)
    return lambda prompt_ids: next(remaining)


def echo(num_tokens: int, stop_id: int) -> Reply:
    """The last ids of the prompt, then the stop id."""
    return lambda prompt_ids: [*(i for i in prompt_ids[-num_tokens:] if i != stop_id), stop_id]


def _until_stop(ids: Sequence[int], stop_ids: Sequence[int]) -> list[int]:
    for k, i in enumerate(ids):
        if i in stop_ids:
            return list(ids[: k + 1])
    return list(ids)
