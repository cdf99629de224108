"""The weights that one engine samples with: replaced, put to sleep and woken between two of its steps.

Invariant: `what_is_missing` is empty only while the kernels hold the version that is named; what fails on the way
leaves the engine refusing requests until a later update succeeds. Held by actors/inference_engine.py, whose requests
ask it; its verbs are called by actors/inference_server.py.
"""

import asyncio
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from actors.adapter import ADAPTER_NAME, disturbed_adapter, require_room
from actors.engine_stats import EngineStats
from actors.inference_config import ServerConfig, UpdateMode
from actors.inference_errors import VersionProofError, WeightSyncError
from actors.weight_noise import Noise
from actors.weight_stage import Manifest, corrupt_tensors, version_label
from trajectories.schema import PolicyVersion

UNPROVEN = "is out of service: its weights are not proven yet"


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


class EngineWeights:
    """The version in an engine's kernels, and the verbs that change it, one at a time."""

    def __init__(
        self,
        llm: Any,
        config: ServerConfig,
        name: str,
        stats: EngineStats,
        *,
        num_running: Callable[[], int],
        until_entered: Callable[[], Awaitable[None]],
    ) -> None:
        self._llm: Any = llm
        self._config = config
        self._name = name
        self._stats = stats
        self._num_running = num_running
        self._until_entered = until_entered
        """Returns once every request that was let in has its first token."""
        self._update = asyncio.Lock()
        self._awake = asyncio.Event()
        self._awake.set()
        self._open = asyncio.Event()
        self._open.set()
        self._fault = ""
        self.is_receiving = False
        """Whether a transfer is under way, so that what comes waits for it."""
        self.version: PolicyVersion | None = None
        """The version that samples the next token; None until one is set."""
        self.lora: Any = None
        """vLLM's name for the adapter that every request uses; None without one."""

    @property
    def what_is_missing(self) -> str:
        """Why nothing may be sampled, after the server's name; empty when all is well."""
        return self._fault or ("has no proven weights yet" if self.version is None else "")

    @property
    def salt(self) -> str:
        """Keys the prefix cache of the version."""
        assert self.version is not None, "a request checks first what is missing"
        return version_label(self.version)

    async def until_open(self) -> None:
        """Returns when the engine does not sleep and no weights are being replaced."""
        await self._awake.wait()
        await self._open.wait()

    async def set_version(self, version: PolicyVersion) -> None:
        """Names what the kernels hold."""
        await self._llm.update_weight_version(version_label(version))
        self.version = version

    async def load(self, manifest: Manifest, *, mode: UpdateMode, max_columns: int, admits: bool) -> LoadReport:
        """Replaces weights or adapter between two steps of the engine; of weights it proves that the kernels hold them.

        Wakes a sleeping engine. A failure leaves the server refusing requests, because part of its weights may be new;
        so does success without `admits`, until `admit`. Of an adapter nothing can be read back: the probe proves it.
        """
        async with self._update:
            await self._raise_if_corrupt(manifest)
            num_in_flight = self._num_running()
            began = time.perf_counter()
            # What is kept must not go on before the new weights are proven.
            async with self._woken(), self._paused(mode if admits else UpdateMode.ABORT):
                if manifest.lora_rank:
                    measured = await self._put_adapter(manifest)
                else:
                    measured = await self._replace(manifest, max_columns)
                await self.set_version(manifest.version)
                self._fault = "" if admits else UNPROVEN
            pause_s = time.perf_counter() - began
            return LoadReport(version=manifest.version, pause_s=pause_s, num_in_flight=num_in_flight, **measured)

    async def load_disturbed(self, manifest: Manifest, noise: Noise) -> None:
        """Pushes the stage with noise through the path of `load`; nothing is sampled until the next `load`."""
        async with self._update:
            self._fault = "is out of service: its weights are disturbed for a canary"
            async with self._paused(UpdateMode.ABORT):
                if not manifest.lora_rank:
                    await self._rpc("load_stage", manifest.as_message(), asdict(noise))
                    return
                with tempfile.TemporaryDirectory() as scratch:
                    await asyncio.to_thread(disturbed_adapter, manifest, noise, Path(scratch))
                    await self._add_lora(Path(scratch))

    async def open_transfer(self, init_info: dict[str, Any]) -> None:
        """Joins the group of a learner that sends by vLLM's own transfer (actors/vllm_transfer.py)."""
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        await self._llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info=init_info))

    async def close_transfer(self) -> None:
        """Leaves the group, so that another may be joined."""
        with self._named("does not leave its learner"):
            await self._llm.shutdown_weight_transfer_engine()

    async def begin_transfer(self, mode: UpdateMode) -> None:
        """Stops sampling and makes ready to receive; until `end_transfer`, or a failure, no other update comes in.

        Requests that come meanwhile wait, as for a `load`: all servers receive at once, so none could take them.
        """
        await self._update.acquire()
        self.is_receiving = True
        self._open.clear()
        with self._releasing(), self._named("does not make ready for its weights"):
            await self._until_entered()
            await self._llm.pause_generation(mode=mode.value, clear_cache=False)
            if not self._awake.is_set():
                await self._llm.wake_up(tags=["weights"])
            await self._llm.start_weight_update()

    async def receive(self, update_info: dict[str, Any] | list[dict[str, Any]]) -> None:
        """Receives what the learner sends meanwhile."""
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        with self._releasing(), self._named("did not receive its weights"):
            await self._llm.update_weights(WeightTransferUpdateRequest(update_info=update_info))

    async def end_transfer(self, version: PolicyVersion, admits: bool) -> None:
        """Samples on as `version`, or without `admits` when `admit` comes."""
        with self._releasing(), self._named("does not go on with its weights"):
            await self._llm.finish_weight_update(version_label(version))
            await self._wake_cache()
            await self._llm.resume_generation()
            self.version, self._fault = version, "" if admits else UNPROVEN
        self._end_update(lets_in=admits)

    def _end_update(self, *, lets_in: bool) -> None:
        self.is_receiving = False
        if lets_in:  # else those that wait do so until all is proven, since every other server is being proven too
            self._open.set()
        self._update.release()

    async def sleep(self) -> None:
        """Leaves the GPU's memory to the learner until the next weights come; requests wait meanwhile."""
        async with self._update:
            self._awake.clear()
            # Level 2 drops the weights, for new ones come after the learner's turn. Beside an adapter the model's own
            # stay what they are, so level 1 keeps them in host memory.
            await self._llm.sleep(level=1 if self._config.lora_rank else 2, mode="abort")

    def admit(self) -> None:
        """Lets requests in after a `load` or transfer that kept them out."""
        self._fault = ""
        self._open.set()

    def quarantine(self, reason: str) -> None:
        """Refuses requests until the next `load` or transfer succeeds."""
        self._fault = f"is out of service: {reason}"
        self._open.set()

    def close(self) -> None:
        """Forgets the engine, which ends."""
        self._llm = None

    async def _replace(self, manifest: Manifest, max_columns: int) -> dict[str, Any]:
        loaded = await self._rpc("load_stage", manifest.as_message(), None)
        checked = await self._rpc("read_back", manifest.as_message(), max_columns)
        self._raise_if_stale(manifest, checked)
        return {
            "load_s": max(part["load_s"] for part in loaded),
            "read_back_s": max(part["read_back_s"] for part in checked),
            "num_values": sum(part["num_values"] for part in checked),
            "unread": tuple(checked[0]["unread"]),
        }

    async def _put_adapter(self, manifest: Manifest) -> dict[str, Any]:
        """In place of the adapter before it; the model's own weights stay as they are."""
        from vllm.lora.request import LoRARequest

        require_room(manifest, self._config.lora_rank, self._name)
        began = time.perf_counter()
        await self._add_lora(manifest.directory)
        # Requests name it without load_inplace, or each of them would read it from disk again.
        self.lora = LoRARequest(ADAPTER_NAME, 1, str(manifest.directory))
        unread = tuple(tensor.name for tensor in manifest.tensors)
        return {"load_s": time.perf_counter() - began, "read_back_s": 0.0, "num_values": 0, "unread": unread}

    async def _add_lora(self, directory: Path) -> None:
        from vllm.lora.request import LoRARequest

        with self._named(f"does not take adapter {directory}"):
            await self._llm.add_lora(LoRARequest(ADAPTER_NAME, 1, str(directory), load_inplace=True))

    @asynccontextmanager
    async def _woken(self) -> AsyncIterator[None]:
        """Takes memory for weights back before what is inside, and for caches after it; nothing when awake."""
        if not self._awake.is_set():
            await self._llm.wake_up(tags=["weights"])
        yield
        await self._wake_cache()

    async def _wake_cache(self) -> None:
        if not self._awake.is_set():
            await self._llm.wake_up(tags=["kv_cache"])
            self._awake.set()

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
            self._stats.pause_s += time.perf_counter() - began

    @asynccontextmanager
    async def _stopped(self, mode: UpdateMode) -> AsyncIterator[None]:
        """Nothing is sampled within the block; when it fails, nothing after it either."""
        await self._llm.pause_generation(mode=mode.value, clear_cache=False)
        try:
            yield
        except BaseException as error:
            self._fault = f"is out of service: weight update failed: {error!r}"
            if not self._llm.errored:  # what is kept must not go on with weights of which a part may be new
                await self._llm.pause_generation(mode=UpdateMode.ABORT.value, clear_cache=False)
            raise
        finally:
            if self._awake.is_set() and not self._llm.errored:  # else there is no cache to sample with yet
                await self._llm.resume_generation()

    @contextmanager
    def _releasing(self) -> Iterator[None]:
        """When what is inside fails, the transfer is over: nothing is sampled, and another update may come in."""
        try:
            yield
        except BaseException:
            self._fault = "is out of service: its weights were not received"
            self._end_update(lets_in=True)
            raise

    @contextmanager
    def _named(self, what: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # vLLM raises nothing narrower when a worker's method fails
            raise WeightSyncError(f"{self._name} {what}: {error}") from error

    async def _rpc(self, method: str, *args: Any) -> list[dict[str, Any]]:
        with self._named(f"failed in the engine at {method}"):
            return await self._llm.collective_rpc(method, args=args)

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


def _few(names: Sequence[str]) -> str:
    """The first names, and how many more."""
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
