"""Packed Samples are computed as if each stood alone."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from learners.attention import packed_layout
from learners.config import LearnerConfig
from learners.model import PolicyNetwork, load_policy
from learners.packing import PackedBatch, WeightedSample, pack
from learners.process_group import init_process_group
from tests.learners.conftest import make_samples
from tests.learners.reference import PlainLearner
from trajectories.samples import Sample

LENGTHS = [33, 5, 64, 64, 2, 60, 17, 1]


def weighted(samples: list[Sample], weight: float = 1.0) -> list[WeightedSample]:
    return [WeightedSample(sample=sample, advantage=float(i), weight=weight) for i, sample in enumerate(samples)]


@pytest.fixture
def network(tiny_model: Path) -> PolicyNetwork:
    if not torch.distributed.is_initialized():
        init_process_group()
    return load_policy(LearnerConfig(chunk_tokens=50), tiny_model, world_size=1)


def test_layout_puts_like_lengths_together_and_pads_none_that_are_equal() -> None:
    layout = packed_layout([10, 10, 9, 4, 4])
    assert [(b.start, b.stop, b.num_samples, b.longest) for b in layout.buckets] == [(0, 29, 3, 10), (29, 37, 2, 4)]
    slots = layout.buckets[0].slots
    assert slots is not None and slots.tolist() == [*range(20), *range(20, 29)]
    assert layout.buckets[1].slots is None


def test_packing_lays_samples_longest_first_with_their_own_positions() -> None:
    short = Sample(ids=np.array([7, 8], np.int32), mask=np.array([False, True]), logprobs=np.array([0, -1], np.float32))
    long = Sample(
        ids=np.array([1, 2, 3], np.int32),
        mask=np.array([False, False, True]),
        logprobs=np.array([0, 0, -2], np.float32),
    )
    batch = pack(weighted([short, long], weight=0.5))
    assert batch.ids_T.tolist() == [1, 2, 3, 7, 8]
    assert batch.positions_T.tolist() == [0, 1, 2, 0, 1]
    assert batch.predictors_N.tolist() == [1, 3]
    assert batch.targets_N.tolist() == [3, 8]
    assert batch.behaviour_N.tolist() == [-2, -1]
    assert batch.members_N.tolist() == [1, 0]
    assert batch.advantages_N.tolist() == [1.0, 0.0]
    assert batch.weights_N.tolist() == [0.5, 0.5]


def test_packed_logprobs_equal_those_of_transformers_one_sample_at_a_time(
    network: PolicyNetwork, tiny_model: Path
) -> None:
    samples = make_samples(LENGTHS)
    batch = pack(weighted(samples))
    logprobs_N, _ = network(batch, 1.0)
    plain = PlainLearner(tiny_model, lr=1.0)
    for index, sample in enumerate(samples):
        ours = logprobs_N[batch.members_N == index]
        torch.testing.assert_close(ours, plain.logprobs(sample), rtol=0, atol=1e-5)


def test_a_sample_does_not_see_its_neighbours(network: PolicyNetwork) -> None:
    samples = make_samples([40, 40, 39])
    others = [samples[0], *make_samples([40, 39], seed=9)]

    def logprobs_of_first(batch: PackedBatch) -> torch.Tensor:
        with torch.no_grad():
            return network(batch, 1.0)[0][batch.members_N == 0]

    assert torch.equal(logprobs_of_first(pack(weighted(samples))), logprobs_of_first(pack(weighted(others))))


def test_no_samples_make_one_untrained_token(network: PolicyNetwork) -> None:
    batch = pack([])
    logprobs_N, entropy_N = network(batch, 1.0)
    assert logprobs_N.numel() == entropy_N.numel() == 0
    logprobs_N.sum().backward()


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lengths=st.lists(st.integers(2, 40), min_size=1, max_size=6))
def test_packed_equals_alone_for_any_lengths(network: PolicyNetwork, lengths: list[int]) -> None:
    samples = make_samples(lengths)
    with torch.no_grad():
        batch = pack(weighted(samples))
        packed_N, entropy_N = network(batch, 1.0)
        for index, sample in enumerate(samples):
            alone_N, alone_entropy_N = network(pack(weighted([sample])), 1.0)
            mine_N = batch.members_N == index
            torch.testing.assert_close(packed_N[mine_N], alone_N, rtol=0, atol=1e-5)
            torch.testing.assert_close(entropy_N[mine_N], alone_entropy_N, rtol=0, atol=1e-5)
