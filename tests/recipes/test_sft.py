"""SFT goes on where it was interrupted, with the very losses it would have had; a real Learner, no Ray."""

import asyncio
import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from envs.renderer import load_renderer
from learners.config import LearnerConfig, Schedule
from learners.models import make_tiny_model
from recipes import sft
from recipes.demonstrations import Demonstrations
from recipes.feed import Feed
from recipes.looks import Looks, StopRule, Validation
from recipes.run import Run
from recipes.sft_progress import Progress
from tests.fakes.learner_group import InProcessLearnerGroup
from tests.learners.reference import PlainLearner
from trajectories.store import read_sample

WORDS = ("apple", "berry", "cherry", "lemon", "melon", "olive", "peach", "plum", "quince", "grape", "fig")
ROWS = [
    {"messages": [{"role": "user", "content": f"write {word}"}, {"role": "assistant", "content": f"echo {word}"}]}
    for word in WORDS
]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    corpus = [message["content"] for row in ROWS for message in row["messages"]] * 5
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny", corpus, seed=0)


@pytest.fixture
def config(tmp_path: Path) -> sft.Config:
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return sft.Config(
        run=tmp_path / "run",
        data=(data,),
        min_reward=None,
        epochs=3,
        batch_size=4,
        validation=Validation(num_demonstrations=3, every_steps=2),
        learner=LearnerConfig(lr=1e-2, schedule=Schedule.COSINE, warmup_ratio=0.3),
    )


async def start(config: sft.Config, model: Path, *, cancel_at: int | None = None) -> tuple[Progress, Demonstrations]:
    """One start of the run; `cancel_at` interrupts it while that step is under way."""
    task = asyncio.current_task()
    assert task is not None

    def before_step(step: int) -> None:
        if step == cancel_at:
            task.cancel()

    with Run.open(config.run, config, may_differ=sft.MAY_DIFFER) as run:
        demonstrations = await sft._render(config, model, run)
        held_back = config.stop.num_held_back + config.validation.num_demonstrations
        feed = Feed(demonstrations.items[held_back:], config.batch_size, shuffle_seed=config.shuffle_seed)
        learner = InProcessLearnerGroup(
            config.learner.for_run_of(feed.num_steps(config.epochs, config.max_steps)),
            model=model,
            store=config.run / "samples",
            before_step=before_step,
        )
        looks = Looks(config.stop, config.validation, demonstrations.items, learner, config.plan)
        return await sft.train(config, run, learner, feed, looks), demonstrations


async def interrupted(config: sft.Config, model: Path, *, at: int) -> None:
    task = asyncio.create_task(start(config, model, cancel_at=at))
    with pytest.raises(asyncio.CancelledError):
        await task


def curve(run: Path) -> dict[int, dict[str, float]]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {row.pop("step"): {k: v for k, v in row.items() if k not in ("time", "seconds")} for row in rows}


async def test_an_interrupted_run_has_the_loss_curve_of_one_that_was_not(config: sft.Config, model: Path) -> None:
    whole = replace(config, run=config.run.with_name("whole"))
    progress, _ = await start(whole, model)
    assert (progress.step, progress.ended_by) == (6, "epochs")  # 3 passes over 8 in batches of 4
    await interrupted(config, model, at=3)
    assert json.loads((config.run / "state.json").read_text())["step"] == 3
    await interrupted(config, model, at=4)
    config.data[0].unlink()  # what was rendered is what is trained
    progress, _ = await start(config, model)
    assert progress.step == 6
    assert curve(config.run) == curve(whole.run)
    assert len({row["train/loss"] for row in curve(whole.run).values()}) == 6
    assert [path.name for path in (config.run / "checkpoints").iterdir()] == ["000006"]


async def crashed(config: sft.Config, model: Path, *, at: int, saved_before: int | None) -> None:
    """One start, which ends as by a crash; before step `saved_before` it waits for the files of its checkpoint."""

    def before_step(step: int) -> None:
        while step == saved_before and not learner.learner.is_saved():
            time.sleep(0.005)
        if step == at:
            raise RuntimeError("power")

    with Run.open(config.run, config) as run, pytest.raises(RuntimeError, match="power"):
        demonstrations = await sft._render(config, model, run)
        feed = Feed(demonstrations.items[3:], config.batch_size, shuffle_seed=config.seed)
        learner = InProcessLearnerGroup(
            config.learner.for_run_of(6), model=model, store=config.run / "samples", before_step=before_step
        )
        looks = Looks(config.stop, config.validation, demonstrations.items, learner, config.plan)
        await sft.train(config, run, learner, feed, looks)
    learner.learner.finish_save()  # a thread of this process; a crash would have ended it


async def test_after_a_crash_a_run_repeats_the_steps_since_its_checkpoint(config: sft.Config, model: Path) -> None:
    config = replace(config, checkpoint_every=2)
    whole = replace(config, run=config.run.with_name("whole"), checkpoint_every=100)
    await start(whole, model)
    await crashed(config, model, at=4, saved_before=3)
    assert json.loads((config.run / "state.json").read_text())["step"] == 2
    await start(config, model)
    assert curve(config.run) == curve(whole.run)


async def test_after_a_crash_amid_a_checkpoint_a_run_goes_on_from_the_one_before(
    config: sft.Config, model: Path
) -> None:
    config = replace(config, checkpoint_every=2)
    whole = replace(config, run=config.run.with_name("whole"), checkpoint_every=100)
    await start(whole, model)
    await crashed(config, model, at=5, saved_before=3)
    assert json.loads((config.run / "state.json").read_text())["step"] == 2, "that of step 4 was whole, but not known"
    assert sorted(path.name for path in (config.run / "checkpoints").iterdir()) == ["000002", "000004"]
    await start(config, model)
    assert curve(config.run) == curve(whole.run)
    assert [path.name for path in (config.run / "checkpoints").iterdir()] == ["000006"]


async def test_validation_loss_is_the_token_mean_of_held_back_conversations(config: sft.Config, model: Path) -> None:
    frozen = replace(config, epochs=1, learner=LearnerConfig(lr=1e-12))
    _, demonstrations = await start(frozen, model)
    samples = [read_sample(config.run / "samples", item.sample.location) for item in demonstrations.items[:3]]
    plain = PlainLearner(model, lr=1.0)
    logprobs = torch.cat([plain.logprobs(sample) for sample in samples])
    looked = {step: row["validation/loss"] for step, row in curve(config.run).items() if "validation/loss" in row}
    assert looked == {2: pytest.approx(-logprobs.mean().item(), rel=1e-5)}


async def test_a_run_that_its_stop_rule_ended_stays_ended(config: sft.Config, model: Path) -> None:
    rule = StopRule(probability=1e-9, every_steps=2, num_demonstrations=2)
    stopping = replace(config, epochs=100, validation=Validation(), stop=rule)
    progress, _ = await start(stopping, model)
    assert (progress.step, progress.ended_by) == (2, "stop rule")
    again, _ = await start(stopping, model)
    assert (again.step, again.ended_by) == (2, "stop rule")
    assert list(curve(config.run)) == [1, 2]


async def test_a_time_limit_counts_all_starts_together_and_may_be_raised(config: sft.Config, model: Path) -> None:
    config = replace(config, epochs=1)
    limited = replace(config, max_seconds=1e-6)
    progress, _ = await start(limited, model)
    assert (progress.step, progress.ended_by) == (1, "max_seconds")
    assert (await start(limited, model))[0].step == 1
    assert (await start(config, model))[0].step == 2


def test_a_template_given_is_the_one_that_renders(config: sft.Config, model: Path, tmp_path: Path) -> None:
    template = tmp_path / "other.jinja"
    template.write_text((model / "chat_template.jinja").read_text().replace("<|end|>", "<|end|>\n"))
    rendered = load_renderer(model, template=template.read_text()).first("hi")
    assert rendered != load_renderer(model).first("hi")
    with pytest.raises(ValueError, match="is no file"):
        replace(config, template=tmp_path / "missing.jinja")
