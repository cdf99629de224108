"""ModelShape: the widths of a Llama-like model, read from a config.json, and what follows from them by arithmetic.

Invariant: no weights, no torch, no transformers. Shapes of Qwen3 models, from their published configs, lie in
learners/shapes/. Called by learners/memory_plan.py, recipes/doctor.py and benchmarks/gpu_learner.py.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SHAPES = Path(__file__).resolve().parent / "shapes"
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Widths of a decoder with gated MLPs and grouped key heads."""

    vocabulary: int
    hidden: int
    intermediate: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    is_tied: bool
    """The head is the embedding."""

    @property
    def layer_parameters(self) -> int:
        """Weights of one layer's matrices and norms; biases and norms of heads, a millionth of them, are left out."""
        attention = self.hidden * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)
        return attention + 3 * self.hidden * self.intermediate + 2 * self.hidden

    @property
    def head_parameters(self) -> int:
        """Weights outside the layers: embedding, head where it is another, and the last norm."""
        return self.vocabulary * self.hidden * (1 if self.is_tied else 2) + self.hidden

    @property
    def num_parameters(self) -> int:
        """All weights."""
        return self.num_layers * self.layer_parameters + self.head_parameters

    def flops(self, lengths: tuple[int, ...], num_trained: int) -> float:
        """Floating-point operations of one forward and backward without recomputation.

        6 per weight and token in the layers, 6 per weight of the head and trained token, and for attention
        6 * 2 * heads * head_dim * L^2 / 2 a layer (scores and sums, causal half) for a Sample of L tokens.
        """
        num_tokens = sum(lengths)
        layers = 6 * self.num_layers * self.layer_parameters * num_tokens
        head = 6 * self.vocabulary * self.hidden * num_trained
        attention = 6 * self.num_layers * self.num_heads * self.head_dim * sum(length**2 for length in lengths)
        return float(layers + head + attention)


def load_shape(name: str) -> ModelShape:
    """The shape of a name in learners/shapes/ ("qwen3-8b"), a config.json, or a model directory."""
    known = {path.stem: path for path in SHAPES.glob("*.json")}
    path = known.get(name.lower()) or Path(name)
    if path.is_dir():
        path = path / "config.json"
    if not path.is_file():
        raise ValueError(f"no model {name!r}: give one of {', '.join(sorted(known))}, a config.json or its directory")
    return parse_shape(json.loads(path.read_text()), source=str(path))


def parse_shape(config: Mapping[str, Any], *, source: str) -> ModelShape:
    """The shape that a config.json describes; ValueError for another family of models."""
    if config.get("model_type") not in FAMILIES:
        raise ValueError(
            f"{source} is of type {config.get('model_type')!r}; memory is planned for {', '.join(FAMILIES)}"
        )
    heads = config["num_attention_heads"]
    return ModelShape(
        vocabulary=config["vocab_size"],
        hidden=config["hidden_size"],
        intermediate=config["intermediate_size"],
        num_layers=config["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        is_tied=bool(config.get("tie_word_embeddings", False)),
    )
