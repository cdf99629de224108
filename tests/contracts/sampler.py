"""What every Sampler keeps: fakes and the real pool are run against this one check."""

import asyncio
import math
from collections.abc import Sequence
from dataclasses import replace

from envs.sampler import Completion, Sampler, SamplingParams


async def check_sampler(
    sampler: Sampler, prompt_ids: Sequence[int], *, stop_ids: Sequence[int], vocab_size: int, max_tokens: int = 24
) -> None:
    """Asserts the Sampler contract on a few Completions of one prompt; the policy may hold any weights."""
    params = SamplingParams(max_tokens=max_tokens)
    for completion in await _sample_at_once(sampler, prompt_ids, params, stop_ids, num=4):
        _check_completion(completion, params, stop_ids, vocab_size)
    for length in (1, 2):
        cut = replace(params, max_tokens=length)
        for completion in await _sample_at_once(sampler, prompt_ids, cut, stop_ids, num=2):
            _check_completion(completion, cut, stop_ids, vocab_size)
    await _check_greedy(sampler, prompt_ids, replace(params, temperature=0.0), stop_ids)
    await _check_every_id_can_stop(sampler, prompt_ids, params, range(vocab_size))
    await _check_cancelled_calls_harm_nobody(sampler, prompt_ids, params, stop_ids, vocab_size)


async def _sample_at_once(
    sampler: Sampler, prompt_ids: Sequence[int], params: SamplingParams, stop_ids: Sequence[int], *, num: int
) -> list[Completion]:
    calls = (sampler.sample(prompt_ids, params, stop_ids=stop_ids, key=f"t{k}") for k in range(num))
    return list(await asyncio.gather(*calls))


def _check_completion(completion: Completion, params: SamplingParams, stop_ids: Sequence[int], vocab_size: int) -> None:
    assert 1 <= len(completion.ids) <= params.max_tokens
    assert all(0 <= i < vocab_size for i in completion.ids)
    assert all(math.isfinite(logprob) and logprob <= 1e-6 for logprob in completion.logprobs)
    assert not set(completion.ids[:-1]) & set(stop_ids), "a reply goes on after a stop id"
    is_stopped = completion.ids[-1] in stop_ids
    assert completion.finish_reason == ("stop" if is_stopped else "length")
    assert is_stopped or len(completion.ids) == params.max_tokens
    versions = [span.version for span in completion.spans]
    assert versions == sorted(versions) and all(span.num_tokens > 0 for span in completion.spans)


async def _check_greedy(
    sampler: Sampler, prompt_ids: Sequence[int], params: SamplingParams, stop_ids: Sequence[int]
) -> None:
    one, two = await _sample_at_once(sampler, prompt_ids, params, stop_ids, num=2)
    assert one.ids == two.ids, "temperature 0 gave two replies to one prompt"


async def _check_every_id_can_stop(
    sampler: Sampler, prompt_ids: Sequence[int], params: SamplingParams, every_id: Sequence[int]
) -> None:
    (completion,) = await _sample_at_once(sampler, prompt_ids, params, every_id, num=1)
    assert len(completion.ids) == 1 and completion.finish_reason == "stop", "the stop id belongs to the reply"


async def _check_cancelled_calls_harm_nobody(
    sampler: Sampler, prompt_ids: Sequence[int], params: SamplingParams, stop_ids: Sequence[int], vocab_size: int
) -> None:
    cancelled = asyncio.create_task(sampler.sample(prompt_ids, params, stop_ids=stop_ids, key="gone"))
    await asyncio.sleep(0)
    cancelled.cancel()
    await asyncio.wait([cancelled])
    (completion,) = await _sample_at_once(sampler, prompt_ids, params, stop_ids, num=1)
    _check_completion(completion, params, stop_ids, vocab_size)
