"""A tiny random Qwen3 (2 layers, hidden 128, vocabulary 792) as reference, source of weights and served model."""

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from actors.inference_config import DType
from actors.weight_objects import put_stage
from actors.weight_stage import Manifest, write_stage
from trajectories.schema import PolicyVersion

VOCAB_SIZE = 792


def save_tiny_qwen3(directory: Path, *, is_tied: bool = True) -> Path:
    """Writes the model, with weights large enough that its distribution is far from uniform."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=64,
        tie_word_embeddings=is_tied,
        max_position_embeddings=512,
        initializer_range=0.1,
    )
    Qwen3ForCausalLM(config).float().save_pretrained(directory)
    return directory


class TinySource:
    """A WeightSource over transformers: the learner's side, independent of our learner."""

    def __init__(self, model: Path) -> None:
        self.model = Qwen3ForCausalLM.from_pretrained(model, dtype=torch.float32).eval()

    @torch.no_grad()
    def step(self, seed: int, names: Sequence[str] = ()) -> None:
        """Moves every parameter (or those of `names`) by a hundredth or so, as an optimizer step would."""
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.model.named_parameters():
            if not names or name in names:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.01)

    @torch.no_grad()
    def logprobs(self, ids: Sequence[int], temperature: float = 1.0) -> list[float]:
        logits_LV = self.model(torch.tensor([list(ids)])).logits[0].float() / temperature
        logprobs_LV = logits_LV.log_softmax(-1)
        return [logprobs_LV[i, ids[i + 1]].item() for i in range(len(ids) - 1)]

    def stage(self, directory: Path, version: PolicyVersion) -> Manifest:
        return write_stage(directory, version, ((n, p.detach()) for n, p in self.model.named_parameters()))

    async def stage_weights(self, directory: Path, version: PolicyVersion, dtype: DType) -> Manifest:
        assert dtype is DType.FLOAT32
        return self.stage(directory, version)

    async def put_stage(self, manifest: Manifest) -> Manifest:
        return put_stage(manifest)

    async def probe_logprobs(self, ids: Sequence[int]) -> list[float]:
        return self.logprobs(ids)
