"""Adapters: only they are trained and saved; merged and alone they are the same model, for peft too."""

import json
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from learners.checkpoint import CheckpointError
from learners.config import LearnerConfig, LoraConfig, LossConfig, LossKind
from learners.learner import Learner
from tests.learners.conftest import make_samples
from tests.learners.test_learner import sft_plan

SFT = LossConfig(kind=LossKind.CROSS_ENTROPY)
CONFIG = LearnerConfig(lr=1e-2, lora=LoraConfig(rank=4, alpha=8, targets=("q_proj", "down_proj")))
PROBE = [3, 1, 4, 1, 5, 9]
Q_PROJ = "base_model.model.model.layers.1.self_attn.q_proj"


def trained(model: Path, store: Path, num_steps: int = 3) -> Learner:
    learner = Learner(CONFIG, model=model)
    plan = sft_plan(store, make_samples([30, 20])).ranks[0]
    for _ in range(num_steps):
        learner.forward_backward(plan, SFT, store)
        learner.optim_step()
    return learner


def test_a_new_adapter_changes_nothing(tiny_model: Path) -> None:
    plain, adapted = Learner(LearnerConfig(), model=tiny_model), Learner(CONFIG, model=tiny_model)
    assert adapted.logprobs(PROBE) == pytest.approx(plain.logprobs(PROBE), abs=1e-6)


def test_only_targets_move_and_merged_weights_have_hugging_face_names(tiny_model: Path, tmp_path: Path) -> None:
    before = dict(Learner(LearnerConfig(), model=tiny_model).export_weights())
    after = dict(trained(tiny_model, tmp_path).export_weights())
    assert after.keys() == before.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if "q_proj" in name or "down_proj" in name}


def test_the_merged_model_and_peft_with_the_adapter_answer_as_the_learner_does(
    tiny_model: Path, tmp_path: Path
) -> None:
    learner = trained(tiny_model, tmp_path)
    learner.save_pretrained(tmp_path / "merged")
    ids = torch.tensor([PROBE])
    base = AutoModelForCausalLM.from_pretrained(tiny_model)
    for model in (
        AutoModelForCausalLM.from_pretrained(tmp_path / "merged"),
        PeftModel.from_pretrained(base, str(tmp_path / "merged" / "adapter")),
    ):
        with torch.no_grad():
            log_probs = model(ids).logits[0].log_softmax(-1)
        expected = log_probs[torch.arange(5), ids[0, 1:]].tolist()
        assert learner.logprobs(PROBE) == pytest.approx(expected, abs=1e-5)


def test_the_adapter_directory_is_in_the_form_of_peft(tiny_model: Path, tmp_path: Path) -> None:
    trained(tiny_model, tmp_path, 1).save_adapter(tmp_path / "adapter")
    assert {path.name for path in (tmp_path / "adapter").iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["target_modules"]) == (4, 8, ["down_proj", "q_proj"])
    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert tensors[f"{Q_PROJ}.lora_A.weight"].shape == (4, 128)
    assert len(tensors) == 2 * 2 * 2  # layers, targets, A and B


def test_a_checkpoint_holds_adapters_alone_and_resumes_bit_for_bit(tiny_model: Path, tmp_path: Path) -> None:
    learner = trained(tiny_model, tmp_path / "store")
    learner.save(tmp_path / "checkpoint")
    size = sum(path.stat().st_size for path in (tmp_path / "checkpoint").iterdir())
    assert size < (tiny_model / "model.safetensors").stat().st_size / 2
    resumed = Learner(CONFIG, model=tiny_model)
    resumed.load(tmp_path / "checkpoint")
    assert resumed.logprobs(PROBE) == learner.logprobs(PROBE)
    with pytest.raises(CheckpointError, match="other names or shapes"):
        Learner(LearnerConfig(), model=tiny_model).load(tmp_path / "checkpoint")


def test_a_target_that_is_not_there_is_refused(tiny_model: Path) -> None:
    config = LearnerConfig(lora=LoraConfig(rank=4, targets=("c_attn",)))
    with pytest.raises(ValueError, match=r"lora\.targets names 'c_attn'"):
        Learner(config, model=tiny_model)


def test_an_adapter_on_the_head_is_refused() -> None:
    with pytest.raises(ValueError, match="not lm_head"):
        LoraConfig(rank=4, targets=("q_proj", "lm_head"))


def test_saving_an_adapter_without_one_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no adapter to save"):
        Learner(LearnerConfig(), model=tiny_model).save_adapter(tmp_path / "adapter")
