"""Losses, norms and ratios of whole runs, step by step, as they were when they were recorded."""

from pathlib import Path

import pytest

from tests.golden.curves import Curve, golden_model, read_curve, rloo_curve, sft_curve


def assert_equal(ours: Curve, recorded: Curve) -> None:
    assert ours.keys() == recorded.keys()
    for name, values in recorded.items():
        # Absolute for what is 0 but for rounding: the policy gradient's loss and the divergence at the first step.
        assert ours[name] == pytest.approx(values, rel=1e-4, abs=2e-6), f"{name}; meant? python -m tests.golden.record"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return golden_model(tmp_path_factory.mktemp("golden") / "model")


def test_sft_follows_its_golden_curve(model: Path, tmp_path: Path) -> None:
    curve = sft_curve(model, tmp_path)
    assert_equal(curve, read_curve("sft"))
    assert curve["train/loss"][-1] < 0.7 * curve["train/loss"][0]


def test_rloo_follows_its_golden_curve(model: Path) -> None:
    curve = rloo_curve(model)
    assert_equal(curve, read_curve("rloo"))
    assert curve["train/ess"][0] == pytest.approx(1.0, abs=1e-6)
    assert max(curve["train/clip_fraction"]) > 0
