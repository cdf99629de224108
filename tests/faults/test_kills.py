"""Kills in CI: a short selection; `make faults` kills every part at random moments."""

from pathlib import Path

import pytest

from tests.faults.bed import HARVEST, RLOO, Victim, run_with_kill

pytestmark = [pytest.mark.ray, pytest.mark.sandbox, pytest.mark.timeout(400)]


@pytest.mark.parametrize("victim", [Victim.DRIVER, Victim.ROLLOUT_WORKER])
def test_a_killed_harvest_ends_with_each_task_played_once(victim: Victim, tmp_path: Path) -> None:
    ended = run_with_kill((*HARVEST, "--limit", "24"), tmp_path / "run", victim, after_groups=6)
    assert (ended.findings, ended.summary["harvested"], ended.summary["finished"]) == (0, 24, True)
    if victim is Victim.ROLLOUT_WORKER:
        assert "rollout_workers" in ended.events and ended.num_starts == 1


@pytest.mark.vllm
@pytest.mark.exhaustive
@pytest.mark.parametrize("victim", [each for each in Victim if each not in (Victim.NODE, Victim.JOB)])
def test_a_killed_training_run_takes_all_its_steps_and_its_books_agree(victim: Victim, tmp_path: Path) -> None:
    ended = run_with_kill((*RLOO, "--steps", "5"), tmp_path / "run", victim, after_groups=10)
    assert (ended.findings, ended.summary["rl_steps"]) == (0, 5)
    if victim is Victim.LEARNER_RANK:
        assert "learner restored" in ended.events and ended.summary["lineages"] == 2
