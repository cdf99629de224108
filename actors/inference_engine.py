"""One vLLM engine: exact tokens in, exact tokens out, and weights replaced while it generates.

Invariant: nothing is sampled before a version is set, and a sampled token carries the version whose weights sampled it.
The only importer of vLLM, unmodified. Held by the actor in actors/inference_server.py; works without Ray.
"""

import asyncio
import itertools
import logging
import math
import os
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from actors.inference_config import ServerConfig, UpdateMode
from actors.inference_errors import (
    NonFiniteLogprobs,
    ServerGone,
    ServerNotReady,
    ServerStartError,
    VersionProofError,
    WeightSyncError,
)
from actors.weight_noise import Noise
from actors.weight_stage import Manifest, corrupt_tensors, parse_version, version_label
from envs.errors import ContextLimit
from envs.sampler import Completion, SamplingParams
from trajectories.schema import PolicyVersion, VersionSpan

logger = logging.getLogger(__name__)


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

    def __init__(self, llm: Any, config: ServerConfig, name: str) -> None:
        self._llm: Any = llm
        self._config = config
        self._name = name
        self._slots = asyncio.Semaphore(config.max_num_seqs)
        self._update = asyncio.Lock()
        self._version: PolicyVersion | None = None
        self._fault = ""
        self._num_probes = itertools.count()
        self.num_running = 0
        """Requests being sampled."""
        self.num_waiting = 0
        """Requests that wait for a slot."""
        self.num_sampled_tokens = 0
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        """Prompt tokens taken from the prefix cache."""

    @classmethod
    async def start(cls, model: Path, config: ServerConfig, *, name: str, version: PolicyVersion | None) -> "Engine":
        """Loads the model. `version` names the weights on disk; None samples nothing before the first `load`.

        The environment of `config.environment()` must be set before this process imports torch. Raises
        ServerStartError with what vLLM has against the arguments.
        """
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        try:
            llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**config.resolved_engine_args(model)))
        except (TypeError, ValueError, RuntimeError) as error:
            raise ServerStartError(f"{name} did not come up: {' '.join(str(error).split())[:600]}") from error
        engine = cls(llm, config, name)
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
        return self._version is not None and not self._fault

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

    async def generate(
        self, prompt_ids: Sequence[int], params: SamplingParams, *, stop_ids: Sequence[int], request_id: str
    ) -> Completion:
        """One Completion; its prefix cache is shared within one policy version only.

        Raises ContextLimit, ServerNotReady, ServerGone and NonFiniteLogprobs.
        """
        limit = self._llm.model_config.max_model_len
        if len(prompt_ids) >= limit:
            raise ContextLimit(f"prompt of {len(prompt_ids)} tokens, but {self._name} takes {limit - 1}")
        self.num_waiting += 1
        try:
            await self._slots.acquire()
        finally:
            self.num_waiting -= 1
        self.num_running += 1
        try:
            self._require_ready()
            output = await self._run(prompt_ids, _vllm_params(params, stop_ids), request_id, self._salt())
        finally:
            self.num_running -= 1
            self._slots.release()
        return self._completion(output)

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
        output = await self._run(ids, params, f"probe-{number}-{time.time_ns()}", f"probe-{number}")
        values = [position[token].logprob for token, position in zip(ids[1:], output.prompt_logprobs[1:], strict=True)]
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
            async with self._paused(mode):
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

    async def load_disturbed(self, manifest: Manifest, noise: Noise) -> None:
        """Pushes the stage with noise through the path of `load`; nothing is sampled until the next `load`."""
        async with self._update:
            self._fault = "its weights are disturbed for a canary"
            async with self._paused(UpdateMode.KEEP):
                await self._rpc("load_stage", manifest.as_message(), asdict(noise))

    def admit(self) -> None:
        """Lets requests in after a `load` that kept them out."""
        self._fault = ""

    def quarantine(self, reason: str) -> None:
        """Refuses requests until the next `load` succeeds."""
        self._fault = reason

    @asynccontextmanager
    async def _paused(self, mode: UpdateMode) -> AsyncIterator[None]:
        """Between two engine steps, with the prefix cache kept: salts, not clearing, keep versions apart."""
        await self._llm.pause_generation(mode=mode.value, clear_cache=False)
        try:
            yield
        except BaseException as error:
            self._fault = f"weight update failed: {error!r}"
            raise
        finally:
            await self._llm.resume_generation()

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
        if self._fault:
            raise ServerNotReady(f"{self._name} is out of service: {self._fault}")
        if self._version is None:
            raise ServerNotReady(f"{self._name} has no proven weights yet")

    async def _run(self, prompt_ids: Sequence[int], params: Any, request_id: str, salt: str) -> Any:
        from vllm.v1.engine.exceptions import EngineDeadError

        prompt = {"prompt_token_ids": list(prompt_ids), "cache_salt": salt}
        output: Any = None
        try:
            async for part in self._llm.generate(prompt, params, request_id=request_id):
                output = part
        except EngineDeadError as error:
            raise ServerGone(f"{self._name}: its vLLM engine died") from error
        if output is None or output.outputs[0].finish_reason == "abort":
            raise ServerGone(f"{self._name} dropped request {request_id} for a weight update")
        return output

    def _completion(self, output: Any) -> Completion:
        choice = output.outputs[0]
        self.num_sampled_tokens += len(choice.token_ids)
        self.num_prompt_tokens += len(output.prompt_token_ids)
        self.num_cached_tokens += output.num_cached_tokens or 0
        return Completion(
            ids=tuple(choice.token_ids),
            logprobs=tuple(self._finite(choice.logprobs.logprobs)),
            spans=tuple(
                VersionSpan(version=parse_version(span.version), num_tokens=span.end - span.start)
                for span in choice.weight_versions
            ),
            finish_reason=choice.finish_reason,
        )

    def _finite(self, logprobs: list[float]) -> list[float]:
        for position, value in enumerate(logprobs):
            if not math.isfinite(value):
                raise NonFiniteLogprobs(f"{self._name}: log-probability {value} at sampled token {position}")
        return logprobs


def _vllm_params(params: SamplingParams, stop_ids: Sequence[int]) -> Any:
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
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def _few(names: Sequence[str]) -> str:
    """The first names, and how many more."""
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
