"""Recipes with every part real: several ranks and servers, evaluation, a policy as teacher, an interruption."""

import asyncio
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

from actors.inference_config import InferencePoolConfig, ServerConfig
from actors.learner_group import LearnerGroupConfig
from envs.build import EpisodeConfig, HarnessName
from learners.config import LearnerConfig, LoraConfig
from recipes import evaluate, export, harvest, rloo
from recipes.policies import PolicyConfig
from tests.recipes.conftest import TINY
from tests.recipes.runs import rows, stored, versions
from trajectories.store import scan

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.sandbox, pytest.mark.timeout(900)]


def test_two_ranks_and_two_servers_train_together(taught: Path, tmp_path: Path) -> None:
    config = rloo.Config(
        run=tmp_path / "rloo",
        tasks="shell:train[400:]",
        steps=3,
        groups_per_step=6,
        group_size=4,
        max_staleness=1,
        policy=PolicyConfig(model=str(taught / "model"), pool=InferencePoolConfig(num_servers=2)),
        episode=TINY.episode,
        learners=LearnerGroupConfig(num_ranks=2),
    )
    summary = asyncio.run(rloo.main(config))
    assert (summary["world_size"], summary["rl_steps"]) == (2, 3)
    assert summary["logprob_gap_mean"] < 1e-5
    assert max(row.get("sync/servers", 0) for row in rows(config.run)) == 2
    before = set(stored(config.run))
    goes_on = asyncio.run(rloo.main(dataclasses.replace(config, steps=4)))
    assert goes_on["rl_steps"] == 4
    later = [group for id_, group in stored(config.run).items() if id_ not in before]
    assert later and all(v.lineage == 1 and v.n >= 3 for group in later for v in versions(group))


@pytest.mark.exhaustive
def test_adapters_are_published_to_servers_that_take_turns_with_the_learner(taught: Path, tmp_path: Path) -> None:
    config = rloo.Config(
        run=tmp_path / "rloo",
        tasks="shell:train[400:]",
        steps=2,
        groups_per_step=4,
        group_size=4,
        max_staleness=0,
        policy=PolicyConfig(model=str(taught / "model"), pool=InferencePoolConfig(server=ServerConfig(colocated=True))),
        episode=TINY.episode,
        learner=LearnerConfig(lr=5e-3, lora=LoraConfig(rank=4, alpha=8)),
    )
    summary = asyncio.run(rloo.main(config))
    assert (summary["rl_steps"], summary["max_staleness_seen"]) == (2, 0)
    assert summary["logprob_gap_mean"] < 1e-5, "the probe proved each of three versions"
    for row in rows(config.run):
        assert row["sync/values_read_back"] == 0 < row["sync/tensors_unread"], "an adapter, not merged weights"
    assert {0, 1} <= {v.n for group in stored(config.run).values() for v in versions(group)}
    adapter = load_file(config.run / "model" / "adapter" / "adapter_model.safetensors")
    assert any(matrix.any() for name, matrix in adapter.items() if ".lora_B." in name), "training moved it"


def test_a_policy_is_evaluated_taught_from_and_exported(taught: Path, tmp_path: Path) -> None:
    policy = PolicyConfig(model=str(taught / "model"))
    scores = asyncio.run(
        evaluate.main(
            evaluate.Config(
                run=tmp_path / "evaluate", tasks="shell:heldout[:24]", attempts=2, policy=policy, episode=TINY.episode
            )
        )
    )
    assert 0 < scores["solved"] < 1
    assert (scores["num_tasks"], scores["num_attempts"]) == (24, 48)
    assert sum(scores["outcomes"].values()) == 48
    harvested = asyncio.run(
        harvest.main(
            harvest.Config(
                run=tmp_path / "teach",
                tasks="shell:train[400:424]",
                attempts=2,
                policy=policy,
                episode=TINY.episode,
            )
        )
    )
    assert harvested["harvested"] == 48
    out = tmp_path / "solved.jsonl"
    counts = asyncio.run(export.main(export.Config(data=(tmp_path / "teach",), out=out)))
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(lines) == counts["written"] > 0
    assert all(line["reward"] == 1 and line["messages"][-1]["role"] == "assistant" for line in lines)


def test_the_oracle_solves_what_nobody_solves(cluster: None, tmp_path: Path) -> None:
    solved = {}
    for harness in (HarnessName.ORACLE, HarnessName.NOP):
        episode, job = EpisodeConfig(harness=harness), tmp_path / "jobs" / harness
        config = evaluate.Config(run=tmp_path / harness, tasks="humaneval[:5]", episode=episode, harbor_job=job)
        solved[harness] = asyncio.run(evaluate.main(config))["solved"]
        assert json.loads((job / "result.json").read_text())["n_total_trials"] == 5
    assert solved == {HarnessName.ORACLE: 1.0, HarnessName.NOP: 0.0}


def test_an_interrupted_harvest_ends_cleanly_and_goes_on(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "recipes.harvest", "--run", str(tmp_path / "run"), "--tasks", "shell:train[:300]"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and len(stored_so_far(tmp_path / "run")) < 20:
            time.sleep(0.2)
        os.kill(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=90)
    finally:
        process.kill()
    assert process.returncode == 130, errors
    assert "the same command goes on" in errors and "Traceback" not in errors
    done = len(stored_so_far(tmp_path / "run"))
    assert 20 <= done < 300
    again = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert again.returncode == 0, again.stderr
    assert "resumed_groups" in (tmp_path / "run" / "summary.json").read_text()
    assert sorted(stored_so_far(tmp_path / "run")) == sorted(set(stored_so_far(tmp_path / "run")))
    assert len(stored_so_far(tmp_path / "run")) == 300


def stored_so_far(run: Path) -> list[str]:
    store = run / "store"
    return [group.id for _, group in scan(store)] if store.is_dir() else []
