"""Policies made without a hub load in transformers, and the tiny one's tokens are what its makers promise."""

import filecmp
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from learners.config import LearnerConfig
from learners.learner import Learner
from learners.models import TERMINUS_FRAMES, load_smollm2, make_tiny_model
from tests.learners.conftest import CORPUS, make_samples
from tests.learners.test_learner import SFT, sft_plan

REPLY = '{"analysis":"","plan":"","commands":[{"keystrokes":"sort apple.txt > berry.txt\\n"}]}'


def test_the_tiny_model_is_a_qwen3_of_two_layers_that_transformers_loads(tiny_model: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    assert type(model).__name__ == "Qwen3ForCausalLM"
    assert model.config.num_hidden_layers == 2 and model.config.max_position_embeddings >= 1024
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.dtype == torch.float32
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    assert model.config.eos_token_id == tokenizer.convert_tokens_to_ids("<|end|>") == tokenizer.eos_token_id
    assert model.config.vocab_size == len(tokenizer)


def test_words_and_frames_are_single_tokens_and_text_survives(tiny_model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokens = [tokenizer.decode([token]) for token in tokenizer(REPLY).input_ids]
    assert tokens == [TERMINUS_FRAMES[0], "sort", " apple", ".txt", " >", " berry", ".txt", TERMINUS_FRAMES[3]]
    for text in (REPLY, "naïve \t ünïcode\n\n  x=$((1+2)) 🎉", "<|user|>a<|end|>"):
        assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_the_tiny_chat_template_is_prefix_stable(tiny_model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
    prompt = tokenizer.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
    assert prompt == "<|user|>hi<|end|><|assistant|>"
    assert tokenizer.apply_chat_template(messages, tokenize=False) == prompt + "yo<|end|>"


def test_the_same_seed_gives_the_same_bytes(tiny_model: Path, tmp_path: Path) -> None:
    again = make_tiny_model(tmp_path / "again", CORPUS, seed=0)
    names = sorted(path.name for path in tiny_model.iterdir())
    assert filecmp.cmpfiles(tiny_model, again, names, shallow=False)[0] == names
    other = make_tiny_model(tmp_path / "other", CORPUS, seed=1)
    assert not filecmp.cmp(tiny_model / "model.safetensors", other / "model.safetensors", shallow=False)


def test_a_saved_policy_loads_in_transformers_with_its_tokenizer(tiny_model: Path, tmp_path: Path) -> None:
    learner = Learner(LearnerConfig(lr=1e-2), model=tiny_model)
    learner.forward_backward(sft_plan(tmp_path / "store", make_samples([30])).ranks[0], SFT, tmp_path / "store")
    learner.optim_step()
    learner.save_pretrained(tmp_path / "saved")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    ids = list(range(12))
    log_probs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    expected = log_probs[np.arange(11), ids[1:]].tolist()
    assert learner.logprobs(ids) == pytest.approx(expected, abs=1e-5)
    saved = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert saved(REPLY).input_ids == AutoTokenizer.from_pretrained(tiny_model)(REPLY).input_ids
    assert saved.chat_template == AutoTokenizer.from_pretrained(tiny_model).chat_template


@pytest.mark.slow
def test_smollm2_from_its_package_answers_a_question(tmp_path: Path) -> None:
    directory = load_smollm2(tmp_path / "smollm2")
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = LlamaForCausalLM.from_pretrained(directory)
    assert model.dtype == torch.bfloat16
    messages = [{"role": "user", "content": "What is the capital of France? Answer with one word."}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")["input_ids"]
    reply = tokenizer.decode(model.generate(ids, max_new_tokens=8, do_sample=False)[0, ids.shape[1] :])  # pyright: ignore[reportAttributeAccessIssue]
    assert "Paris" in reply
    modified = (directory / "model.safetensors").stat().st_mtime_ns
    assert load_smollm2(directory) == directory
    assert (directory / "model.safetensors").stat().st_mtime_ns == modified
