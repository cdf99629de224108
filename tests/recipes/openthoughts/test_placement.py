"""Placement and caches of the 8B run, worked out by hand."""

import pytest

from learners.shape import load_shape
from recipes.openthoughts.placement import cache_tokens, place

QWEN3_8B = load_shape("qwen3-8b")


def test_a_token_keeps_147_456_bytes_of_keys_and_values() -> None:
    assert QWEN3_8B.cache_bytes_per_token == 2 * 36 * 8 * 128 * 2 == 147_456


def test_cache_tokens_are_what_weights_leave_free() -> None:
    """80 * 0.9 = 72 GiB, less 4 reserved, is 73,014,444,032 bytes; less 2 * 8,190,726,144 of weights, over 147,456."""
    assert QWEN3_8B.num_parameters == 8_190_726_144
    assert cache_tokens(QWEN3_8B, gpu_memory_gb=80, utilization=0.9) == (73_014_444_032 - 16_381_452_288) // 147_456
    assert cache_tokens(QWEN3_8B, gpu_memory_gb=16, utilization=0.9) == 0, "the weights alone do not fit"


@pytest.mark.parametrize(
    ("gpus_per_node", "expected"),
    [
        (8, ["node 0: rank 0-7", "node 1: server 0-7", "node 2: server 8-15"]),
        (12, ["node 0: rank 0-7, server 0-3", "node 1: server 4-15"]),
    ],
)
def test_ranks_come_first_on_as_few_nodes_as_can_be(gpus_per_node: int, expected: list[str]) -> None:
    assert place(8, 16, gpus_per_node=gpus_per_node) == expected
