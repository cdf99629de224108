import json
from pathlib import Path

import pytest

from actors.inference_config import DType, InferencePoolConfig, ServerConfig, Transport, check_model


def saved(tmp_path: Path, **config) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 4096} | config))
    (tmp_path / "model.safetensors").write_bytes(b"")
    return tmp_path


def test_a_model_path_that_does_not_exist_is_refused_with_the_remedy():
    with pytest.raises(ValueError, match="model path /nowhere does not exist: give a local directory"):
        check_model(Path("/nowhere"))


def test_a_directory_without_weights_is_refused(tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="has no weights"):
        check_model(tmp_path)


def test_auto_takes_the_number_format_of_the_saved_model(tmp_path: Path):
    args = ServerConfig().resolved_engine_args(saved(tmp_path, dtype="float32"))
    assert args["dtype"] == "float32" and args["logprobs_mode"] == "processed_logprobs"
    with pytest.raises(ValueError, match="names dtype 'float8': set the server's dtype"):
        ServerConfig().resolved_engine_args(saved(tmp_path, dtype="float8"))


def test_a_context_ends_where_the_model_has_no_more_positions(tmp_path: Path):
    model = saved(tmp_path, dtype="float32", max_position_embeddings=512)
    assert ServerConfig(max_model_len=2048).resolved_engine_args(model)["max_model_len"] == 512
    assert ServerConfig(max_model_len=300).resolved_engine_args(model)["max_model_len"] == 300


def test_engine_arguments_given_by_name_win(tmp_path: Path):
    config = ServerConfig(dtype=DType.BFLOAT16, engine_args={"block_size": 32, "max_num_seqs": 7})
    args = config.resolved_engine_args(saved(tmp_path))
    assert (args["block_size"], args["max_num_seqs"], args["dtype"]) == (32, 7, "bfloat16")


def test_a_gpu_server_spreads_over_its_gpus_and_leaves_the_cpu_settings_out(tmp_path: Path):
    config = ServerConfig(dtype=DType.BFLOAT16, tensor_parallel_size=2, num_gpus=2)
    assert "kv_cache_memory_bytes" not in config.resolved_engine_args(saved(tmp_path))
    of_cpus = {"OMP_NUM_THREADS", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"}
    assert not of_cpus & config.environment().keys() and of_cpus <= ServerConfig().environment().keys()
    with pytest.raises(ValueError, match=r"num_gpus must be 0 \(CPU\) or tensor_parallel_size=2 x .*, got 1"):
        ServerConfig(tensor_parallel_size=2, num_gpus=1)
    with pytest.raises(ValueError, match="pipeline and data parallelism need GPUs"):
        ServerConfig(data_parallel_size=2)


def test_an_adapter_gets_the_room_that_vllm_knows_beside_its_targets_alone(tmp_path: Path):
    args = ServerConfig(lora_rank=24, lora_targets=("q_proj",)).resolved_engine_args(saved(tmp_path, dtype="float32"))
    assert (args["max_lora_rank"], args["lora_target_modules"], args["max_loras"]) == (32, ["q_proj"], 1)
    with pytest.raises(ValueError, match="an adapter needs lora_targets"):
        ServerConfig(lora_rank=8)
    with pytest.raises(ValueError, match=r"lora_rank must be 0 \(no adapter\) to 512, got 513"):
        ServerConfig(lora_rank=513, lora_targets=("q_proj",))


def test_a_server_is_ready_for_its_transport_and_for_sleep(tmp_path: Path):
    model = saved(tmp_path, dtype="float32")
    nccl = ServerConfig(num_gpus=1, transport=Transport.NCCL).resolved_engine_args(model)
    assert nccl["weight_transfer_config"] == {"backend": "nccl"} and "enable_sleep_mode" not in nccl
    ipc = ServerConfig(num_gpus=1, transport=Transport.IPC, colocated=True)
    assert ipc.resolved_engine_args(model)["enable_sleep_mode"] is True
    assert ipc.environment()["VLLM_ALLOW_INSECURE_SERIALIZATION"] == "1"
    rdt = ServerConfig(num_gpus=1, transport=Transport.SHARDED_RDT)
    assert rdt.spans_nodes and rdt.resolved_engine_args(model)["distributed_executor_backend"] == "ray"
    on_cpu = ServerConfig(colocated=True)
    assert not {"enable_sleep_mode", "weight_transfer_config"} & set(on_cpu.resolved_engine_args(model))
    with pytest.raises(ValueError, match="a colocated server has one GPU"):
        ServerConfig(colocated=True, tensor_parallel_size=2)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [({"threads": 0}, "threads must be >= 1, got 0"), ({"kv_cache_gb": 0}, "kv_cache_gb must be > 0, got 0")],
)
def test_server_numbers_out_of_range_are_named(kwargs, message):
    with pytest.raises(ValueError, match=message):
        ServerConfig(**kwargs)


def test_pool_numbers_out_of_range_are_named():
    with pytest.raises(ValueError, match="num_servers must be >= 1, got 0"):
        InferencePoolConfig(num_servers=0)
