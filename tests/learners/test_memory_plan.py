"""Memory from shapes alone, by hand on a small one and against published sizes."""

from dataclasses import replace

import pytest

from learners.memory_plan import GIB, MemoryRequest, host_memory_gb, plan_memory
from learners.shape import ModelShape, load_shape, parse_shape

SMALL = ModelShape(
    vocabulary=1000,
    hidden=10,
    intermediate=30,
    num_layers=4,
    num_heads=2,
    num_kv_heads=1,
    head_dim=5,
    is_tied=False,
)
REQUEST = MemoryRequest(shape=SMALL, num_gpus=2, micro_batch_tokens=100, chunk_tokens=8)


def test_parameters_by_hand() -> None:
    assert SMALL.layer_parameters == 10 * 5 * (2 + 2 + 1 + 1) + 3 * 10 * 30 + 2 * 10 == 1220
    assert SMALL.head_parameters == 2 * 1000 * 10 + 10
    assert SMALL.num_parameters == 4 * 1220 + 20_010
    assert replace(SMALL, is_tied=True).head_parameters == 10_010


@pytest.mark.parametrize(
    ("name", "billions"), [("qwen3-0.6b", 0.596), ("qwen3-1.7b", 1.72), ("qwen3-8b", 8.19), ("qwen3-32b", 32.76)]
)
def test_known_shapes_have_the_published_numbers_of_parameters(name: str, billions: float) -> None:
    assert load_shape(name).num_parameters / 1e9 == pytest.approx(billions, rel=2e-3)


def test_operations_by_hand() -> None:
    layers, head = 6 * 4 * 1220 * 30, 6 * 1000 * 10 * 7
    attention = 6 * 4 * 2 * 5 * (20**2 + 10**2)
    assert SMALL.flops((20, 10), num_trained=7) == layers + head + attention


def test_components_by_hand() -> None:
    found = {name: value * GIB for name, value in plan_memory(REQUEST).items()}
    assert found["weights"] == pytest.approx(4 * 24_890 / 2)
    assert found["gradients"] == pytest.approx(4 * 24_890 / 2)
    assert found["optimizer"] == pytest.approx(8 * 24_890 / 2)
    assert found["gathered weights"] == pytest.approx(2 * (2 * 1220 + 20_010))
    assert found["gathered gradients"] == pytest.approx(6 * 20_010)
    assert found["logits"] == pytest.approx(8 * 1000 * 10 + 4 * 1000 * 10)
    layer = 100 * (2 * 10 * 10 + 5 * (3 * 10 + 3 * 2) + 4 * 30 * 2)
    assert found["activations"] == pytest.approx(4 * 100 * 10 * 2 + 2 * layer)
    unchecked = plan_memory(replace(REQUEST, activation_checkpointing=False))
    assert unchecked["activations"] * GIB == pytest.approx(4 * layer)


def test_sharing_sequences_halves_activations_and_offload_moves_shards_to_the_host() -> None:
    before = plan_memory(REQUEST)
    assert plan_memory(replace(REQUEST, sequence_parallel=2))["activations"] == before["activations"] / 2
    offloaded = replace(REQUEST, cpu_offload=True)
    after = plan_memory(offloaded)
    shards = ("weights", "gradients", "optimizer")
    assert [after[name] for name in shards] == [0.0, 0.0, 0.0]
    assert host_memory_gb(offloaded) == pytest.approx(sum(before[name] for name in shards))
    assert host_memory_gb(REQUEST) == 0.0


def test_adapters_need_gradients_and_moments_for_themselves_only() -> None:
    adapted = plan_memory(replace(REQUEST, lora_rank=2))
    num_adapters = 4 * 2 * (2 * 20 + 2 * 15 + 3 * 40)
    assert adapted["gradients"] * GIB == pytest.approx(4 * num_adapters / 2)
    assert adapted["weights"] == plan_memory(REQUEST)["weights"]


def test_a_shape_that_is_not_there_and_another_family_are_refused() -> None:
    with pytest.raises(ValueError, match=r"no model 'gpt-9': give one of qwen3-0\.6b, qwen3-1\.7b"):
        load_shape("gpt-9")
    with pytest.raises(ValueError, match=r"c\.json is of type 'gemma2'"):
        parse_shape({"model_type": "gemma2"}, source="c.json")
    with pytest.raises(ValueError, match="sequence_parallel=3 must divide the 2 GPUs"):
        replace(REQUEST, sequence_parallel=3)
