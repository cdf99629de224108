"""Packed Samples are computed as if each stood alone."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from learners import packing
from learners.attention import packed_layout
from learners.config import LearnerConfig
from learners.model import PolicyNetwork, full_tensor, load_policy
from learners.packing import PackedBatch, WeightedSample, pack
from learners.process_group import init_process_group
from tests.learners.conftest import make_samples, with_prefix
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


def sample_of(ids: list[int], mask: list[int]) -> Sample:
    trained = np.array(mask, np.bool_)
    return Sample(ids=np.array(ids, np.int32), mask=trained, logprobs=np.where(trained, np.float32(-1), np.float32(0)))


def test_a_common_prefix_is_packed_once_by_hand() -> None:
    """A prompt 1 2 with two replies, of which one goes on after a token that both have; and a stranger."""
    first, second = sample_of([1, 2, 3, 4], [0, 0, 1, 1]), sample_of([1, 2, 3, 5, 6], [0, 0, 0, 0, 1])
    batch = pack(weighted([first, second, sample_of([9, 2], [0, 1])]))
    assert batch.ids_T.tolist() == [1, 2, 3, 4, 5, 6, 9, 2]
    assert batch.positions_T.tolist() == [0, 1, 2, 3, 3, 4, 0, 1]
    assert batch.layout.lengths == (5, 4, 2)
    shared = batch.layout.shared
    assert shared is not None and shared.sources.tolist() == [0, 1, 2, 4, 5, 0, 1, 2, 3, 6, 7]
    assert shared.firsts.tolist() == [0, 1, 2, 8, 3, 4, 9, 10] and shared.repeats.tolist() == [5, 6, 7]
    assert batch.targets_N.tolist() == [6, 3, 4, 2]
    assert batch.predictors_N.tolist() == [4, 1, 2, 6]
    assert batch.members_N.tolist() == [1, 0, 0, 2]


def test_a_prefix_too_short_to_pay_is_not_shared() -> None:
    samples = with_prefix(make_samples([64, 64]), 4)
    batch = pack(weighted(samples))
    assert batch.layout.shared is None and batch.ids_T.numel() == 128


def test_what_samples_share_is_attended_whole_and_its_gradients_add_up() -> None:
    layout = packed_layout([3, 3], sources=torch.tensor([0, 1, 2, 0, 1, 3]))
    shared = layout.shared
    assert shared is not None
    packed = torch.arange(4.0)[:, None].requires_grad_()
    whole = shared.unfold(packed)
    assert whole[:, 0].tolist() == [0, 1, 2, 0, 1, 3]
    assert torch.equal(shared.fold(whole), packed)
    (whole * torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0, 32.0])[:, None]).sum().backward()
    assert packed.grad is not None and packed.grad[:, 0].tolist() == [9, 18, 4, 32]


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    ids=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=1, max_size=6),
    prefix=st.integers(0, 20),
    seed=st.integers(0, 99),
)
def test_shared_prefixes_change_no_number_and_no_gradient(
    network: PolicyNetwork, monkeypatch: pytest.MonkeyPatch, ids: list[list[int]], prefix: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    samples = []
    for own in ids:
        mask = rng.random(prefix + len(own)) < 0.5
        mask[0] = False
        samples.append(sample_of([7] * prefix + own, list(mask)))

    def computed(shared_min: float) -> tuple[PackedBatch, list[torch.Tensor]]:
        monkeypatch.setattr(packing, "SHARED_MIN", shared_min)
        network.zero_grad()
        batch = pack(weighted(samples, weight=0.1))
        logprobs_N, entropy_N = network(batch, 0.7)
        (torch.dot(logprobs_N, batch.advantages_N * batch.weights_N) + entropy_N.sum()).backward()
        gradients = [weight.grad for _, weight in network.named_weights() if weight.grad is not None]
        return batch, [logprobs_N, entropy_N, *map(full_tensor, gradients)]

    unshared, alone = computed(2.0)
    batch, together = computed(0.0)
    assert unshared.layout.shared is None
    assert batch.ids_T.numel() == len({tuple(s.ids[: n + 1]) for s in samples for n in range(len(s.ids))})
    for ours, theirs in zip(together, alone, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
