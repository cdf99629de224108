"""The ratios of the learner benchmark, by hand, and what its profile adds up."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from benchmarks import learner_profile, rloo_contenders
from benchmarks.learner import TRL_RLOO, TRL_SFT, figures
from benchmarks.sft_contenders import LENGTHS, MICRO_BATCH_TOKENS, make_samples
from envs.sampler import Completion, SamplingParams
from learners.models import make_tiny_model
from learners.plan import plan_batch
from trajectories.schema import PolicyVersion, VersionSpan


def test_figures_compare_with_the_fastest_trl_and_its_own_peak() -> None:
    results = {
        "sft/thresher": {"tokens_per_s": 300.0, "peak_mb": 900.0},
        "sft/thresher-checkpointed": {"tokens_per_s": 200.0, "peak_mb": 200.0},
        "sft/plain": {"tokens_per_s": 100.0, "peak_mb": 9000.0},
        "rloo/thresher": {"completions_per_s": 3.0},
    }
    rates = dict(zip(TRL_SFT, (150.0, 120.0, 200.0, 110.0), strict=True))
    peaks = dict(zip(TRL_SFT, (2000.0, 400.0, 1800.0, 500.0), strict=True))
    results |= {f"sft/{name}": {"tokens_per_s": rates[name], "peak_mb": peaks[name]} for name in TRL_SFT}
    results |= {
        f"rloo/{name}": {"completions_per_s": rate} for name, rate in zip(TRL_RLOO, (1, 0.5, 1.2, 1), strict=True)
    }
    assert figures(results) == pytest.approx(
        {
            "sft_speed_over_trl": 1.5,
            "sft_activation_peak_over_trl": 0.5,
            "sft_checkpointed_peak_over_trl": 0.5,
            "sft_speed_over_plain": 3.0,
            "rloo_completions_over_trl": 2.5,
        }
    )
    assert figures({}) == {}


def test_samples_fill_their_micro_batches_and_train_their_last_three_fifths() -> None:
    samples = make_samples(2, vocabulary=100)
    assert sum(LENGTHS) == MICRO_BATCH_TOKENS
    assert [len(sample.ids) for sample in samples] == [1024, 512, 256, 256] * 2
    assert samples[1].mask.sum() == 307 and samples[1].mask[-307:].all()


class Counting:
    """A Sampler whose replies are counted, so that they differ."""

    def __init__(self) -> None:
        self.num_asked = 0

    async def sample(
        self, prompt_ids: Sequence[int], params: SamplingParams, *, stop_ids: Sequence[int], key: str
    ) -> Completion:
        self.num_asked += 1
        version = PolicyVersion(lineage=0, n=0)
        spans = (VersionSpan(version=version, num_tokens=2),)
        return Completion(ids=(self.num_asked, 2), logprobs=(-1.0, -1.0), spans=spans, finish_reason="stop")


async def test_a_step_samples_one_group_a_prompt_and_every_group_can_be_trained(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "tiny", ["write the names of the files"], vocabulary_size=300)
    sampler = Counting()
    groups = await rloo_contenders._sample(sampler, model, tmp_path / "store", step=0)
    assert sampler.num_asked == 32 and len(groups) == 4
    rewards = [[member.reward for member in group.members] for group in groups]
    assert rewards == [[1.0, 0.0] * 4] * 4  # of 1 + 2, 2 + 2, 3 + 2 and so on
    assert plan_batch(groups, num_ranks=1, max_tokens=4096).num_tokens == 64


def test_a_profile_counts_prompts_once_and_its_parts_make_the_whole(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "tiny", ["write the names of the files"], vocabulary_size=300)
    samples = learner_profile.make_samples(300)
    replies = [int(sample.mask.sum()) for sample in samples]
    assert len(samples) == 32 and min(replies) >= 96 and max(replies) <= 128
    assert learner_profile.num_computed(samples) == sum(replies) + 4 * 37
    assert (samples[0].ids[:37] == samples[7].ids[:37]).all() and (samples[0].ids[:37] != samples[8].ids[:37]).any()
    found = learner_profile.measure(model, threads=torch.get_num_threads())
    parts = ("products_s", "attention_s", "other_s")
    assert all(found[part] > 0 for part in parts)
    assert sum(found[part] for part in parts) == pytest.approx(found["profiled_pass_s"])
