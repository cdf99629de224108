"""What torch computes first is as exact as what it computes later."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from actors.threads import thread_environment
from learners.config import LearnerConfig
from learners.learner import Learner
from learners.vector_math import VECTOR_FUNCTIONS


def in_fresh_process(*arguments: str, timeout_s: float = 60) -> str:
    """What `python` prints that has two compute threads, as learners and engines have here."""
    command = [sys.executable, *arguments]
    env = {"PATH": "/usr/bin:/bin", **thread_environment(2)}
    return subprocess.run(command, env=env, check=True, capture_output=True, text=True, timeout=timeout_s).stdout


def test_every_function_that_torch_hands_to_mkl_is_called():
    header = Path(torch.__file__).parent / "include/ATen/cpu/vml.h"
    handed = re.findall(r"^IMPLEMENT_VML_MKL\((\w+), \w+\)", header.read_text(), re.MULTILINE)
    assert handed and set(handed) == {function.__name__ for function in VECTOR_FUNCTIONS}


def test_a_learner_settles_before_it_does_anything(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    class Settled(Exception):
        pass

    def settle() -> None:
        raise Settled

    monkeypatch.setattr("learners.learner.settle_vector_math", settle)
    with pytest.raises(Settled):
        Learner(LearnerConfig(), model=tmp_path)


@pytest.mark.slow
def test_a_worker_of_vllm_has_settled_once_it_knows_its_extension():
    script = (
        "import actors.weight_extension\n"
        "from learners.vector_math import settle_vector_math\n"
        "print(settle_vector_math.cache_info().currsize)"
    )
    assert in_fresh_process("-c", script).strip() == "1"


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
def test_settled_processes_are_exact_at_once_and_others_are_not():
    """A few of 20,000 are not. Where none is, MKL was mended and learners/vector_math.py can go."""
    assert int(in_fresh_process("-m", "tests.learners.first_calls", "settled", "20000", timeout_s=300)) == 0
    assert int(in_fresh_process("-m", "tests.learners.first_calls", "plain", "20000", timeout_s=300)) > 0
