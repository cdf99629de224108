"""Where a run's GPUs go and what fits on them: arithmetic on a config, for a dry run without a GPU.

Invariant: pure; nothing is loaded, started or measured. Bytes are those that the learner and the engine allocate by
design, so a plan is an estimate from below of what a job will show. Called by recipes/openthoughts/rloo_8b.py.
"""

import json
from dataclasses import dataclass
from pathlib import Path

GB = 1e9
BF16, FP32 = 2, 4
RESERVED_GB = 4.0
"""CUDA context, NCCL buffers and fragmentation of one GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Widths:
    """The widths of a decoder with gated MLPs and grouped key heads, as its config.json names them."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    tie_word_embeddings: bool = False

    @property
    def layer_parameters(self) -> int:
        """Weights of one layer: attention, norms of its heads, MLP and two norms."""
        query, kv = self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        attention = self.hidden_size * (2 * query + 2 * kv) + 2 * self.head_dim
        return attention + 3 * self.hidden_size * self.intermediate_size + 2 * self.hidden_size

    @property
    def num_parameters(self) -> int:
        """All weights."""
        ends = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        return ends + self.num_hidden_layers * self.layer_parameters + self.hidden_size

    @property
    def cache_bytes_per_token(self) -> int:
        """Keys and values of one token over all layers, bf16."""
        return 2 * self.num_hidden_layers * self.num_key_value_heads * self.head_dim * BF16


QWEN3_8B = Widths(
    vocab_size=151_936,
    hidden_size=4_096,
    intermediate_size=12_288,
    num_hidden_layers=36,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
)
"""From the published config.json of Qwen3-8B."""


def load_widths(directory: Path) -> Widths:
    """The widths in a model directory's config.json; ValueError names what it lacks."""
    path = directory / "config.json"
    values = json.loads(path.read_text())
    names = Widths.__dataclass_fields__
    missing = [name for name in names if name not in values and name != "tie_word_embeddings"]
    if missing:
        raise ValueError(f"{path} lacks {', '.join(missing)}: give the directory of a Qwen3 model")
    return Widths(**{name: values[name] for name in names if name in values})


def place(num_learners: int, num_servers: int, *, gpus_per_node: int) -> list[str]:
    """One line a node: which ranks and servers its GPUs hold. Ranks come first, on as few nodes as can be.

    8 ranks and 16 servers at 8 a node -> "node 0: rank 0-7", "node 1: server 0-7", "node 2: server 8-15".
    """
    if gpus_per_node < 1:
        raise ValueError(f"gpus_per_node must be >= 1, got {gpus_per_node}")
    tenants = [("rank", k) for k in range(num_learners)] + [("server", k) for k in range(num_servers)]
    lines: list[str] = []
    for node, begin in enumerate(range(0, len(tenants), gpus_per_node)):
        here = tenants[begin : begin + gpus_per_node]
        parts: list[str] = []
        for kind in ("rank", "server"):
            numbers = [number for each, number in here if each == kind]
            if numbers:
                parts.append(f"{kind} {numbers[0]}-{numbers[-1]}")
        lines.append(f"node {node}: {', '.join(parts)}")
    return lines


def learner_memory_gb(widths: Widths, *, num_ranks: int, max_tokens: int, chunk_tokens: int) -> dict[str, float]:
    """GB on each rank's GPU by component, with activation checkpointing.

    Shards of float32 weights, gradients and two moments (16 bytes a weight over all ranks); two gathered layers and the
    embedding and head in bf16; the bf16 input of every layer, and one layer recomputed with its gradients, each about 6
    hidden and 4 MLP widths a token; a chunk of logits in float32, twice, with its bf16 copy.
    """
    ends = widths.num_parameters - widths.num_hidden_layers * widths.layer_parameters
    layer_widths = 6 * widths.hidden_size + 4 * widths.intermediate_size
    num_bytes = {
        "weights, gradients, moments": 4 * FP32 * widths.num_parameters / num_ranks,
        "gathered weights": BF16 * (2 * widths.layer_parameters + ends),
        "kept activations": BF16 * max_tokens * widths.hidden_size * widths.num_hidden_layers,
        "recomputed layer": 2 * BF16 * max_tokens * layer_widths,
        "logits": chunk_tokens * widths.vocab_size * (2 * FP32 + BF16),
    }
    return {name: value / GB for name, value in num_bytes.items()} | {"reserved": RESERVED_GB}


def cache_tokens(widths: Widths, *, gpu_memory_gb: float, utilization: float) -> int:
    """Tokens whose keys and values fit on one server's GPU beside bf16 weights; 0 when the weights do not fit."""
    free = gpu_memory_gb * utilization - RESERVED_GB - BF16 * widths.num_parameters / GB
    return max(0, int(free * GB / widths.cache_bytes_per_token))
