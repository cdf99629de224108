"""Ages of Groups and the weights they come to."""

from dataclasses import replace

from tests.trajectories.records import LOCATION, scored_group, version
from trajectories.handle import summarize
from trajectories.staleness import down_weight, oldest_version, staleness


def test_a_group_is_as_old_as_the_oldest_token_of_a_valid_member() -> None:
    handle = summarize(scored_group([1.0, 0.0, None], n=5), LOCATION)
    older = replace(handle.members[1], min_version=version(3))
    excluded = replace(handle.members[2], min_version=version(0))
    handle = replace(handle, members=(handle.members[0], older, excluded))
    assert oldest_version(handle) == version(3)
    assert staleness(handle, version(7)) == 4


def test_a_group_without_valid_tokens_has_no_age() -> None:
    handle = summarize(scored_group([None, None], n=2), LOCATION)
    assert oldest_version(handle) is None
    assert staleness(handle, version(9)) == 0


def test_weights_fall_harmonically_beyond_the_bound() -> None:
    handle = summarize(scored_group([1.0, 0.0], n=10), LOCATION)
    weights = [down_weight(handle, version(n), max_staleness=2) for n in (10, 12, 13, 14)]
    assert weights == [1.0, 1.0, 1 / 2, 1 / 3]
