"""The feed gives every demonstration once a pass, and the same batch for the same step."""

import itertools

import pytest

from learners.plan import SizedSample
from recipes.demonstrations import Demonstration
from recipes.feed import Feed
from trajectories.handle import Location


def demonstrations(number: int) -> list[Demonstration]:
    return [
        Demonstration(
            sample=SizedSample(location=Location(segment="a", offset=offset, length=1), num_tokens=2, num_trained=1),
            family="",
        )
        for offset in range(number)
    ]


def offsets(feed: Feed, start: int, num_batches: int) -> list[list[int]]:
    return [
        [sample.location.offset for sample in batch] for batch in itertools.islice(feed.batches(start), num_batches)
    ]


def test_a_pass_goes_on_into_the_next_within_a_batch() -> None:
    feed = Feed(demonstrations(3), 2, shuffle_seed=None)
    assert offsets(feed, 0, 4) == [[0, 1], [2, 0], [1, 2], [0, 1]]


@pytest.mark.parametrize("seed", [None, 0, 7])
def test_batches_from_the_middle_are_those_of_the_whole(seed: int | None) -> None:
    feed = Feed(demonstrations(5), 3, shuffle_seed=seed)
    assert offsets(feed, 4, 5) == offsets(feed, 0, 9)[4:]


def test_each_shuffled_pass_holds_everything_once_in_an_order_of_its_own() -> None:
    (first,), (second,) = (offsets(Feed(demonstrations(8), 8, shuffle_seed=1), k, 1) for k in (0, 1))
    assert sorted(first) == sorted(second) == list(range(8))
    assert first != second


def test_steps_end_with_the_data_or_the_limit() -> None:
    feed = Feed(demonstrations(10), 4, shuffle_seed=0)
    assert feed.num_steps(epochs=3.0, max_steps=None) == 8
    assert feed.num_steps(epochs=3.0, max_steps=5) == 5
    assert feed.num_steps(epochs=None, max_steps=None) is None
