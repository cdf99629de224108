"""Placement and memory of the 8B run, worked out by hand."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from recipes.openthoughts.placement import QWEN3_8B, cache_tokens, learner_memory_gb, load_widths, place


def test_qwen3_8b_has_8_19_billion_weights() -> None:
    """Ends 2 * 151,936 * 4,096; a layer 41,943,040 + 256 + 150,994,944 + 8,192; 36 of them, and the last norm."""
    assert QWEN3_8B.layer_parameters == 192_946_432
    assert QWEN3_8B.num_parameters == 1_244_659_712 + 36 * 192_946_432 + 4_096 == 8_190_735_360
    assert replace(QWEN3_8B, tie_word_embeddings=True).num_parameters == 8_190_735_360 - 622_329_856


def test_a_token_keeps_147_456_bytes_of_keys_and_values() -> None:
    assert QWEN3_8B.cache_bytes_per_token == 2 * 36 * 8 * 128 * 2 == 147_456


def test_cache_tokens_are_what_weights_leave_free() -> None:
    """80 * 0.9 = 72 GB, less 4 reserved and 16.38147072 of weights: 51,618,529,280 / 147,456 = 350,060.8 tokens."""
    assert cache_tokens(QWEN3_8B, gpu_memory_gb=80, utilization=0.9) == 350_060
    assert cache_tokens(QWEN3_8B, gpu_memory_gb=16, utilization=0.9) == 0, "the weights alone do not fit"


def test_eight_ranks_share_what_one_would_hold() -> None:
    memory = learner_memory_gb(QWEN3_8B, num_ranks=8, max_tokens=32_768, chunk_tokens=512)
    assert memory["weights, gradients, moments"] == pytest.approx(16 * 8.190735360 / 8)
    assert memory["kept activations"] == pytest.approx(2 * 32_768 * 4_096 * 36 / 1e9)
    assert memory["recomputed layer"] == pytest.approx(4 * 32_768 * (6 * 4_096 + 4 * 12_288) / 1e9)
    assert memory["logits"] == pytest.approx(512 * 151_936 * 10 / 1e9)


@pytest.mark.parametrize(
    ("gpus_per_node", "expected"),
    [
        (8, ["node 0: rank 0-7", "node 1: server 0-7", "node 2: server 8-15"]),
        (12, ["node 0: rank 0-7, server 0-3", "node 1: server 4-15"]),
    ],
)
def test_ranks_come_first_on_as_few_nodes_as_can_be(gpus_per_node: int, expected: list[str]) -> None:
    assert place(8, 16, gpus_per_node=gpus_per_node) == expected


def test_widths_are_read_from_a_config_and_what_it_lacks_is_named(tmp_path: Path) -> None:
    values = asdict(QWEN3_8B)
    (tmp_path / "config.json").write_text(json.dumps(values | {"model_type": "qwen3"}))
    assert load_widths(tmp_path) == QWEN3_8B
    del values["head_dim"]
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(ValueError, match="lacks head_dim"):
        load_widths(tmp_path)
