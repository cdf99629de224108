"""The real engine, without Ray: one vLLM for all tests of this file."""

import asyncio
import copy
import itertools
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
import torch

from actors.engine_weights import EngineWeights
from actors.inference_config import ServerConfig, UpdateMode
from actors.inference_engine import Engine
from actors.inference_errors import NonFiniteLogprobs, RequestDropped, ServerNotReady, VersionProofError
from actors.inference_request import Part, Request, join_parts, rest_of
from actors.sync_config import SyncConfig
from actors.version_proof import Probe, Published, check_canary, check_probe, probe_ids
from actors.weight_noise import Noise, tensor_groups
from actors.weight_stage import Manifest
from envs.errors import ContextLimit
from envs.sampler import SamplingParams
from tests.actors.tiny_qwen3 import VOCAB_SIZE, TinySource, save_tiny_qwen3
from tests.contracts.sampler import check_sampler
from trajectories.schema import PolicyVersion, VersionSpan

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="module")]

CONFIG = ServerConfig(
    max_model_len=256, max_num_seqs=64, worker_extension="tests.actors.faulty_extension.FaultyExtension"
)
ALL_COLUMNS = 1024
PROMPT = list(range(100, 150))


class Served:
    """The engine, the reference it must equal, and versions in order."""

    def __init__(self, engine: Engine, model: Path, directory: Path) -> None:
        self.engine = engine
        self.source = TinySource(model)
        self.directory = directory
        self.n = 0
        self._numbers = itertools.count()
        self.manifest: Manifest

    @property
    def name(self) -> str:
        return "server-0"

    @property
    def pid(self) -> int:
        return 1

    def stage(self) -> Manifest:
        """The reference's weights as the next version."""
        self.n += 1
        self.manifest = self.source.stage(self.directory, PolicyVersion(lineage=0, n=self.n))
        return self.manifest

    async def update(self, *, mode: UpdateMode = UpdateMode.KEEP, max_columns: int = ALL_COLUMNS):
        return await self.engine.weights.load(self.stage(), mode=mode, max_columns=max_columns, admits=True)

    def published(self) -> Published:
        ids = probe_ids(VOCAB_SIZE, 48)
        probe = Probe(version=self.manifest.version, ids=ids, logprobs=tuple(self.source.logprobs(ids)))
        return Published(manifest=self.manifest, probe=probe)

    async def until_begun(self, num_requests: int) -> None:
        """Returns when so many requests, counted since the start, have their first token."""
        async with asyncio.timeout(60):
            while self.engine.stats.num_requests < num_requests:  # noqa: ASYNC110  it is a counter
                await asyncio.sleep(0.002)

    async def freeze(self, *names: str, at: Manifest | None = None) -> None:
        await self.engine._llm.collective_rpc("freeze", args=(list(names), at.as_message() if at else None))

    # SyncedServer and Sampler, so that proofs and the contract run without Ray.
    async def load(self, manifest, mode, max_columns, admits, deadline_s):
        return await self.engine.weights.load(manifest, mode=mode, max_columns=max_columns, admits=admits)

    async def admit(self, deadline_s):
        self.engine.weights.admit()

    async def load_disturbed(self, manifest, noise: Noise, deadline_s):
        await self.engine.weights.load_disturbed(manifest, noise)

    async def probe(self, ids, deadline_s):
        return await self.engine.probe(ids)

    async def quarantine(self, reason, deadline_s):
        self.engine.weights.quarantine(reason)

    async def sample(self, prompt_ids, params, *, stop_ids, key):
        request = Request(prompt_ids=prompt_ids, params=params, stop_ids=stop_ids)
        return join_parts([part async for part in self.parts(request)])

    def parts(self, request: Request):
        return self.engine.generate(request, f"r-{next(self._numbers)}")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    model = save_tiny_qwen3(tmp_path_factory.mktemp("model"))
    patch = pytest.MonkeyPatch()
    for name, value in CONFIG.environment().items():
        patch.setenv(name, value)
    engine = await Engine.start(model, CONFIG, name="server-0", version=None)
    try:
        yield Served(engine, model, tmp_path_factory.mktemp("stages"))
    finally:
        engine.close()
        patch.undo()


def worst_gap(ours, theirs) -> float:
    return max(abs(a - b) for a, b in zip(ours, theirs, strict=True))


async def test_nothing_is_sampled_before_there_are_proven_weights(served: Served):
    with pytest.raises(ServerNotReady, match="server-0 has no proven weights yet"):
        await served.sample(PROMPT, SamplingParams(max_tokens=4), stop_ids=[], key="early")
    report = await served.update()
    assert (
        report.num_values == sum(parameter.numel() for parameter in served.source.model.parameters()) + VOCAB_SIZE * 128
    )
    assert report.unread == () and served.engine.version == PolicyVersion(lineage=0, n=1)


async def test_the_engine_is_vllm_itself_and_keeps_the_sampler_contract(served: Served):
    assert served.engine.class_name == "vllm.v1.engine.async_llm.AsyncLLM"
    await check_sampler(served, PROMPT, stop_ids=[3, 5], vocab_size=VOCAB_SIZE)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
async def test_logprobs_are_those_of_the_tempered_distribution_that_was_sampled(served: Served, temperature: float):
    params = SamplingParams(max_tokens=40, temperature=temperature)
    completion = await served.sample(PROMPT, params, stop_ids=[], key="a")
    reference = served.source.logprobs([*PROMPT, *completion.ids], temperature)[len(PROMPT) - 1 :]
    assert worst_gap(completion.logprobs, reference) < 1e-5


async def test_the_probe_equals_the_reference(served: Served):
    assert worst_gap(await served.engine.probe(PROMPT), served.source.logprobs(PROMPT)) < 1e-5


async def test_a_prompt_that_leaves_no_room_is_a_context_limit(served: Served):
    with pytest.raises(ContextLimit, match="prompt of 256 tokens, but server-0 takes 255"):
        await served.sample([7] * 256, SamplingParams(max_tokens=4), stop_ids=[], key="long")


async def test_an_update_in_mid_reply_splits_it_into_spans_of_the_weights_that_sampled(served: Served):
    """Each token's log-probability is that of its span's version: the reference of the other version gives another."""
    before, old, began = served.n, copy.deepcopy(served.source), served.engine.stats.num_requests
    params = SamplingParams(max_tokens=200)
    replies = [
        asyncio.create_task(served.sample(PROMPT[: 20 + k], params, stop_ids=[], key=f"k{k}")) for k in range(16)
    ]
    await served.until_begun(began + 16)
    served.source.step(1)
    report = await served.update()
    assert report.num_in_flight == 16
    for k, completion in enumerate(await asyncio.gather(*replies)):
        assert [span.version.n for span in completion.spans] == [before, before + 1]
        first = completion.spans[0].num_tokens
        prompt = PROMPT[: 20 + k]
        reference = old.logprobs([*prompt, *completion.ids])[len(prompt) - 1 :]
        assert worst_gap(completion.logprobs[:first], reference[:first]) < 1e-5
        assert worst_gap(completion.logprobs[first:], reference[first:]) > 1e-3, "the old weights sampled no more"


async def cached_tokens(served: Served, prompt: list[int], salt: str) -> tuple[int, float]:
    """(prompt tokens read from the cache, worst gap of the reply's log-probabilities to the current weights)."""
    begin, params = served.engine.stats.num_cached_tokens, SamplingParams(max_tokens=8)
    request = Request(prompt_ids=prompt, params=params, stop_ids=[], salt=salt)
    completion = join_parts([part async for part in served.parts(request)])
    reference = served.source.logprobs([*prompt, *completion.ids])[len(prompt) - 1 :]
    return served.engine.stats.num_cached_tokens - begin, worst_gap(completion.logprobs, reference)


async def test_a_shared_prefix_is_reused_within_a_version_and_recomputed_after_a_sync(served: Served):
    prompt = [11 + k % 300 for k in range(200)]
    assert (await cached_tokens(served, prompt, salt=""))[0] == 0
    num_cached, gap = await cached_tokens(served, prompt, salt="")
    assert num_cached == 192 and gap < 1e-5
    served.source.step(2)
    await served.update()
    num_cached, gap = await cached_tokens(served, prompt, salt="")
    assert num_cached == 0, "the new version read the old one's cache"
    assert gap < 1e-5


async def test_a_request_that_comes_while_weights_are_replaced_reads_no_older_cache(
    served: Served, monkeypatch: pytest.MonkeyPatch
):
    """vLLM queues it while it is paused, and goes on with it under the new weights."""
    prompt = [13 + k % 300 for k in range(200)]
    assert (await cached_tokens(served, prompt, salt=""))[0] == 0
    served.source.step(8)
    is_paused, pause = asyncio.Event(), served.engine._llm.pause_generation

    async def pause_and_tell(**options):
        await pause(**options)
        is_paused.set()

    monkeypatch.setattr(served.engine._llm, "pause_generation", pause_and_tell)
    updating = asyncio.create_task(served.update())
    await is_paused.wait()
    num_cached, gap = await cached_tokens(served, prompt, salt="")
    assert updating.done()
    assert num_cached == 0 and gap < 1e-5


async def test_a_request_that_is_dropped_before_its_first_token_says_so(served: Served):
    prompts = [[k, *range(200)] for k in range(40)]
    params = SamplingParams(max_tokens=40)
    replies = [asyncio.create_task(served.sample(ids, params, stop_ids=[], key="d")) for ids in prompts]
    await asyncio.sleep(0.05)
    await served.engine._llm.pause_generation(mode="abort")
    errors = await asyncio.gather(*replies, return_exceptions=True)
    await served.engine._llm.resume_generation()
    assert [type(error) for error in errors] == [RequestDropped] * len(prompts)


async def test_a_request_that_is_on_its_way_into_vllm_is_there_before_an_update(
    served: Served, monkeypatch: pytest.MonkeyPatch
):
    before, enter, is_entering = served.n, served.engine._llm.add_request, asyncio.Event()

    async def enter_late(*args, **options):
        is_entering.set()
        await asyncio.sleep(0.2)
        return await enter(*args, **options)

    monkeypatch.setattr(served.engine._llm, "add_request", enter_late)
    reply = asyncio.create_task(served.sample(PROMPT, SamplingParams(max_tokens=8), stop_ids=[], key="late"))
    await is_entering.wait()
    await served.update(mode=UpdateMode.WAIT)
    assert (await reply).spans == (VersionSpan(version=PolicyVersion(lineage=0, n=before), num_tokens=8),)


async def test_a_salt_of_its_own_keeps_a_trajectorys_cache_across_a_sync_from_everybody_else(served: Served):
    """What the test above would see without isolation: cached tokens, and a gap to the weights' log-probabilities."""
    prompt = [17 + k % 300 for k in range(200)]
    assert (await cached_tokens(served, prompt, salt="g.0"))[0] == 0
    served.source.step(6)
    await served.update()
    num_cached, gap = await cached_tokens(served, prompt, salt="g.0")
    assert num_cached == 192 and gap > 1e-3
    assert (await cached_tokens(served, prompt, salt="g.1"))[0] == 0, "another trajectory read it"


async def test_a_reply_is_handed_on_while_it_is_sampled(served: Served):
    began = served.engine.stats.num_requests
    request = Request(prompt_ids=PROMPT, params=SamplingParams(max_tokens=100), stop_ids=[])
    parts, usage = [], 0.0
    async for part in served.parts(request):
        parts.append(part)
        usage = max(usage, served.engine.kv_usage)
    lengths = [len(part.ids) for part in parts]
    assert lengths[0] == 1 and len(lengths) > 2 and sum(lengths) == 100, "vLLM joins what is not taken in time"
    assert [part.finish_reason for part in parts] == [""] * (len(parts) - 1) + ["length"]
    assert 0 < usage < 1 and served.engine.stats.num_requests == began + 1 and served.engine.kv_usage == 0


async def test_wait_lets_replies_end_on_the_old_weights(served: Served):
    before, began = served.n, served.engine.stats.num_requests
    reply = asyncio.create_task(served.sample(PROMPT, SamplingParams(max_tokens=150), stop_ids=[], key="w"))
    await served.until_begun(began + 1)
    await served.update(mode=UpdateMode.WAIT)
    assert (await reply).spans == (VersionSpan(version=PolicyVersion(lineage=0, n=before), num_tokens=150),)


async def test_abort_drops_a_reply_whose_tokens_go_on_under_the_new_weights(served: Served):
    before, old = served.n, copy.deepcopy(served.source)
    request = Request(prompt_ids=PROMPT, params=SamplingParams(max_tokens=190), stop_ids=[])
    parts: list[Part] = []

    async def take() -> None:
        async for part in served.parts(rest_of(request, parts)):
            parts.append(part)

    began = served.engine.stats.num_requests
    taking = asyncio.create_task(take())
    await served.until_begun(began + 1)
    served.source.step(7)
    await served.update(mode=UpdateMode.ABORT)
    with pytest.raises(RequestDropped, match="dropped request"):
        await taking
    begin = served.engine.stats.num_prompt_tokens
    await take()
    completion = join_parts(parts)
    assert len(completion.ids) == 190 and [span.version.n for span in completion.spans] == [before, before + 1]
    first = completion.spans[0].num_tokens
    assert served.engine.stats.num_prompt_tokens - begin == 50 + first, "the sampled tokens were prefilled again"
    ids = [*PROMPT, *completion.ids]
    assert worst_gap(completion.logprobs[:first], old.logprobs(ids)[49 : 49 + first]) < 1e-5
    assert worst_gap(completion.logprobs[first:], served.source.logprobs(ids)[49 + first :]) < 1e-5


async def test_every_tensor_that_stays_old_is_named_by_the_load(served: Served):
    await served.update()
    for members in tensor_groups(tensor.name for tensor in served.manifest.tensors).values():
        name = members[-1]
        await served.freeze(name, at=served.manifest)
        served.source.step(3)
        with pytest.raises(VersionProofError, match=f"kernels do not hold version .* of {name}"):
            await served.update(max_columns=16)
        with pytest.raises(ServerNotReady, match="server-0 is out of service: weight update failed"):
            await served.sample(PROMPT, SamplingParams(max_tokens=4), stop_ids=[], key="bad")
    await served.freeze()
    await served.update()
    assert served.engine.is_ready


async def test_a_tied_head_that_keeps_its_packed_copy_is_caught_by_each_of_the_three_proofs(served: Served):
    await served.freeze("repack")
    served.source.step(4)
    with pytest.raises(VersionProofError, match=r"embed_tokens\.weight \(in lm_head\.weight\)"):
        await served.update(max_columns=16)
    with pytest.raises(VersionProofError, match="does not serve version"):
        await check_probe(served, served.published().probe, SyncConfig(), is_exact=True)


async def test_the_probe_alone_catches_every_tensor_that_stays_old(served: Served, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(EngineWeights, "_raise_if_stale", lambda *_: None)
    await served.freeze()
    await served.update()
    await check_probe(served, served.published().probe, SyncConfig(), is_exact=True)
    for name in [members[-1] for members in tensor_groups(t.name for t in served.manifest.tensors).values()]:
        await served.freeze(name, at=served.manifest)
        served.source.step(5)
        await served.update()
        with pytest.raises(VersionProofError, match="does not serve version"):
            await check_probe(served, served.published().probe, SyncConfig(), is_exact=True)
        await served.freeze()
        await served.update()


async def test_the_canary_passes_and_names_each_group_that_does_not_reach_the_kernels(
    served: Served, monkeypatch: pytest.MonkeyPatch
):
    await served.freeze()
    await served.update()
    await check_canary(served, served.published(), SyncConfig())
    assert not served.engine.is_ready, "requests stay out until the caller admits them"
    served.engine.weights.admit()
    assert served.engine.is_ready
    monkeypatch.setattr(EngineWeights, "_raise_if_stale", lambda *_: None)
    groups = tensor_groups(tensor.name for tensor in served.manifest.tensors)
    for frozen in (list(groups), ["model.layers.*.self_attn.q_norm.weight"], ["model.norm.weight"]):
        await served.freeze(*(name for group in frozen for name in groups[group]), at=served.manifest)
        with pytest.raises(VersionProofError) as raised:
            await check_canary(served, served.published(), SyncConfig())
        assert [group for group in groups if group in str(raised.value)] == frozen
    await served.freeze("repack")
    with pytest.raises(VersionProofError, match=r"new values of .*lm_head \(tied\)"):
        await check_canary(served, served.published(), SyncConfig())
    await served.freeze()
    await served.update()


async def test_bytes_that_changed_on_the_way_are_named(served: Served):
    manifest = served.stage()
    shard = manifest.directory / manifest.tensors[-1].shard
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    with pytest.raises(VersionProofError, match=f"bytes staged for version .*{manifest.tensors[-1].name}"):
        await served.engine.weights.load(manifest, mode=UpdateMode.KEEP, max_columns=ALL_COLUMNS, admits=True)
    await served.update()


async def test_a_non_finite_logprob_is_a_typed_error(served: Served, monkeypatch: pytest.MonkeyPatch):
    good = {name: parameter.detach().clone() for name, parameter in served.source.model.named_parameters()}
    with torch.no_grad():
        served.source.model.model.norm.weight.fill_(float("nan"))
    monkeypatch.setattr(EngineWeights, "_raise_if_stale", lambda *_: None)
    await served.update()
    with pytest.raises(NonFiniteLogprobs, match="server-0: log-probability nan"):
        await served.sample(PROMPT, SamplingParams(max_tokens=4), stop_ids=[], key="nan")
    monkeypatch.undo()
    served.source.model.load_state_dict(good, strict=False)
    await served.update()
