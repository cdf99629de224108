"""One vLLM engine: exact tokens in, exact tokens out as they come.

Invariant: nothing is sampled before a version is set, and a sampled token carries the version whose weights sampled it.
Imports vLLM, unmodified. Held by the actor in actors/inference_server.py; works without Ray. How its weights change
meanwhile: actors/engine_weights.py.
"""

import asyncio
import itertools
import logging
import math
import os
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

from actors.engine_stats import EngineStats, step_logger
from actors.engine_weights import EngineWeights
from actors.inference_admission import Admission
from actors.inference_config import ServerConfig
from actors.inference_errors import NonFiniteLogprobs, RequestDropped, ServerGone, ServerNotReady, ServerStartError
from actors.inference_request import Part, Request, spans_of
from envs.errors import ContextLimit
from envs.sampler import SamplingParams
from trajectories.schema import PolicyVersion

logger = logging.getLogger(__name__)

ENTRY_LIMIT_S = 10.0
"""How long an update waits for the first tokens of requests that came before it."""
PROBE_FIRST = -1
"""Priority of a probe: before every request."""


class Engine:
    """An AsyncLLM and its weights; made by `Engine.start`."""

    def __init__(self, llm: Any, config: ServerConfig, name: str, stats: EngineStats) -> None:
        self._llm: Any = llm
        self._config = config
        self._name = name
        self._admission = Admission(config.max_num_seqs, kv_capacity_tokens(llm.vllm_config.cache_config))
        self._is_draining = False
        self._entering: set[str] = set()
        """Requests handed to vLLM that have no token yet."""
        self._all_begun = asyncio.Event()
        self._all_begun.set()
        self._num_probes = itertools.count()
        self.stats = stats
        self.weights = EngineWeights(
            llm, config, name, stats, num_running=lambda: self.num_running, until_entered=self._until_entered
        )
        stats.on_step = self._admission.observe

    @classmethod
    async def start(cls, model: Path, config: ServerConfig, *, name: str, version: PolicyVersion | None) -> "Engine":
        """Loads the model. `version` names the weights on disk; None samples nothing before the first `load`.

        The environment of `config.environment()` must be set before this process imports torch. Raises
        ServerStartError with what vLLM has against the arguments.
        """
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        stats = EngineStats()
        try:
            args = AsyncEngineArgs(**config.resolved_engine_args(model))
            llm = AsyncLLM.from_engine_args(args, stat_loggers=[step_logger(stats)])
        except (TypeError, ValueError, RuntimeError) as error:
            raise ServerStartError(f"{name} did not come up: {' '.join(str(error).split())[:600]}") from error
        engine = cls(llm, config, name, stats)
        await llm.collective_rpc("end_with", args=(os.getpid(),))
        if version is not None:
            await engine.weights.set_version(version)
        return engine

    @property
    def version(self) -> PolicyVersion | None:
        """The version that samples the next token; None until one is set."""
        return self.weights.version

    @property
    def is_ready(self) -> bool:
        """Whether requests are sampled."""
        return not (self._is_draining or self.weights.is_receiving or self.weights.what_is_missing)

    @property
    def num_running(self) -> int:
        """Requests being sampled."""
        return self._admission.num_running

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a slot."""
        return self._admission.num_waiting

    @property
    def kv_usage(self) -> float:
        """Share of the KV cache in use at the last step."""
        return self._admission.kv_usage if self.num_running else 0.0

    @property
    def num_preemptions(self) -> int:
        """Requests that a full KV cache put back."""
        return self._admission.num_preemptions

    @property
    def is_dead(self) -> bool:
        """Whether vLLM's own processes are gone."""
        return self._llm.errored

    @property
    def class_name(self) -> str:
        """Class of the engine, as imported."""
        return f"{type(self._llm).__module__}.{type(self._llm).__qualname__}"

    def close(self) -> None:
        """Stops vLLM's processes; nothing works afterwards."""
        self._llm.shutdown()
        self.weights.close()
        self._llm = None  # its destructor runs now, not while the interpreter ends

    async def generate(self, request: Request, request_id: str) -> AsyncGenerator[Part]:
        """The reply in Parts of `stream_tokens` tokens and a last one that says how it ended.

        Raises ContextLimit, ServerNotReady, ServerGone, RequestDropped and NonFiniteLogprobs.
        """
        num_prompt, limit = len(request.prompt_ids), self._llm.model_config.max_model_len
        if num_prompt >= limit:
            raise ContextLimit(f"prompt of {num_prompt} tokens, but {self._name} takes {limit - 1}")
        arrived = time.perf_counter()
        async with self._admission.slot(request.priority, num_prompt):
            await self.weights.until_open()
            self._require_ready()
            params = _vllm_params(request.params, request.stop_ids, self._config.stream_tokens)
            outputs = self._run(
                request.prompt_ids, params, request_id, request.salt or self.weights.salt, request.priority
            )
            done = 0
            async with aclosing(outputs):
                async for output in outputs:
                    if done == 0:
                        self.stats.began(output, time.perf_counter() - arrived)
                    part = self._part(output, done, self._version_starts(output, request_id))
                    done += len(part.ids)
                    self.stats.num_sampled_tokens += len(part.ids)
                    if output.outputs[0].finish_reason == "abort":
                        yield replace(part, finish_reason="")
                        raise RequestDropped(f"{self._name} dropped request {request_id} for a weight update")
                    yield part

    async def probe(self, ids: Sequence[int]) -> list[float]:
        """Log-probability of each of `ids` after the first, at temperature 1, by a prefill that reads no cache."""
        from vllm import SamplingParams as VllmParams
        from vllm.sampling_params import RequestOutputKind

        params = VllmParams(
            temperature=1.0,
            max_tokens=1,
            prompt_logprobs=0,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        number = next(self._num_probes)
        request_id = f"probe-{number}-{time.time_ns()}"
        outputs = [output async for output in self._run(ids, params, request_id, f"probe-{number}", PROBE_FIRST)]
        if not outputs or outputs[-1].outputs[0].finish_reason == "abort":
            raise ServerGone(f"{self._name} dropped the probe for a weight update")
        values = [
            position[token].logprob for token, position in zip(ids[1:], outputs[-1].prompt_logprobs[1:], strict=True)
        ]
        return self._finite(values)

    def drain(self) -> None:
        """Takes no further request for good; those in flight end."""
        self._is_draining = True

    async def _until_entered(self) -> None:
        """Returns once every request that was let in has its first token: one that has none would start anew after it.

        A full KV cache may hold one back for long; after ENTRY_LIMIT_S it is left to go on as vLLM has it.
        """
        try:
            async with asyncio.timeout(ENTRY_LIMIT_S):
                await self._all_begun.wait()
        except TimeoutError:
            logger.warning("server=%s updates before %d requests began", self._name, len(self._entering))

    def _begun(self, request_id: str) -> None:
        self._entering.discard(request_id)
        if not self._entering:
            self._all_begun.set()

    def _require_ready(self) -> None:
        if self._is_draining:
            raise ServerNotReady(f"{self._name} is being removed")
        if missing := self.weights.what_is_missing:
            raise ServerNotReady(f"{self._name} {missing}")

    async def _run(
        self, prompt_ids: Sequence[int], params: Any, request_id: str, salt: str, priority: int
    ) -> AsyncGenerator[Any]:
        """vLLM's outputs for one request."""
        from vllm.v1.engine.exceptions import EngineDeadError

        prompt = {"prompt_token_ids": list(prompt_ids), "cache_salt": salt}
        outputs = self._llm.generate(
            prompt, params, request_id=request_id, priority=priority, lora_request=self.weights.lora
        )
        self._entering.add(request_id)
        self._all_begun.clear()
        try:
            async with aclosing(outputs):
                async for output in outputs:
                    self._begun(request_id)
                    yield output
        except EngineDeadError as error:
            raise ServerGone(f"{self._name}: its vLLM engine died") from error
        finally:
            self._begun(request_id)

    def _version_starts(self, output: Any, request_id: str) -> list[tuple[str, int]]:
        """(label, first token) of each version that sampled this reply so far.

        vLLM hands spans out with the last output only; until then its own record of them is read.
        """
        choice = output.outputs[0]
        if choice.weight_versions is not None:
            return [(span.version, span.start) for span in choice.weight_versions]
        processor = self._llm.output_processor
        (internal_id,) = processor.external_req_ids.get(request_id, (None,))
        state = processor.request_states.get(internal_id)
        return [] if state is None else state.weight_version_starts

    def _part(self, output: Any, begin: int, starts: Sequence[tuple[str, int]]) -> Part:
        choice = output.outputs[0]
        ids = tuple(choice.token_ids)
        return Part(
            ids=ids,
            logprobs=tuple(self._finite(choice.logprobs.logprobs)) if ids else (),
            spans=spans_of(starts, begin, begin + len(ids)),
            finish_reason=choice.finish_reason or "",
        )

    def _finite(self, logprobs: list[float]) -> list[float]:
        for position, value in enumerate(logprobs):
            if not math.isfinite(value):
                raise NonFiniteLogprobs(f"{self._name}: log-probability {value} at sampled token {position}")
        return logprobs


def kv_capacity_tokens(cache_config: Any) -> int:
    """Tokens that an engine's KV cache holds, by vLLM's cache config."""
    return cache_config.kv_cache_size_tokens or cache_config.num_gpu_blocks * cache_config.block_size


def _vllm_params(params: SamplingParams, stop_ids: Sequence[int], stream_tokens: int) -> Any:
    from vllm import SamplingParams as VllmParams
    from vllm.sampling_params import RequestOutputKind

    return VllmParams(
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        max_tokens=params.max_tokens,
        seed=params.seed,
        stop_token_ids=list(stop_ids),
        ignore_eos=True,
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        stream_interval=stream_tokens,
    )
