"""The cluster's serving presets, as vLLM's own parser and argument class take them."""

import json
from pathlib import Path
from typing import Any

import pytest

from actors.inference_config import InferencePoolConfig
from recipes.openthoughts.serving import POLICY, TEACHER, TEACHER_SAMPLING

CONFIGS = {
    "teacher": {"max_position_embeddings": 202_752, "dtype": "float16"},
    "policy": {"max_position_embeddings": 40_960, "dtype": "bfloat16"},
}
PRESETS = {"teacher": TEACHER, "policy": POLICY}
EXPECTED: dict[str, dict[str, Any]] = {
    "teacher": {
        "tensor_parallel_size": 4,
        "data_parallel_size": 4,
        "data_parallel_backend": "ray",
        "distributed_executor_backend": "ray",
        "enable_expert_parallel": True,
        "max_model_len": 131_072,
        "max_num_seqs": 51,
        "kv_cache_dtype": "fp8",
        "dtype": "float16",
        "logprobs_mode": "processed_logprobs",
        "scheduling_policy": "priority",
    },
    "policy": {
        "tensor_parallel_size": 1,
        "data_parallel_size": 1,
        "enable_expert_parallel": False,
        "max_model_len": 32_768,
        "max_num_seqs": 65,
        "dtype": "bfloat16",
        "logprobs_mode": "processed_logprobs",
        "enforce_eager": False,
    },
}


def resolved(name: str, directory: Path) -> dict[str, Any]:
    (directory / "config.json").write_text(json.dumps(CONFIGS[name]))
    return PRESETS[name].server.resolved_engine_args(directory)


@pytest.mark.parametrize(("preset", "num_gpus"), [(TEACHER, 16), (POLICY, 16)])
def test_both_take_sixteen_gpus(preset: InferencePoolConfig, num_gpus: int):
    assert preset.num_servers * preset.server.num_gpus == num_gpus
    assert TEACHER.server.spans_nodes and not POLICY.server.spans_nodes


def test_the_longest_reply_of_the_teacher_leaves_room_for_its_prompt():
    assert TEACHER.server.max_model_len - TEACHER_SAMPLING.max_tokens == 114_688


@pytest.mark.vllm
@pytest.mark.parametrize("name", PRESETS)
def test_vllms_own_parser_reads_the_resolved_arguments(name: str, tmp_path: Path):
    from vllm import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    given = resolved(name, tmp_path)
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    read = parser.parse_args(list(flags(given)))
    assert read is not None
    parsed = AsyncEngineArgs.from_cli_args(read)
    assert {key: getattr(parsed, key) for key in EXPECTED[name]} == EXPECTED[name]
    built = AsyncEngineArgs(**given)
    assert {key: getattr(built, key) for key in given} == {key: getattr(parsed, key) for key in given}


def flags(given: dict[str, Any]):
    for key, value in given.items():
        flag = "--" + key.replace("_", "-")
        if isinstance(value, bool):
            yield flag if value else f"--no-{flag[2:]}"
        else:
            yield f"{flag}={value}"
