"""FakeServer and FakeSource: weight sync without engines. A tensor's mean stands for all that it makes a server say."""

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from actors.engine_weights import LoadReport
from actors.inference_config import DType, UpdateMode
from actors.inference_errors import VersionProofError
from actors.version_proof import SyncedServer
from actors.weight_noise import Noise, disturb
from actors.weight_stage import Manifest, read_stage, write_stage
from trajectories.schema import PolicyVersion


def say(weights: dict[str, torch.Tensor], ids: Sequence[int]) -> list[float]:
    """A log-probability for each id after the first, moved by every tensor."""
    total = sum(float(tensor.double().abs().sum()) for tensor in weights.values())
    return [-total * (1 + position / 100) for position in range(len(ids) - 1)]


class FakeSource:
    """A WeightSource whose weights are `weights`."""

    def __init__(self) -> None:
        self.weights = {
            "model.embed_tokens.weight": torch.ones(64, 4),
            "model.layers.0.norm.weight": torch.ones(4),
            "model.layers.1.norm.weight": torch.ones(4),
            "lm_head.weight": torch.ones(64, 4),
        }
        self.delay_s = 0.0
        self.asked_dtypes: list[DType] = []

    def step(self) -> None:
        """Changes every tensor."""
        self.weights = {name: tensor + 0.01 for name, tensor in self.weights.items()}

    async def stage_weights(self, directory: Path, version: PolicyVersion, dtype: DType) -> Manifest:
        await asyncio.sleep(self.delay_s)
        self.asked_dtypes.append(dtype)
        return write_stage(directory, version, iter(self.weights.items()))

    async def put_stage(self, manifest: Manifest) -> Manifest:
        shards = {tensor.shard for tensor in manifest.tensors}
        return replace(manifest, objects={shard: (manifest.directory / shard).read_bytes() for shard in shards})

    async def probe_logprobs(self, ids: Sequence[int]) -> list[float]:
        return say(self.weights, ids)


_PIDS = itertools.count(1)


class FakeServer:
    """A SyncedServer that keeps the tensors named in `deaf` as they were at its first load."""

    def __init__(self, name: str, *, deaf: Sequence[str] = (), delay_s: float = 0.0) -> None:
        self.name = name
        self.pid = next(_PIDS)
        self.deaf = tuple(deaf)
        self.delay_s = delay_s
        self.reads_back = True
        self.fails: Exception | None = None
        self.is_open = False
        self.quarantined = ""
        self.loaded: list[PolicyVersion] = []
        self.manifests: list[Manifest] = []
        self.weights: dict[str, torch.Tensor] = {}

    def restart(self) -> None:
        """A new process under the old name, without weights."""
        self.pid = next(_PIDS)
        self.weights = {}
        self.is_open = False

    async def load(
        self, manifest: Manifest, mode: UpdateMode, max_columns: int, admits: bool, deadline_s: float
    ) -> LoadReport:
        self.is_open = False
        await asyncio.sleep(self.delay_s)
        if self.fails is not None:
            raise self.fails
        staged = {tensor.name: values.clone() for tensor, values in read_stage(manifest)}
        self._take(staged)
        stale = [name for name, values in staged.items() if not torch.equal(values, self.weights[name])]
        if stale and self.reads_back:
            raise VersionProofError(f"{self.name}: kernels do not hold {', '.join(stale)}")
        self.loaded.append(manifest.version)
        self.manifests.append(manifest)
        self.is_open = admits
        return LoadReport(
            version=manifest.version,
            pause_s=0.25,
            load_s=0.125,
            read_back_s=0.0,
            num_in_flight=3,
            num_values=8,
            unread=(),
        )

    async def admit(self, deadline_s: float) -> None:
        self.is_open = True

    async def load_disturbed(self, manifest: Manifest, noise: Noise, deadline_s: float) -> None:
        assert not self.is_open, "disturbed weights while requests come in"
        self._take(
            {
                tensor.name: disturb(values, tensor.name, noise) if tensor.name in noise.names else values.clone()
                for tensor, values in read_stage(manifest)
            }
        )

    async def probe(self, ids: Sequence[int], deadline_s: float) -> list[float]:
        return say(self.weights, ids)

    async def quarantine(self, reason: str, deadline_s: float) -> None:
        self.is_open = False
        self.quarantined = reason

    def _take(self, staged: dict[str, torch.Tensor]) -> None:
        kept = {name: self.weights[name] for name in self.deaf if name in self.weights}
        self.weights = staged | kept


class FakeTarget:
    """A SyncTarget over fake servers."""

    vocab_size = 64

    def __init__(self, *servers: FakeServer, dtype: DType = DType.FLOAT32) -> None:
        self.servers = servers
        self.dtype = dtype
        self.heal: Callable[[SyncedServer], Awaitable[None]] | None = None

    def heal_with(self, heal: Callable[[SyncedServer], Awaitable[None]]) -> None:
        self.heal = heal
