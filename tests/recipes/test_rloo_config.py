"""What RLOO hands its learners: a schedule that ends with the run, and a reference only for a loss that needs one."""

from dataclasses import replace
from pathlib import Path

import pytest

from learners.config import LearnerConfig, LossConfig, Schedule
from recipes import rloo, rloo_parts

MODEL = Path("/models/start")


def test_a_schedule_ends_with_the_run() -> None:
    learner = LearnerConfig(schedule=Schedule.COSINE, warmup_ratio=0.1)
    resolved = rloo_parts._learner_config(rloo.Config(steps=50, learner=learner), MODEL)
    assert (resolved.total_steps, resolved.warmup_steps) == (50, 5)


@pytest.mark.parametrize(
    ("kl_coef", "named", "expected"),
    [(0.0, None, None), (0.0, Path("/other"), None), (0.1, None, MODEL), (0.1, Path("/other"), Path("/other"))],
)
def test_a_penalty_compares_with_the_policy_named_or_the_one_the_run_starts_from(
    kl_coef: float, named: Path | None, expected: Path | None
) -> None:
    config = rloo.Config(loss=LossConfig(kl_coef=kl_coef), learner=LearnerConfig(reference=named))
    assert rloo_parts._learner_config(config, MODEL) == replace(config.learner, reference=expected)
