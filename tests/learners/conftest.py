"""A tiny policy and stored Samples that learner tests share."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from learners.models import make_tiny_model
from learners.plan import SizedSample
from trajectories.samples import Sample
from trajectories.store import StoreWriter

CORPUS = [
    "sort the lines of apple.txt into berry.txt",
    "write the word lemon to melon.txt",
    "echo lemon > melon.txt",
    "sort apple.txt > berry.txt",
] * 20


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Sums are bit for bit repeatable on one thread, and threads of parallel test runs do not fight."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny", CORPUS, seed=0)


def make_samples(lengths: list[int], *, seed: int = 0, vocabulary: int = 200) -> list[Sample]:
    """Random Samples of which about 60% of the tokens are trained, at least one each."""
    rng = np.random.default_rng(seed)
    samples = []
    for length in lengths:
        mask = rng.random(length) < 0.6
        mask[0], mask[-1] = False, length > 1
        samples.append(
            Sample(
                ids=rng.integers(0, vocabulary, length).astype(np.int32),
                mask=mask,
                logprobs=np.where(mask, rng.normal(-5.3, 0.1, length), 0).astype(np.float32),
            )
        )
    return samples


def with_prefix(samples: list[Sample], length: int) -> list[Sample]:
    """The same Samples, all that are longer than `length` beginning with the same ids."""
    prefix = samples[0].ids[:length]
    return [
        replace(sample, ids=np.concatenate([prefix, sample.ids[length:]])) if len(sample.ids) > length else sample
        for sample in samples
    ]


def store_samples(directory: Path, samples: list[Sample]) -> list[SizedSample]:
    with StoreWriter(directory, "test") as writer:
        return [
            SizedSample(
                location=writer.append_sample(sample),
                num_tokens=len(sample.ids),
                num_trained=int(sample.mask.sum()),
            )
            for sample in samples
        ]
