"""Checkpoints resume bit for bit, and what is not a whole checkpoint of this model is refused by name."""

import shutil
from pathlib import Path

import pytest
import torch

from learners.checkpoint import COMPLETE, CheckpointError
from learners.config import LearnerConfig, LossConfig, LossKind, Schedule
from learners.learner import Learner
from learners.models import make_tiny_model
from learners.plan import RankPlan
from tests.learners.conftest import make_samples
from tests.learners.test_learner import sft_plan

SFT = LossConfig(kind=LossKind.CROSS_ENTROPY)
CONFIG = LearnerConfig(lr=1e-2, schedule=Schedule.COSINE, warmup_steps=2, total_steps=8)


def losses(learner: Learner, plan: RankPlan, store: Path, num_steps: int) -> list[float]:
    curve = []
    for _ in range(num_steps):
        curve.append(learner.forward_backward(plan, SFT, store)["train/loss"])
        learner.optim_step()
    return curve


def test_a_resumed_run_has_the_loss_curve_of_the_uninterrupted_one(tiny_model: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    plan = sft_plan(store, make_samples([30, 20, 40])).ranks[0]
    whole = Learner(CONFIG, model=tiny_model)
    losses(whole, plan, store, 3)
    whole.save(tmp_path / "checkpoint")
    rest = losses(whole, plan, store, 4)
    resumed = Learner(CONFIG, model=tiny_model)
    losses(resumed, plan, store, 1)
    resumed.load(tmp_path / "checkpoint")
    assert resumed.step == 3
    assert losses(resumed, plan, store, 4) == rest
    for (name, ours), (_, theirs) in zip(resumed.export_weights(), whole.export_weights(), strict=True):
        assert torch.equal(ours, theirs), name


def test_loading_restores_the_random_state(tiny_model: Path, tmp_path: Path) -> None:
    learner = Learner(CONFIG, model=tiny_model)
    learner.save(tmp_path / "checkpoint")
    drawn = torch.rand(3)
    learner.load(tmp_path / "checkpoint")
    assert torch.equal(torch.rand(3), drawn)


def test_a_torn_checkpoint_is_refused_by_name(tiny_model: Path, tmp_path: Path) -> None:
    learner = Learner(CONFIG, model=tiny_model)
    learner.save(tmp_path / "checkpoint")
    (tmp_path / "checkpoint" / COMPLETE).unlink()
    with pytest.raises(CheckpointError, match="checkpoint is not a complete checkpoint"):
        learner.load(tmp_path / "checkpoint")


def test_a_checkpoint_with_a_cut_file_is_refused_by_the_name_of_the_file(tiny_model: Path, tmp_path: Path) -> None:
    learner = Learner(CONFIG, model=tiny_model)
    learner.save(tmp_path / "checkpoint")
    data = next((tmp_path / "checkpoint").glob("*.distcp"))
    data.write_bytes(data.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=rf"checkpoint is torn: {data.name} has \d+ bytes instead of \d+"):
        learner.load(tmp_path / "checkpoint")


def test_a_save_in_the_background_holds_what_was_there_when_it_began(tiny_model: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    plan = sft_plan(store, make_samples([30, 20])).ranks[0]
    learner = Learner(CONFIG, model=tiny_model)
    losses(learner, plan, store, 2)
    before = learner.logprobs([3, 1, 4])
    learner.begin_save(tmp_path / "checkpoint")
    rest = losses(learner, plan, store, 2)
    learner.finish_save()
    resumed = Learner(CONFIG, model=tiny_model)
    resumed.load(tmp_path / "checkpoint")
    assert resumed.logprobs([3, 1, 4]) == before
    assert losses(resumed, plan, store, 2) == rest


def test_a_save_in_the_background_that_fails_raises_when_it_is_waited_for(tiny_model: Path, tmp_path: Path) -> None:
    learner = Learner(CONFIG, model=tiny_model)
    learner.begin_save(tmp_path / "first")
    learner.finish_save()
    learner.finish_save()  # nothing to wait for
    (tmp_path / "second.old").write_text("in the way of the rename")
    (tmp_path / "second").mkdir()
    learner.begin_save(tmp_path / "second")
    for _ in range(2):  # who was interrupted after asking asks again
        with pytest.raises(CheckpointError, match="second"):
            learner.finish_save()
    (tmp_path / "second.old").unlink()
    learner.save(tmp_path / "second")
    assert learner.is_saved()


def test_a_directory_that_cannot_be_made_is_told_of_by_finish_too(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a directory")
    learner = Learner(CONFIG, model=tiny_model)
    learner.begin_save(tmp_path / "file" / "checkpoint")
    with pytest.raises(CheckpointError, match="Not a directory"):
        learner.finish_save()


def test_saving_again_replaces_the_checkpoint_and_leaves_nothing_beside_it(tiny_model: Path, tmp_path: Path) -> None:
    learner = Learner(CONFIG, model=tiny_model)
    learner.save(tmp_path / "checkpoint")
    learner.step = 5
    learner.save(tmp_path / "checkpoint")
    learner.step = 0
    learner.load(tmp_path / "checkpoint")
    assert learner.step == 5
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


def test_a_checkpoint_of_another_model_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    other = make_tiny_model(tmp_path / "other", ["a b c"], vocabulary_size=270)
    Learner(CONFIG, model=other).save(tmp_path / "checkpoint")
    with pytest.raises(CheckpointError, match="other names or shapes"):
        Learner(CONFIG, model=tiny_model).load(tmp_path / "checkpoint")


def test_a_checkpoint_without_the_moments_of_a_now_trained_parameter_is_refused(
    tiny_model: Path, tmp_path: Path
) -> None:
    frozen = Learner(LearnerConfig(freeze=("embed_tokens",)), model=tiny_model)
    store = tmp_path / "store"
    losses(frozen, sft_plan(store, make_samples([9])).ranks[0], store, 1)
    frozen.save(tmp_path / "checkpoint")
    with pytest.raises(CheckpointError, match="was `freeze` changed"):
        Learner(LearnerConfig(), model=tiny_model).load(tmp_path / "checkpoint")
    shutil.rmtree(tmp_path / "checkpoint")
