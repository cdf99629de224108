"""What the load benchmarks make of what they timed, worked out by hand."""

import pytest

from benchmarks.async_loop import Bound, loop_figures
from benchmarks.control_plane import level_figures
from benchmarks.loop_probe import Tick, percentile


def test_percentiles_are_values_that_occurred() -> None:
    assert percentile([4.0, 1.0, 3.0, 2.0], 0.5) == 2.0
    assert percentile([float(value) for value in range(1, 101)], 0.99) == 99.0
    assert percentile([7.0], 0.99) == 7.0


def test_a_level_counts_what_lies_in_its_window_alone() -> None:
    """Two workers over 10 s: 40 and 60 rollouts alive, 2 and 3 s of processor time, 5,000 Turns."""
    watched = {
        "began": 100.0,
        "ended": 110.0,
        "num_turns": 5000,
        "server_cpu_s": 1.0,
        "driver_cpu_s": 0.5,
        "driver_ticks": [Tick(105.0, 0.002, 0, 1.0)],
        "driver_rss_gb": 0.2,
    }
    first = [Tick(99.0, 9.0, 9, 0.0), Tick(101.0, 0.01, 30, 1.0), Tick(109.0, 0.03, 50, 3.0), Tick(111.0, 9.0, 9, 9.0)]
    second = [Tick(102.0, 0.0, 60, 2.0), Tick(108.0, 0.02, 60, 5.0)]
    figures = level_figures(watched, [first, second])
    assert figures["in_flight"] == 40 + 60
    assert figures["turns_per_s"] == 500
    assert figures["driver_lag_ms_p99"] == pytest.approx(2)
    assert figures["worker_lag_ms_p99"] == pytest.approx(30)
    assert figures["cpu_ms_per_turn"] == pytest.approx(1e3 * (2 + 3 + 1 + 0.5) / 5000)


def test_the_bound_is_the_slowest_stage() -> None:
    assert Bound(generation_s=1.5, rollouts_s=0.7, learner_s=2.0).step_s == 2.0


def test_figures_compare_staleness_2_with_the_bound_and_with_0() -> None:
    def regime(bound_s: float, sync_s: float, async_s: float, wait: float) -> dict[str, object]:
        cells = {"0": {"step_s": sync_s, "wait_share": 0.5}, "2": {"step_s": async_s, "wait_share": wait}}
        return {"bound_s": bound_s, "cells": cells}

    figures = loop_figures({"latency_bound": regime(1.0, 2.2, 1.1, 0.9), "learner_bound": regime(2.0, 3.0, 2.1, 0.05)})
    assert figures == {
        "step_over_bound_staleness_2": pytest.approx(1.1),
        "async_over_sync_latency_bound": pytest.approx(2.0),
        "async_over_sync_learner_bound": pytest.approx(3.0 / 2.1),
        "trainer_wait_share": 0.05,
        "trainer_wait_share_sync": 0.5,
    }
