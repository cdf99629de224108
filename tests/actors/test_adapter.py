"""Adapters from a real learner in a real engine: generation follows each version and says what the learner says."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
import torch

from actors.adapter import disturbed_adapter, require_room
from actors.engine_weights import EngineWeights
from actors.inference_config import ServerConfig, UpdateMode
from actors.inference_engine import Engine
from actors.inference_errors import VersionProofError, WeightSyncError
from actors.inference_request import Part, Request, join_parts
from actors.sync_config import SyncConfig
from actors.version_proof import Probe, Published, check_canary, check_probe, probe_ids
from actors.weight_noise import Noise, canary_groups
from actors.weight_stage import (
    ADAPTER_CONFIG,
    Manifest,
    corrupt_tensors,
    manifest_from_message,
    read_stage,
    write_adapter_stage,
)
from envs.sampler import Completion, SamplingParams
from learners.config import LearnerConfig, LoraConfig, LossConfig, LossKind
from learners.learner import Learner
from tests.actors.tiny_qwen3 import VOCAB_SIZE, save_tiny_qwen3
from tests.learners.conftest import make_samples
from tests.learners.test_learner import sft_plan
from trajectories.schema import PolicyVersion

V1 = PolicyVersion(lineage=0, n=1)
RANK = 4
PROMPT = list(range(100, 150))
LEARNER = LearnerConfig(lr=0.05, lora=LoraConfig(rank=RANK, alpha=8))


def stage_of(directory: Path, rank: int = 2) -> Manifest:
    matrices = {
        f"base_model.model.model.layers.{layer}.self_attn.q_proj.lora_{half}.weight": torch.ones(2, 3) * layer
        for layer in (0, 1)
        for half in "AB"
    }
    return write_adapter_stage(directory, V1, iter(matrices.items()), {"r": rank, "target_modules": ["q_proj"]})


def test_an_adapters_stage_is_one_file_in_peft_form_with_digests(tmp_path: Path):
    manifest = stage_of(tmp_path)
    assert manifest.files == ("adapter_model.safetensors", "adapter_config.json")
    assert {path.name for path in manifest.directory.iterdir()} == set(manifest.files)
    assert manifest_from_message(manifest.as_message()) == manifest and manifest.lora_rank == 2
    assert corrupt_tensors(manifest) == []


def test_an_adapter_with_more_matrices_than_a_shards_header_holds_is_still_one_file(tmp_path: Path):
    many = {f"base_model.model.model.layers.{i}.self_attn.q_proj.lora_A.weight": torch.zeros(1) for i in range(2000)}
    manifest = write_adapter_stage(tmp_path, V1, iter(many.items()), {"r": 1})
    assert len(list(read_stage(manifest))) == 2000 and {tensor.shard for tensor in manifest.tensors} == {
        "adapter_model.safetensors"
    }


def test_an_adapter_that_a_server_has_no_room_for_is_refused(tmp_path: Path):
    with pytest.raises(WeightSyncError, match="server-0 takes adapters up to rank 8, got rank 16"):
        require_room(stage_of(tmp_path, rank=16), 8, "server-0")


def test_a_canary_disturbs_both_matrices_of_a_target_for_at_first_one_is_zero(tmp_path: Path):
    manifest = stage_of(tmp_path)
    (group,) = canary_groups([tensor.name for tensor in manifest.tensors], [1, 2]).values()
    assert group.names == tuple(tensor.name for tensor in manifest.tensors)
    (tmp_path / "disturbed").mkdir()
    disturbed_adapter(manifest, Noise(names=group.names[:2], scale=1.0), tmp_path / "disturbed")
    assert (tmp_path / "disturbed" / ADAPTER_CONFIG).is_file()
    disturbed = stage_like(manifest, tmp_path / "disturbed")
    same = [torch.equal(a, b) for (_, a), (_, b) in zip(read_stage(manifest), read_stage(disturbed), strict=True)]
    assert same == [False, False, True, True]


def stage_like(manifest: Manifest, directory: Path) -> Manifest:
    return Manifest(version=V1, directory=directory, tensors=manifest.tensors, num_bytes=0, lora_rank=RANK)


class Served:
    """A learner that trains adapters, and the engine that serves them, as a SyncedServer."""

    name = "server-0"
    pid = 1

    def __init__(self, engine: Engine, model: Path, directory: Path) -> None:
        self.engine = engine
        self.base = Learner(LearnerConfig(), model=model)
        self.learner = Learner(LEARNER, model=model)
        self.directory = directory
        self.store = directory / "store"
        self.published: Published

    def step(self) -> None:
        plan = sft_plan(self.store, make_samples([30, 20])).ranks[0]
        self.learner.forward_backward(plan, LossConfig(kind=LossKind.CROSS_ENTROPY), self.store)
        self.learner.optim_step()

    def stage(self) -> Published:
        version = PolicyVersion(lineage=0, n=self.learner.step)
        tensors, config = self.learner.export_adapter(), self.learner.adapter_config
        manifest = write_adapter_stage(self.directory, version, tensors, config)
        ids = probe_ids(VOCAB_SIZE, 48)
        probe = Probe(version=version, ids=ids, logprobs=tuple(self.learner.logprobs(ids)))
        self.published = Published(manifest=manifest, probe=probe)
        return self.published

    async def publish(self, *, admits: bool = True) -> None:
        manifest = self.stage().manifest
        report = await self.load(manifest, UpdateMode.KEEP, 16, admits, 60.0)
        assert report.num_values == 0 and report.unread == tuple(tensor.name for tensor in manifest.tensors)
        await check_probe(self, self.published.probe, SyncConfig(), is_exact=True)

    async def load(self, manifest, mode, max_columns, admits, deadline_s):
        return await self.engine.weights.load(manifest, mode=mode, max_columns=max_columns, admits=admits)

    async def admit(self, deadline_s):
        self.engine.weights.admit()

    async def load_disturbed(self, manifest, noise, deadline_s):
        await self.engine.weights.load_disturbed(manifest, noise)

    async def probe(self, ids, deadline_s):
        return await self.engine.probe(ids)

    async def quarantine(self, reason, deadline_s):
        self.engine.weights.quarantine(reason)

    async def reply(self, name: str, max_tokens: int = 24, begun: asyncio.Event | None = None) -> Completion:
        request = Request(prompt_ids=PROMPT, params=SamplingParams(max_tokens=max_tokens), stop_ids=[])
        parts: list[Part] = []
        async for part in self.engine.generate(request, name):
            parts.append(part)
            if begun is not None:
                begun.set()
        return join_parts(parts)


def gap(completion: Completion, learner: Learner) -> float:
    theirs = learner.logprobs([*PROMPT, *completion.ids])[len(PROMPT) - 1 :]
    return max(abs(a - b) for a, b in zip(completion.logprobs, theirs, strict=True))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    model = save_tiny_qwen3(tmp_path_factory.mktemp("model"))
    config = ServerConfig(max_model_len=256, max_num_seqs=8, lora_rank=RANK, lora_targets=LEARNER.lora.targets)
    patch = pytest.MonkeyPatch()
    for name, value in config.environment().items():
        patch.setenv(name, value)
    engine = await Engine.start(model, config, name="server-0", version=None)
    try:
        yield Served(engine, model, tmp_path_factory.mktemp("stages"))
    finally:
        engine.close()
        patch.undo()


@pytest.mark.vllm
@pytest.mark.asyncio(loop_scope="module")
async def test_generation_follows_each_version_of_an_adapter_and_equals_the_learner(served: Served):
    await served.publish(admits=False)
    await check_canary(served, served.published, SyncConfig())
    served.engine.weights.admit()
    assert gap(await served.reply("base"), served.base) < 1e-5, "a new adapter changes nothing"
    served.step()
    await served.publish()
    first = await served.reply("one")
    assert {span.version.n for span in first.spans} == {1}
    assert gap(first, served.learner) < 1e-5 < 1e-2 < gap(first, served.base)
    served.step()
    begun = asyncio.Event()
    flying = asyncio.create_task(served.reply("flying", 200, begun))
    await begun.wait()
    await served.publish()
    assert [span.version.n for span in (await flying).spans] == [1, 2], "a reply in flight takes the new adapter"
    assert gap(await served.reply("two"), served.learner) < 1e-5


@pytest.mark.vllm
@pytest.mark.asyncio(loop_scope="module")
async def test_a_sleeping_engine_takes_an_adapter_and_wakes_on_it(served: Served):
    await served.engine.weights.sleep()
    asking = asyncio.create_task(served.reply("asleep"))
    await asyncio.sleep(0.3)
    assert not asking.done()
    served.step()
    await served.publish()
    completion = await asking
    assert {span.version.n for span in completion.spans} == {served.learner.step}
    assert gap(completion, served.learner) < 1e-5


@pytest.mark.vllm
@pytest.mark.asyncio(loop_scope="module")
async def test_an_engine_that_keeps_its_old_adapter_is_caught_by_probe_and_canary(
    served: Served, monkeypatch: pytest.MonkeyPatch
):
    async def keep(self: EngineWeights, directory: Path) -> None:
        return None

    monkeypatch.setattr(EngineWeights, "_add_lora", keep)
    served.step()
    with pytest.raises(VersionProofError, match="does not serve version"):
        await served.publish()
    with pytest.raises(VersionProofError, match=r"new values of .*q_proj.*down_proj do not reach"):
        await check_canary(served, served.published, SyncConfig())
    assert not served.engine.is_ready
