"""Alarms over histories short enough to work out by hand."""

import pytest

from recipes.alarms import AlarmConfig, raised_alarms, trailing_means

TWO = AlarmConfig(window=2, reward_drop=0.5, entropy_floor=0.1, length_factor=3.0)


def history(metric: str, *values: float) -> list[dict[str, float]]:
    return [{metric: value} for value in values]


def test_trailing_means_of_two() -> None:
    assert trailing_means(history("x", 1, 2, 3, 4), "x", 2) == [1.5, 2.5, 3.5]
    assert trailing_means(history("x", 1), "x", 2) == []
    assert trailing_means([{"x": 1.0}, {}, {"x": 3.0}], "x", 2) == [2.0], "a step without the metric is skipped"


def test_a_reward_below_half_of_its_best_mean_is_a_collapse() -> None:
    rising = history("reward_mean", 0.2, 0.4, 0.6)  # means 0.3, 0.5
    assert raised_alarms(rising, TWO) == {}
    falling = [*rising, *history("reward_mean", 0.1, 0.3)]  # means 0.35, 0.2; half of the best, 0.5, is 0.25
    assert raised_alarms(falling[:-1], TWO) == {}
    assert raised_alarms(falling, TWO) == {"reward_collapse": "reward_mean is 0.2 over 2 steps, against 0.5 before"}


@pytest.mark.parametrize(
    ("name", "metric", "well", "wrong"),
    [
        ("entropy_collapse", "train/entropy", (2.0, 2.0, 0.0, 0.41), (2.0, 2.0, 0.0, 0.39)),  # the floor is 0.2
        ("length_explosion", "trained_tokens_mean", (10, 10, 30, 30), (10, 10, 30, 31)),  # the ceiling is 30
    ],
)
def test_what_leaves_the_range_of_its_first_mean_is_alarming(
    name: str, metric: str, well: tuple[float, ...], wrong: tuple[float, ...]
) -> None:
    assert raised_alarms(history(metric, *well), TWO) == {}
    assert list(raised_alarms(history(metric, *wrong), TWO)) == [name]


def test_the_alarm_of_a_sync_is_an_alarm_of_the_run() -> None:
    syncs = [{"sync/probe_alarm": 0.0, "sync/probe_gap": 1e-6}, {"sync/probe_alarm": 1.0, "sync/probe_gap": 0.25}]
    assert raised_alarms(syncs[:1], TWO) == {}
    assert raised_alarms(syncs, TWO) == {"engine_learner_gap": "engine and learner differ by 0.25"}


def test_a_policy_that_never_solved_anything_does_not_collapse() -> None:
    assert raised_alarms(history("reward_mean", 0, 0, 0, 0), TWO) == {}


@pytest.mark.parametrize("wrong", [{"window": 0}, {"reward_drop": 1.0}, {"entropy_floor": 0.0}, {"length_factor": 1.0}])
def test_an_alarm_that_makes_no_sense_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        AlarmConfig(**wrong)  # pyright: ignore[reportArgumentType]
