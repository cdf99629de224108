"""One vLLM engine: exact tokens in, exact tokens out as they come, and weights replaced while it generates.

Invariant: nothing is sampled before a version is set, and a sampled token carries the version whose weights sampled it.
Imports vLLM, unmodified. Held by the actor in actors/inference_server.py; works without Ray.
"""

import asyncio
import itertools
import logging
import math
import os
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from actors.adapter import NAME as ADAPTER_NAME
from actors.adapter import Adapter
from actors.engine_stats import EngineStats, step_logger
from actors.inference_admission import Admission
from actors.inference_config import ServerConfig, UpdateMode
from actors.inference_errors import (
    NonFiniteLogprobs,
    RequestDropped,
    ServerGone,
    ServerNotReady,
    ServerStartError,
    VersionProofError,
    WeightSyncError,
)
from actors.inference_request import Part, Request, spans_of
from actors.weight_noise import Noise
from actors.weight_stage import Manifest, corrupt_tensors, version_label
from envs.errors import ContextLimit
from envs.sampler import SamplingParams
from trajectories.schema import PolicyVersion

logger = logging.getLogger(__name__)

_ENTRY_POLL_S = 0.001
PROBE_FIRST = -1
"""Priority of a probe: before every request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """What one weight update took and proved."""

    version: PolicyVersion
    pause_s: float
    """Seconds in which nothing was sampled."""
    load_s: float
    """Seconds of these in which weights were replaced."""
    read_back_s: float
    """Seconds of these in which the kernels' weights were read back."""
    num_in_flight: int
    """Requests that were being sampled when the update began."""
    num_values: int
    """Weights that were read back and agreed, bit for bit."""
    unread: tuple[str, ...]
    """Tensors of the stage that no kernel could be asked for."""


class Engine:
    """An AsyncLLM and the version of its weights; made by `Engine.start`."""

    def __init__(self, llm: Any, config: ServerConfig, name: str, stats: EngineStats) -> None:
        self._llm: Any = llm
        self._config = config
        self._name = name
        self._admission = Admission(config.max_num_seqs, kv_capacity_tokens(llm.vllm_config.cache_config))
        self._update = asyncio.Lock()
        self._version: PolicyVersion | None = None
        self._fault = ""
        self._is_draining = False
        self._lora: Any = None
        self._awake = asyncio.Event()
        self._awake.set()
        self._open = asyncio.Event()
        self._open.set()
        self._entering: set[str] = set()
        """Requests handed to vLLM of which nothing has come back yet."""
        self._num_probes = itertools.count()
        self.stats = stats
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
            await engine._set_version(version)
        return engine

    @property
    def version(self) -> PolicyVersion | None:
        """The version that samples the next token; None until one is set."""
        return self._version

    @property
    def is_ready(self) -> bool:
        """Whether requests are sampled."""
        return self._version is not None and not self._fault and not self._is_draining

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
            await self._awake.wait()
            self._require_ready()
            await self._open.wait()
            self._require_ready()
            params = _vllm_params(request.params, request.stop_ids, self._config.stream_tokens)
            outputs = self._run(request.prompt_ids, params, request_id, request.salt or self._salt(), request.priority)
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

    async def load(self, manifest: Manifest, *, mode: UpdateMode, max_columns: int, admits: bool) -> LoadReport:
        """Replaces the weights between two steps of the engine and proves that the kernels hold them.

        A failure leaves the server refusing requests, because part of its weights may be new; so does success without
        `admits`, until `admit`.
        """
        async with self._update:
            await self._raise_if_corrupt(manifest)
            num_in_flight = self.num_running
            began = time.perf_counter()
            # What is kept must not go on before the new weights are proven.
            async with self._paused(mode if admits else UpdateMode.ABORT):
                loaded = await self._rpc("load_stage", manifest.as_message(), None)
                checked = await self._rpc("read_back", manifest.as_message(), max_columns)
                self._raise_if_stale(manifest, checked)
                await self._set_version(manifest.version)
                self._fault = "" if admits else "its weights are not proven yet"
            return LoadReport(
                version=manifest.version,
                pause_s=time.perf_counter() - began,
                load_s=max(part["load_s"] for part in loaded),
                read_back_s=max(part["read_back_s"] for part in checked),
                num_in_flight=num_in_flight,
                num_values=sum(part["num_values"] for part in checked),
                unread=tuple(checked[0]["unread"]),
            )

    async def load_adapter(self, adapter: Adapter, *, mode: UpdateMode) -> None:
        """Puts an adapter on the model, in place of the one before it; the model's own weights stay as they are.

        Raises WeightSyncError when the engine cannot take it, and samples nothing then.
        """
        from vllm.lora.request import LoRARequest

        adapter.require_rank(self._config.lora_rank, self._name)
        path = str(adapter.directory)
        async with self._update, self._paused(mode):
            try:
                await self._llm.add_lora(LoRARequest(ADAPTER_NAME, 1, path, load_inplace=True))
            except Exception as error:  # vLLM raises nothing narrower when a worker refuses an adapter
                raise WeightSyncError(f"{self._name} does not take adapter {path}: {error}") from error
            # Requests name it without load_inplace, or each of them would read it from disk again.
            self._lora = LoRARequest(ADAPTER_NAME, 1, path)
            await self._set_version(adapter.version)

    async def load_disturbed(self, manifest: Manifest, noise: Noise) -> None:
        """Pushes the stage with noise through the path of `load`; nothing is sampled until the next `load`."""
        async with self._update:
            self._fault = "its weights are disturbed for a canary"
            async with self._paused(UpdateMode.ABORT):
                await self._rpc("load_stage", manifest.as_message(), asdict(noise))

    async def open_transfer(self, init_info: dict[str, Any]) -> None:
        """Joins the group of a learner that sends by vLLM's own transfer (actors/vllm_transfer.py)."""
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        await self._llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info=init_info))

    async def begin_transfer(self, mode: UpdateMode) -> None:
        """Stops sampling and makes ready to receive; until `end_transfer` no other update comes in."""
        await self._update.acquire()
        self._fault = "its weights are being received"
        await self._until_entered()
        await self._llm.pause_generation(mode=mode.value, clear_cache=False)
        await self._llm.start_weight_update()

    async def receive(self, update_info: dict[str, Any] | list[dict[str, Any]]) -> None:
        """Receives what the learner sends meanwhile."""
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        await self._llm.update_weights(WeightTransferUpdateRequest(update_info=update_info))

    async def end_transfer(self, version: PolicyVersion) -> None:
        """Samples on, as `version`."""
        await self._llm.finish_weight_update(version_label(version))
        self._version, self._fault = version, ""
        await self._llm.resume_generation()
        self._update.release()

    async def sleep(self) -> None:
        """Gives the GPU's memory to the learner: weights and caches go, and requests wait for `wake_cache`."""
        self._awake.clear()
        # Level 2 drops the weights: those that come after the learner's turn are new ones.
        await self._llm.sleep(level=2, mode="abort")

    async def wake_weights(self) -> None:
        """Takes memory for weights back, so that a `load` or a transfer may fill it."""
        await self._llm.wake_up(tags=["weights"])

    async def wake_cache(self) -> None:
        """Takes memory for caches back and samples on."""
        await self._llm.wake_up(tags=["kv_cache"])
        await self._llm.resume_generation()
        self._awake.set()

    def admit(self) -> None:
        """Lets requests in after a `load` that kept them out."""
        self._fault = ""

    def quarantine(self, reason: str) -> None:
        """Refuses requests until the next `load` succeeds."""
        self._fault = reason

    def drain(self) -> None:
        """Takes no further request for good; those in flight end."""
        self._is_draining = True

    @asynccontextmanager
    async def _paused(self, mode: UpdateMode) -> AsyncIterator[None]:
        """Between two engine steps, with the prefix cache kept: salts, not clearing, keep versions apart.

        vLLM queues what comes while it is paused, and would then sample it with the new weights over what its salt, the
        old version's, lets it read. So requests that come meanwhile wait here, and take their salt afterwards.
        """
        began = time.perf_counter()
        self._open.clear()
        try:
            await self._until_entered()
            async with self._stopped(mode):
                yield
        finally:
            self._open.set()
            self.stats.pause_s += time.perf_counter() - began

    @asynccontextmanager
    async def _stopped(self, mode: UpdateMode) -> AsyncIterator[None]:
        """Nothing is sampled within the block; when it fails, nothing after it either."""
        await self._llm.pause_generation(mode=mode.value, clear_cache=False)
        try:
            yield
        except BaseException as error:
            self._fault = f"weight update failed: {error!r}"
            if not self.is_dead:  # what is kept must not go on with weights of which a part may be new
                await self._llm.pause_generation(mode=UpdateMode.ABORT.value, clear_cache=False)
            raise
        finally:
            if self._awake.is_set() and not self.is_dead:  # else there is no cache to sample with yet
                await self._llm.resume_generation()

    async def _until_entered(self) -> None:
        """Returns once vLLM has every request that was let in: what it has, its next pause comes after."""
        while True:
            if all(each in self._llm.output_processor.external_req_ids for each in self._entering):
                return
            await asyncio.sleep(_ENTRY_POLL_S)

    async def _rpc(self, method: str, *args: Any) -> list[dict[str, Any]]:
        try:
            return await self._llm.collective_rpc(method, args=args)
        except Exception as error:  # vLLM raises nothing narrower when a worker's method fails
            raise WeightSyncError(f"{self._name}: {method} failed in the engine: {error}") from error

    async def _raise_if_corrupt(self, manifest: Manifest) -> None:
        """Checks the stage's digests while the engine goes on, in a thread: hashing 269 MB takes 0.1 s."""
        corrupt = await asyncio.to_thread(corrupt_tensors, manifest)
        if corrupt:
            version = version_label(manifest.version)
            raise VersionProofError(
                f"{self._name}: bytes staged for version {version} differ from the learner's: {_few(corrupt)}"
            )

    def _raise_if_stale(self, manifest: Manifest, checked: list[dict[str, Any]]) -> None:
        stale = sorted({name for part in checked for name in part["stale"]})
        if stale:
            version = version_label(manifest.version)
            raise VersionProofError(f"{self._name}: kernels do not hold version {version} of {_few(stale)}")

    async def _set_version(self, version: PolicyVersion) -> None:
        await self._llm.update_weight_version(version_label(version))
        self._version = version

    def _salt(self) -> str:
        assert self._version is not None, "generate checks readiness first"
        return version_label(self._version)

    def _require_ready(self) -> None:
        if self._is_draining:
            raise ServerNotReady(f"{self._name} is being removed")
        if self._fault:
            raise ServerNotReady(f"{self._name} is out of service: {self._fault}")
        if self._version is None:
            raise ServerNotReady(f"{self._name} has no proven weights yet")

    async def _run(
        self, prompt_ids: Sequence[int], params: Any, request_id: str, salt: str, priority: int
    ) -> AsyncGenerator[Any]:
        """vLLM's outputs for one request."""
        from vllm.v1.engine.exceptions import EngineDeadError

        prompt = {"prompt_token_ids": list(prompt_ids), "cache_salt": salt}
        outputs = self._llm.generate(prompt, params, request_id=request_id, priority=priority, lora_request=self._lora)
        self._entering.add(request_id)
        try:
            async with aclosing(outputs):
                async for output in outputs:
                    self._entering.discard(request_id)
                    yield output
        except EngineDeadError as error:
            raise ServerGone(f"{self._name}: its vLLM engine died") from error
        finally:
            self._entering.discard(request_id)

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


def _few(names: Sequence[str]) -> str:
    """The first names, and how many more."""
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
