"""An adapter synced as an adapter: generation follows it, and equals the model with the product in its weights."""

import asyncio
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from actors.adapter import Adapter
from actors.inference_config import ServerConfig, UpdateMode
from actors.inference_engine import Engine
from actors.inference_errors import WeightSyncError
from actors.inference_request import Request, join_parts
from envs.sampler import Completion, SamplingParams
from tests.actors.tiny_qwen3 import TinySource, save_tiny_qwen3
from trajectories.schema import PolicyVersion

RANK = 8
V0, V1, V2 = (PolicyVersion(lineage=0, n=n) for n in range(3))
PROMPT = list(range(100, 150))


def save_adapter(directory: Path, source: TinySource, seed: int) -> Path:
    """A random adapter on every q and down projection, in peft's form; `source` gets the same change merged."""
    generator = torch.Generator().manual_seed(seed)
    directory.mkdir()
    tensors: dict[str, torch.Tensor] = {}
    for name, module in source.model.named_modules():
        if name.endswith(("q_proj", "down_proj")):
            weight = module.weight
            assert isinstance(weight, torch.Tensor)
            down = torch.randn(RANK, weight.shape[1], generator=generator) * 0.1
            up = torch.randn(weight.shape[0], RANK, generator=generator) * 0.1
            tensors[f"base_model.model.{name}.lora_A.weight"] = down
            tensors[f"base_model.model.{name}.lora_B.weight"] = up
            with torch.no_grad():
                weight.add_(2.0 * up @ down)
    save_file(tensors, directory / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 2 * RANK, "target_modules": ["q_proj", "down_proj"]}
    config |= {"base_model_name_or_path": "", "bias": "none", "task_type": "CAUSAL_LM"}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory


def test_a_directory_that_is_no_adapter_is_refused(tmp_path: Path):
    (tmp_path / "adapter_config.json").write_text('{"r": 16}')
    with pytest.raises(WeightSyncError, match=r"lacks adapter_model\.safetensors: export it in peft's form"):
        Adapter.read(tmp_path, V1)
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    with pytest.raises(WeightSyncError, match="server-0 takes adapters up to rank 8, got rank 16"):
        Adapter.read(tmp_path, V1).require_rank(8, "server-0")


@pytest.mark.vllm
@pytest.mark.timeout(300)
async def test_generation_follows_each_version_of_an_adapter_in_mid_reply_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    model = save_tiny_qwen3(tmp_path / "model")
    config = ServerConfig(max_model_len=256, max_num_seqs=8, lora_rank=RANK)
    for name, value in config.environment().items():
        monkeypatch.setenv(name, value)
    base, source = TinySource(model), TinySource(model)
    engine = await Engine.start(model, config, name="server-0", version=V0)
    try:
        assert gap(await reply(engine, "base"), base) < 1e-5
        await engine.load_adapter(Adapter.read(save_adapter(tmp_path / "one", source, 1), V1), mode=UpdateMode.KEEP)
        first = await reply(engine, "one")
        assert {span.version for span in first.spans} == {V1}
        assert gap(first, source) < 1e-4 < 1e-2 < gap(first, base)
        flying = asyncio.create_task(reply(engine, "flying", max_tokens=200))
        await asyncio.sleep(0.3)
        two = TinySource(model)
        await engine.load_adapter(Adapter.read(save_adapter(tmp_path / "two", two, 2), V2), mode=UpdateMode.KEEP)
        crossed = await flying
        assert [span.version for span in crossed.spans] == [V1, V2], "a reply in flight takes the new adapter"
        assert gap(await reply(engine, "two"), two) < 1e-4
    finally:
        engine.close()


async def reply(engine: Engine, name: str, max_tokens: int = 24) -> Completion:
    request = Request(prompt_ids=PROMPT, params=SamplingParams(max_tokens=max_tokens), stop_ids=[])
    return join_parts([part async for part in engine.generate(request, name)])


def gap(completion: Completion, source: TinySource) -> float:
    reference = source.logprobs([*PROMPT, *completion.ids])[len(PROMPT) - 1 :]
    return max(abs(a - b) for a, b in zip(completion.logprobs, reference, strict=True))
