"""The SFT presets hold the paper's values, and answer --help without loading torch."""

import subprocess
import sys
from dataclasses import replace

import pytest

from envs.renderer import ChatRenderer
from learners.config import Precision, Schedule
from learners.optimizer import learning_rate
from recipes.openthoughts import sft_8b, sft_32b
from tests.envs.tokens import byte_tokenizer

NUM_ROWS = 94_334
"""Rows of OpenThoughts-Agent-SFT-100K."""


def test_the_8b_preset_holds_the_papers_values() -> None:
    config = sft_8b.Config()
    assert (config.epochs, config.batch_size, config.learner.max_tokens) == (7, 96, 32_768)
    learner = config.learner
    assert (learner.lr, learner.schedule, learner.betas) == (4e-5, Schedule.COSINE, (0.9, 0.98))
    assert (learner.weight_decay, learner.max_grad_norm, learner.precision) == (0.04, 1.0, Precision.BF16)
    assert (config.shuffle, config.min_reward, config.learners.num_ranks) == (False, None, 96)


def test_the_32b_preset_differs_in_its_run_and_gradient_norm_alone() -> None:
    small, large = sft_8b.Config(), sft_32b.Config()
    assert large.learner == replace(small.learner, max_grad_norm=1e-4)
    assert large.run != small.run
    assert large.epochs == small.epochs and large.template == small.template


def test_the_schedule_of_the_whole_run_by_hand() -> None:
    # 7 * 94,334 / 96 = 6,878.5: 6,879 steps, of which 688 warm up.
    learner = sft_8b.Config().learner.for_run_of(-(-7 * NUM_ROWS // 96))
    assert (learner.total_steps, learner.warmup_steps) == (6879, 688)
    assert learning_rate(learner, 687) == learning_rate(learner, 688) == 4e-5
    assert learning_rate(learner, 6879) < 1e-12


def test_the_template_keeps_thinking_and_renders_qwens_own_messages() -> None:
    template = sft_8b.TEMPLATE.read_text()
    renderer = ChatRenderer(tokenizer=byte_tokenizer(), template=template, special={})  # refuses one that rewrites
    said = [
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "<think>\nw\n</think>\n\na"},
        {"role": "user", "content": "v"},
    ]
    assert renderer.render_text(said, is_open=True) == (
        "<|im_start|>user\nu<|im_end|>\n<|im_start|>assistant\n<think>\nw\n</think>\n\na<|im_end|>\n"
        "<|im_start|>user\nv<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.slow
def test_importing_the_presets_loads_no_torch() -> None:
    code = (
        "import sys, recipes.openthoughts.sft_8b, recipes.openthoughts.sft_32b\n"
        "print(sorted({'torch', 'transformers', 'vllm'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
