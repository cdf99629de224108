"""The run directory: complete, resumable with the same config only, and by one process at a time."""

import asyncio
import json
import logging
import math
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from recipes import progress
from recipes.event_log import read_history
from recipes.progress import ProgressDisplay
from recipes.run import Run, finished_summary
from recipes.totals import Totals

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, kw_only=True)
class Config:
    steps: int = 3
    lr: float = 0.5


def _lines(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def _json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


def test_a_run_records_config_code_packages_and_hardware(tmp_path: Path):
    with Run.open(tmp_path / "run", Config()) as run:
        assert run.directory == tmp_path / "run"
        record = _json(run.directory / "config.json")
    assert record["config"] == {"steps": 3, "lr": 0.5}
    assert {"git", "packages", "hardware", "time", "restarts"} < record.keys()
    assert record["packages"]["torch"]


def test_metrics_are_on_disk_when_log_returns(tmp_path: Path):
    with Run.open(tmp_path, Config()) as run:
        run.log(1, {"loss": 0.25, "reward": 1})
        assert run.step == 1
        (line,) = _lines(tmp_path)
    assert line.pop("time") > 1e9
    assert line == {"step": 1, "loss": 0.25, "reward": 1.0}


def test_tensorboard_reads_the_same_metrics_back(tmp_path: Path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with Run.open(tmp_path, Config()) as run:
        for step in (1, 2):
            run.log(step, {"train/loss": 0.5 / step})
    events = EventAccumulator(str(tmp_path / "tb")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(1, 0.5), (2, 0.25)]


def test_the_history_of_a_run_is_the_last_line_of_each_step(tmp_path: Path):
    assert read_history(tmp_path) == [], "a new run has none"
    with Run.open(tmp_path, Config()) as run:
        run.log(1, {"reward": 0.1})
        run.log(2, {"reward": 0.2, "broken": float("nan")})
        run.log(1, {"reward": 0.3})
    assert read_history(tmp_path) == [(1, {"reward": 0.3}), (2, {"reward": 0.2})]


def test_a_value_that_is_not_finite_is_null_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING), Run.open(tmp_path, Config()) as run:
        run.log(7, {"loss": math.nan, "reward": 1.0})
    assert _lines(tmp_path)[0]["loss"] is None
    assert "step=7 not finite: loss is nan" in caplog.text
    with Run.open(tmp_path, Config()) as run, pytest.raises(ValueError, match="may not be named"):
        run.log(8, {"time": 1.0})


def test_summaries_are_merged(tmp_path: Path):
    with Run.open(tmp_path, Config()) as run:
        run.summary({"solved": 0.25, "where": tmp_path})
        run.summary({"solved": 0.5, "ci": (0.1, math.nan)})
    assert _json(tmp_path / "summary.json") == {"solved": 0.5, "where": str(tmp_path), "ci": [0.1, None]}
    assert not list(tmp_path.glob("*.partial"))


def test_a_run_goes_on_with_the_same_config(tmp_path: Path):
    for step in (1, 2):
        with Run.open(tmp_path, Config()) as run:
            run.log(step, {"loss": 1.0})
    assert [line["step"] for line in _lines(tmp_path)] == [1, 2]
    assert len(_json(tmp_path / "config.json")["restarts"]) == 1


def test_another_config_is_refused_with_what_differs_and_the_remedy(tmp_path: Path):
    with Run.open(tmp_path, Config()):
        pass
    message = f"{re.escape(str(tmp_path))} holds a run of another config: steps was 3, is 5; lr was 0.5, is 0.1. Give"
    with pytest.raises(ValueError, match=message), Run.open(tmp_path, Config(steps=5, lr=0.1)):
        pass
    with Run.open(tmp_path, Config(steps=5), may_differ=["steps"]):
        pass
    assert _json(tmp_path / "config.json")["config"]["steps"] == 3


def test_without_resume_a_used_directory_is_refused(tmp_path: Path):
    with Run.open(tmp_path, Config(), resume=False):
        pass
    with pytest.raises(ValueError, match="already holds a run"), Run.open(tmp_path, Config(), resume=False):
        pass


def test_a_second_process_is_kept_out(tmp_path: Path):
    with (
        Run.open(tmp_path, Config()),
        pytest.raises(ValueError, match="in use by another process"),
        Run.open(tmp_path, Config()),
    ):
        pass
    with Run.open(tmp_path, Config()):
        pass


def test_half_a_line_of_a_killed_run_is_cut(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    with Run.open(tmp_path, Config()) as run:
        run.log(1, {"loss": 1.0})
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 2, "lo')
    with Run.open(tmp_path, Config()) as run:
        run.log(2, {"loss": 0.5})
    assert [line["loss"] for line in _lines(tmp_path)] == [1.0, 0.5]
    assert "half a line cut: 15 bytes" in caplog.text


def test_an_error_leaves_its_traceback_until_the_next_start(tmp_path: Path):
    with pytest.raises(KeyError), Run.open(tmp_path, Config()):
        raise KeyError("gone")
    assert "KeyError: 'gone'" in (tmp_path / "error.txt").read_text()
    with Run.open(tmp_path, Config()):
        assert not (tmp_path / "error.txt").exists()


def test_an_interrupted_run_says_what_is_saved(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(asyncio.CancelledError), Run.open(tmp_path, Config()):
        raise asyncio.CancelledError
    assert f"is saved in {tmp_path}" in capsys.readouterr().err
    assert not (tmp_path / "error.txt").exists()


def test_wandb_that_is_not_installed_is_one_clear_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "wandb", None)  # importing it raises ImportError
    with (
        pytest.raises(ValueError, match="wandb is not installed: pip install"),
        Run.open(tmp_path, Config(), wandb=True),
    ):
        pass


def test_wandb_gets_config_and_metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    class FakeWandb:
        def __init__(self) -> None:
            self.calls: list[Any] = []

        def init(self, *, config: dict[str, Any], **_: Any) -> "FakeWandb":
            self.calls.append(config)
            return self

        def log(self, values: dict[str, float], *, step: int) -> None:
            self.calls.append((step, values))

        def finish(self) -> None:
            self.calls.append("finish")

    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    with Run.open(tmp_path, Config(), wandb=True) as run:
        run.log(1, {"loss": 1.0})
    assert fake.calls == [{"steps": 3, "lr": 0.5}, (1, {"loss": 1.0}), "finish"]


def test_steps_go_on_where_the_checkpoint_is(tmp_path: Path):
    with Run.open(tmp_path, Config()) as run:
        assert list(run.steps(5, start=3)) == [3, 4]


def test_without_a_terminal_progress_is_log_lines_with_count_rate_and_eta(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.INFO), ProgressDisplay(line_every_s=0).bar("harvesting", 8) as bar:
        for _ in range(4):
            bar.advance(note="solved 0.5")
    lines = [record.message for record in caplog.records]
    assert len(lines) == 5, "one for each advance, since none is too soon, and one at the end"
    assert re.fullmatch(r"harvesting 2/8 \(25%\), \S+/s, \d+ s left, solved 0.5", lines[1])
    assert lines[-1].startswith("harvesting 4/8 (50%)")


def test_log_lines_are_seconds_apart(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.INFO), ProgressDisplay().bar("harvesting", None) as bar:
        for _ in range(100):
            bar.advance()
        assert caplog.records == []
    assert [record.message.split(",")[0] for record in caplog.records] == ["harvesting 100"]


def test_two_runs_share_one_terminal_and_the_last_bar_gives_it_back(monkeypatch: pytest.MonkeyPatch):
    calls: list[str] = []
    live = Mock(task_ids=[])
    live.start.side_effect = lambda: calls.append("start")
    live.stop.side_effect = lambda: calls.append("stop")
    live.add_task.side_effect = lambda name, **_: live.task_ids.append(name) or name
    live.remove_task.side_effect = live.task_ids.remove
    monkeypatch.setattr(progress, "_rich_progress", lambda: live)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    one, other = ProgressDisplay(), ProgressDisplay()
    with one.bar("sft", 4):
        left = other.bar("rloo", 4)
        left.__enter__()
    assert calls == ["start"], "the other run still draws"
    other.stop()
    assert calls == ["start", "stop"]
    left.__exit__(None, None, None)
    assert calls == ["start", "stop"]


@pytest.mark.slow
def test_opening_a_run_imports_no_torch_ray_or_vllm(tmp_path: Path):
    program = """
import sys
from pathlib import Path
import recipes.interrupt
from recipes.run import Run, finished_summary
from recipes.totals import Totals
assert "tensorboard" not in sys.modules and "rich" not in sys.modules
with Run.open(Path(sys.argv[1]), {"a": 1}) as run:
    run.log(1, {"loss": 1.0})
print(sorted({"torch", "ray", "vllm", "tensorflow"} & sys.modules.keys()))
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "[]\n", done.stderr


def test_pinned_facts_must_be_found_unchanged(tmp_path: Path):
    with Run.open(tmp_path, Config()) as run:
        run.pin("tasks", {"count": 24, "digest": "ab"})
    with Run.open(tmp_path, Config()) as run:
        run.pin("tasks", {"count": 24, "digest": "ab"})
        with pytest.raises(ValueError, match="other tasks: count was 24, is 30; digest was 'ab', is 'cd'"):
            run.pin("tasks", {"count": 30, "digest": "cd"})


def test_a_finished_run_is_known_without_changing_anything(tmp_path: Path):
    assert finished_summary(tmp_path, Config()) is None
    with Run.open(tmp_path, Config()) as run:
        run.summary({"solved": 0.5})
    assert finished_summary(tmp_path, Config()) is None, "it was interrupted"
    with Run.open(tmp_path, Config()) as run:
        run.summary({"finished": True})
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert finished_summary(tmp_path, Config()) == {"solved": 0.5, "finished": True}
    with pytest.raises(ValueError, match=r"lr was 0\.5, is 0\.1"):
        finished_summary(tmp_path, Config(lr=0.1))
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    with Run.open(tmp_path, Config()):
        assert finished_summary(tmp_path, Config()) is None, "it goes on"


def test_events_are_lines_with_their_facts(tmp_path: Path):
    with Run.open(tmp_path, Config()) as run:
        run.event("learner restored", lost_steps=2)
    (line,) = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert line.pop("time") > 1e9
    assert line == {"event": "learner restored", "lost_steps": 2}


def test_totals_go_on_over_processes(tmp_path: Path):
    with Run.open(tmp_path, Config()) as run:
        assert run.last_metrics() == {}
        run.log(1, Totals({})({"weight_syncs": 3.0}, max_staleness=1))
    with Run.open(tmp_path, Config()) as run:
        totals = Totals(run.last_metrics())({"weight_syncs": 2.0}, max_staleness=0)
    assert (totals["total/weight_syncs"], totals["total/max_staleness"]) == (5.0, 1.0)
    assert totals["total/seconds"] > 0
