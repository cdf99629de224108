"""The doctor: plans of the paper's jobs, and checks that say what is wrong."""

import subprocess
import sys
from pathlib import Path

import pytest

from recipes import doctor
from recipes.doctor import Check, Plan, check_ports, print_checks, print_plan


def test_the_paper_s_8b_job_fits_eight_gpus_of_80_gb(capsys: pytest.CaptureFixture[str]) -> None:
    assert print_plan(Plan(model="qwen3-8b", context=32_768, gpus=8))
    printed = capsys.readouterr().out
    assert "8.19 billion parameters, 32,768 tokens a micro-batch, 8 GPUs of 80 GiB" in printed
    assert "fits, with" in printed


def test_32b_needs_more_than_eight_gpus_and_is_told_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert not print_plan(Plan(model="qwen3-32b", context=32_768, gpus=8))
    assert "does not fit: " in capsys.readouterr().out
    assert print_plan(Plan(model="qwen3-32b", context=32_768, gpus=32, sequence_parallel=4))


def test_each_remedy_lessens_what_it_is_named_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert not print_plan(Plan(model="qwen3-8b", gpus=8, activation_checkpointing=False))
    assert "most of it activations; recompute layers" in capsys.readouterr().out
    assert not print_plan(Plan(model="qwen3-32b", gpus=1))
    assert "most of it optimizer; shard over more GPUs" in capsys.readouterr().out


def test_a_config_json_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = Path(doctor.__file__).parent.parent / "learners" / "shapes" / "qwen3-0.6b.json"
    (tmp_path / "config.json").write_text(source.read_text())
    assert print_plan(Plan(model=str(tmp_path / "config.json"), context=2048, gpus=1))
    assert "0.60 billion" in capsys.readouterr().out


def test_the_checks_are_printed_and_one_failure_is_enough(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failing = Check(name="tea", is_well=False, found="cold; make it again")
    monkeypatch.setattr(doctor, "CHECKS", (check_ports, lambda: failing))
    assert not print_checks()
    assert capsys.readouterr().out == "ok   ports: local connections work\nFAIL tea: cold; make it again\n"


def test_an_unknown_model_is_one_line_and_an_exit_code() -> None:
    command = [sys.executable, "-m", "recipes.doctor", "plan", "--model", "gpt-9"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("error: no model 'gpt-9'") and done.stderr.count("\n") == 1
