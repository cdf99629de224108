"""Conversations over a real tokenizer and the real engine: what is trained is what vLLM was given and gave back.

Everything is written down as it enters and leaves vLLM itself, then compared bit for bit with the Samples. The policy
is random, but often ends its thinking and its reply, so its ids are such as no tokenizer would make of its text.
About 30 s.
"""

import asyncio
import itertools
import random
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch
from tokenizers import AddedToken, Tokenizer
from transformers import Qwen3Config, Qwen3ForCausalLM

from actors.inference_config import ServerConfig, UpdateMode
from actors.inference_engine import Engine
from actors.inference_request import Request, join_parts
from actors.weight_stage import parse_version
from envs.conversation import SampledConversation
from envs.errors import ContextLimit
from envs.renderer import ChatRenderer
from envs.sampler import Completion, SamplingParams
from tests.actors.tiny_qwen3 import TinySource
from tests.envs.templates import TEMPLATES, smollm2_tokenizer
from tests.trajectories.records import LOCATION, group
from trajectories.handle import summarize
from trajectories.metrics import summarize_groups
from trajectories.samples import trajectory_samples
from trajectories.schema import Outcome, PolicyVersion, Trajectory

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400), pytest.mark.asyncio(loop_scope="module")]

CONFIG = ServerConfig(max_model_len=512, max_num_seqs=16, stream_tokens=7)
REPLY_TOKENS, NUM_CONVERSATIONS, NUM_TURNS = 24, 6, 4
COMMON = {"</think>": 10.5, "Ċ": 9.5, "<|im_end|>": 9.0}
"""Logits of tokens that come often (Ċ: a newline); the other 49,000 together come to about 11."""
WORDS = ("list the files", "\n", "<|im_end|>", "é ✓", "</think>", "  ", "<|im_start|>user\n", "exit status 1", "🦙")


@dataclass
class EngineCall:
    """One request, as vLLM saw and answered it."""

    prompt_ids: list[int]
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[PolicyVersion] = field(default_factory=list)
    """Of each of `ids`."""


class RecordedLlm:
    """vLLM's AsyncLLM; requests and answers are written down as they pass."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self.calls: dict[str, EngineCall] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._llm, name)

    async def generate(self, prompt: dict[str, Any], params: Any, *, request_id: str, **more: Any) -> AsyncGenerator:
        call = self.calls[request_id] = EngineCall(list(prompt["prompt_token_ids"]))
        async for output in self._llm.generate(prompt, params, request_id=request_id, **more):
            choice = output.outputs[0]
            values = [each[token].logprob for token, each in zip(choice.token_ids, choice.logprobs, strict=True)]
            call.ids += choice.token_ids
            call.logprobs += values
            if choice.weight_versions is not None:
                starts = [span.start for span in choice.weight_versions] + [len(call.ids)]
                counts = [end - begin for begin, end in itertools.pairwise(starts)]
                labels = [parse_version(span.version) for span in choice.weight_versions]
                call.versions = [each for each, count in zip(labels, counts, strict=True) for _ in range(count)]
            yield output


@dataclass
class Served:
    """The engine as a Sampler, and what updates it."""

    engine: Engine
    llm: RecordedLlm
    source: TinySource
    directory: Path
    n: int = 0

    async def sample(
        self, prompt_ids: Sequence[int], params: SamplingParams, *, stop_ids: Sequence[int], key: str
    ) -> Completion:
        request = Request(prompt_ids=prompt_ids, params=params, stop_ids=stop_ids)
        number = sum(each.startswith(f"{key}/") for each in self.llm.calls)
        return join_parts([part async for part in self.engine.generate(request, f"{key}/{number}")])

    async def update(self) -> None:
        self.n += 1
        self.source.step(self.n, names=("model.layers.0.mlp.up_proj.weight", "model.norm.weight"))
        manifest = self.source.stage(self.directory, PolicyVersion(lineage=0, n=self.n))
        await self.engine.weights.load(manifest, mode=UpdateMode.KEEP, max_columns=64, admits=True)

    def calls_of(self, key: str) -> list[EngineCall]:
        return [call for request_id, call in self.llm.calls.items() if request_id.startswith(f"{key}/")]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """SmolLM2's, with thinking's marks as tokens of their own, as Qwen3's has them."""
    tokenizer = smollm2_tokenizer()
    tokenizer.add_tokens([AddedToken(mark, normalized=False) for mark in ("<think>", "</think>")])
    return tokenizer


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    model = save_thinking_qwen3(tmp_path_factory.mktemp("model"), tokenizer)
    patch = pytest.MonkeyPatch()
    for name, value in CONFIG.environment().items():
        patch.setenv(name, value)
    engine = await Engine.start(model, CONFIG, name="server-0", version=PolicyVersion(lineage=0, n=0))
    engine._llm = llm = RecordedLlm(engine._llm)
    try:
        yield Served(engine, llm, TinySource(model), tmp_path_factory.mktemp("stages"))
    finally:
        engine.close()
        patch.undo()


def save_thinking_qwen3(directory: Path, tokenizer: Tokenizer) -> Path:
    """A random model whose first hidden value hardly depends on the context, so that a head can favour tokens by it."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        tie_word_embeddings=False,
        max_position_embeddings=512,
        initializer_range=0.1,
    )
    model = Qwen3ForCausalLM(config).float().eval()
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = 1.0
        first = model.model(torch.arange(400, 500)[None]).last_hidden_state[0, :, 0].mean()
        for token, logit in COMMON.items():
            model.lm_head.weight[tokenizer.token_to_id(token), 0] = logit / first
    model.save_pretrained(directory)
    return directory


async def converse(served: Served, renderer: ChatRenderer, key: str) -> Trajectory:
    """Some turns with a world that says odd things."""
    draw = random.Random(key)
    params = SamplingParams(max_tokens=REPLY_TOKENS)
    conversation = SampledConversation(renderer, served, params, max_turns=NUM_TURNS, context_tokens=480, key=key)
    try:
        for _ in range(NUM_TURNS):
            await conversation.ask("".join(draw.choices(WORDS, k=4)))
        outcome = Outcome.COMPLETED
    except ContextLimit:
        outcome = Outcome.CONTEXT_LIMIT
    return Trajectory(
        id=key,
        task_id="task",
        group_id="g",
        member=0,
        prompt=conversation.prompt,
        turns=tuple(conversation.turns),
        outcome=outcome,
        reward=1.0,
    )


def assert_trained_as_sampled(trajectory: Trajectory, calls: Sequence[EngineCall]) -> None:
    """Each call stands whole in exactly one Sample, trained, with its own values; nothing else is trained."""
    samples = trajectory_samples(trajectory)
    trained = [np.zeros(len(sample.ids), np.bool_) for sample in samples]
    for turn, call in zip(trajectory.turns, calls, strict=True):
        seen, begin, end = [*call.prompt_ids, *call.ids], len(call.prompt_ids), len(call.prompt_ids) + len(call.ids)
        homes = [k for k, s in enumerate(samples) if s.ids[:end].tolist() == seen and s.mask[begin:end].all()]
        assert len(homes) == 1, "the engine's context and reply stand in one Sample"
        assert samples[homes[0]].logprobs[begin:end].tolist() == np.asarray(call.logprobs, np.float32).tolist()
        trained[homes[0]][begin:end] = True
        assert turn.tokens is not None and list(turn.tokens.logprobs) == call.logprobs
        assert [span.version for span in turn.tokens.spans for _ in range(span.num_tokens)] == call.versions
    for sample, is_trained in zip(samples, trained, strict=True):
        assert (sample.mask == is_trained).all()


@pytest.mark.parametrize("template", TEMPLATES)
async def test_every_trained_token_is_vllms_own_in_the_context_it_saw(
    served: Served, tokenizer: Tokenizer, template: str
) -> None:
    renderer = ChatRenderer(tokenizer=tokenizer, template=TEMPLATES[template], special={})
    keys = [f"{template}.{k}" for k in range(NUM_CONVERSATIONS)]
    playing = [asyncio.create_task(converse(served, renderer, key)) for key in keys]
    for _ in range(2):
        await asyncio.sleep(0.1)
        await served.update()
    trajectories = await asyncio.gather(*playing)

    num_breaks = 0
    for trajectory in trajectories:
        calls = served.calls_of(trajectory.id)
        assert len(calls) == len(trajectory.turns) == NUM_TURNS
        assert_trained_as_sampled(trajectory, calls)
        thoughts = [call for call in calls[:-1] if "</think>" in tokenizer.decode(call.ids, skip_special_tokens=False)]
        expected = len(thoughts) if renderer.drops_thinking else 0
        assert len(trajectory_samples(trajectory)) == 1 + expected
        num_breaks += expected
    metrics = summarize_groups([summarize(group(*trajectories), LOCATION)])
    assert metrics["prefix_breaks_mean"] == pytest.approx(num_breaks / NUM_CONVERSATIONS)
    assert (num_breaks > NUM_CONVERSATIONS) == renderer.drops_thinking == bool(metrics["prefix_breaks_alarm"])

    calls = [call for key in keys for call in served.calls_of(key)]
    assert len({version for call in calls for version in call.versions}) > 1, "weights changed meanwhile"
    retold = [renderer.encode_text(renderer.decode(call.ids), is_words=True) for call in calls]
    assert any(call.ids[:-1] != ids for call, ids in zip(calls, retold, strict=True)), "text would give other ids"
