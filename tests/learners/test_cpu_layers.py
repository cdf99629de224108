"""Layers with fewer passes compute what transformers' own layers compute, gradients included."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from learners import fused_linear
from learners.attention import packed_layout
from learners.cpu_layers import use_cpu_layers
from learners.hugging_face import PACKED_ATTENTION
from tests.learners.live_bytes import LiveBytes

SHAPE: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.2,
}
DEEP: dict[str, Any] = SHAPE | {"num_hidden_layers": 12, "intermediate_size": 96, "hidden_size": 36}
FAMILIES = [LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config]
LENGTHS = [9, 8, 3]


def make(family: type[PreTrainedConfig]) -> Any:
    torch.manual_seed(0)
    options: dict[str, Any] = SHAPE | ({"sliding_window": None} if family is MistralConfig else {})
    model = AutoModelForCausalLM.from_config(family(**options), attn_implementation=PACKED_ATTENTION)
    for parameter in model.parameters():  # ones and zeros would hide mistakes in norms and biases
        torch.nn.init.normal_(parameter, std=0.3)
    return model.model


def run(decoder: Any, lengths: list[int] = LENGTHS) -> tuple[Tensor, dict[str, Tensor]]:
    ids = torch.arange(sum(lengths))[None] % 50
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    output = decoder(input_ids=ids, position_ids=positions, use_cache=False, layout=packed_layout(lengths))
    hidden = output.last_hidden_state
    (hidden * torch.linspace(-1, 1, hidden.numel()).view_as(hidden)).sum().backward()
    return hidden.detach(), {name: p.grad for name, p in decoder.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", FAMILIES)
def test_cpu_layers_equal_those_of_transformers(
    family: type[PreTrainedConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused_linear, "CHUNK_TOKENS", 7)  # 20 tokens: two whole chunks and a part
    theirs, ours = make(family), make(family)
    assert use_cpu_layers(ours)
    (their_hidden, their_grads), (our_hidden, our_grads) = run(theirs), run(ours)
    torch.testing.assert_close(our_hidden, their_hidden, rtol=1e-5, atol=1e-5)
    assert our_grads.keys() == their_grads.keys()
    for name, gradient in their_grads.items():
        assert float((our_grads[name] - gradient).norm() / gradient.norm()) < 1e-5, name


@pytest.mark.parametrize("family", [LlamaConfig, Qwen3Config])
def test_cpu_layers_keep_at_most_two_thirds_of_what_transformers_keep(family: type[PreTrainedConfig]) -> None:
    theirs, ours = (
        AutoModelForCausalLM.from_config(family(**DEEP), attn_implementation=PACKED_ATTENTION).model for _ in range(2)
    )
    assert use_cpu_layers(ours)
    peaks = []
    for decoder in (ours, theirs):
        with LiveBytes() as live:
            run(decoder, [400, 300, 200])
        peaks.append(live.peak)
    assert peaks[0] < peaks[1] * 2 / 3


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_attention_equals_transformers_own_one_sample_at_a_time(family: type[PreTrainedConfig]) -> None:
    packed, plain = make(family), make(family)
    plain.set_attn_implementation("eager")
    hidden, _ = run(packed)
    ids = (torch.arange(sum(LENGTHS)) % 50).split(LENGTHS)
    expected = torch.cat([plain(input_ids=part[None], use_cache=False).last_hidden_state[0] for part in ids])
    torch.testing.assert_close(hidden[0], expected.detach(), rtol=1e-5, atol=1e-5)


def test_samples_beyond_a_sliding_window_are_refused() -> None:
    options: dict[str, Any] = SHAPE | {"sliding_window": 8}
    qwen: dict[str, Any] = options | {"use_sliding_window": True, "max_window_layers": 0}
    for config in (MistralConfig(**options), Qwen2Config(**qwen), Qwen3Config(**qwen)):
        decoder = AutoModelForCausalLM.from_config(config, attn_implementation=PACKED_ATTENTION).model
        assert use_cpu_layers(decoder)
        run(decoder, [8, 8])
        with pytest.raises(ValueError, match="a sliding window of 8 tokens is not supported for Samples of 9"):
            run(decoder, [9, 8])


def test_another_family_is_left_alone_and_its_soft_cap_refused() -> None:
    decoder = make(Gemma2Config)
    assert not use_cpu_layers(decoder)
    with pytest.raises(ValueError, match="soft cap"):
        run(decoder)
