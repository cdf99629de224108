"""The flagship's dry run: what it prints, and what it refuses."""

import dataclasses

import pytest

from recipes.openthoughts.placement import QWEN3_8B
from recipes.openthoughts.rloo_8b import Config, describe, main


def test_the_paper_s_run_fits_on_24_gpus_of_80_gb() -> None:
    lines, problems = describe(Config(), QWEN3_8B)
    text = "\n".join(lines)
    assert problems == []
    assert "8 learner + 16 inference GPUs on 3 nodes of 8" in text
    assert "64 Groups x 8 = 512 rollouts, at most 16,777,216 tokens, 64 micro-batches a rank" in text
    assert "280 at once = 1.83 waves a step; up to 1,088 Groups ahead" in text, "512 / 280, and 17 * 64"
    assert "48 steps, 24,576 rollouts" in text
    assert "18 rollouts share one, so 19,447 tokens each" in text, "350,060 / 18"


async def test_a_dry_run_prints_and_starts_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert await main(Config(dry_run=True)) == {}
    assert "placement: 8 learner" in capsys.readouterr().out


async def test_what_does_not_fit_is_refused_with_its_remedy() -> None:
    small = Config(dry_run=True, gpu_memory_gb=40.0)
    with pytest.raises(ValueError, match=r"a learner GPU needs .* GB and has 40: raise learner.num_ranks"):
        await main(small)


def test_a_micro_batch_that_cannot_hold_a_rollout_is_refused() -> None:
    config = Config()
    short = dataclasses.replace(config, learner=dataclasses.replace(config.learner, max_tokens=16_384))
    _, problems = describe(short, QWEN3_8B)
    assert len(problems) == 1
    assert problems[0].startswith("learner.max_tokens=16384 is less than episode.context_tokens=32768: a whole rollout")


async def test_weights_need_a_disk_that_every_node_shares() -> None:
    with pytest.raises(ValueError, match=r"give --sync.directory"):
        await main(Config())
