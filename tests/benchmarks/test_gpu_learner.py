"""What the GPU benchmark measures is the learner's path, and it needs torch and numpy alone."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks.qwen3 import Qwen3
from learners.attention import packed_layout
from learners.shape import ModelShape

SHAPE = ModelShape(
    vocabulary=50,
    hidden=32,
    intermediate=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    is_tied=True,
)
WITHOUT = """
import sys
for name in "transformers ray vllm msgpack safetensors tyro pyarrow peft tokenizers blake3".split():
    sys.modules[name] = None
from benchmarks.gpu_learner import main
main()
"""


@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_it_computes_what_transformers_qwen3_computes(is_checkpointed: bool) -> None:
    config = Qwen3Config(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    )
    theirs, ours = Qwen3ForCausalLM(config), Qwen3(SHAPE, is_checkpointed=is_checkpointed)
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    assert ours.load_state_dict(theirs.state_dict()).missing_keys == []
    ids = torch.arange(9)[None]
    expected = theirs.model(input_ids=ids, use_cache=False).last_hidden_state
    found = ours.model(input_ids=ids, position_ids=ids, layout=packed_layout([9])).last_hidden_state
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    for hidden in (found, expected):
        hidden.square().sum().backward()
    by_name = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        gradient, other = parameter.grad, by_name[name].grad
        assert gradient is not None and other is not None
        assert float((gradient - other).norm() / other.norm()) < 1e-5, name


@pytest.mark.slow
def test_it_runs_with_nothing_installed_but_torch_and_numpy(tmp_path: Path) -> None:
    cases = ["correctness", "small", "small-of-8-ranks", "8b"]
    command = [sys.executable, "-c", WITHOUT, "--out", str(tmp_path / "out.json"), "--cases", *cases]
    subprocess.run([*command, "--context", "64", "--steps", "1", "--budget-s", "100"], check=True, timeout=110)
    result = json.loads((tmp_path / "out.json").read_text())
    assert result["cases"]["correctness"]["loss_relative_error"] < 1e-3
    assert result["cases"]["correctness"]["gradient_relative_error_worst"] < 0.1
    assert result["cases"]["small"]["packed"]["lengths"] == [32, 16, 8, 4, 4]
    assert result["cases"]["small"]["one_sample"]["tokens_per_s"] > 0
    assert "skipped" in result["cases"]["8b"]
    assert set(result["figures"]) >= {"mfu_small", "loss_relative_error"}
