"""The whole path with every part real: vLLM, bubblewrap, FSDP2 over gloo, Ray."""

import asyncio
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from actors.cluster import ClusterConfig, start_cluster
from actors.inference_config import InferencePoolConfig
from actors.inference_pool import start_inference_pool
from actors.learner_group import LearnerGroupConfig, start_learner_group
from actors.rollout_pool import RolloutPoolConfig, start_rollout_pool
from actors.weight_sync import WeightSync
from envs.build import EpisodeConfig, HarnessName
from envs.sampler import SamplingParams
from envs.tasksets import resolve_tasks
from envs.terminus2.harness import Malformed
from learners.config import LearnerConfig, LossConfig, LossKind
from learners.plan import plan_batch
from recipes import evaluate, export, harvest, rloo
from recipes.alarms import AlarmConfig
from recipes.event_log import read_history
from recipes.policies import PolicyConfig
from recipes.schedule import Schedule
from recipes.side_evaluation import SideEvaluationConfig
from tests.recipes.conftest import TINY
from trajectories.handle import GroupHandle
from trajectories.ledger import Ledger
from trajectories.schema import Group, PolicyVersion
from trajectories.store import scan

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.sandbox, pytest.mark.timeout(420)]

ENGINE = "vllm.v1.engine.async_llm.AsyncLLM"
SEEDED = EpisodeConfig(malformed=Malformed.END, sampling=SamplingParams(max_tokens=60, seed=7))


def stored(run: Path) -> dict[str, Group]:
    return {group.id: group for _, group in scan(run / "store")}


def rows(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_the_tiny_policy_learns(taught: Path, tmp_path: Path) -> None:
    """The same 24 tasks at every step, so that what rises is the policy and not the luck of the draw."""
    config = rloo.Config(
        run=tmp_path / "rloo",
        tasks="shell:train[400:]",
        limit=24,
        steps=12,
        groups_per_step=24,
        policy=PolicyConfig(model=str(taught / "model")),
        episode=TINY.episode,
        learner=LearnerConfig(lr=1e-3),
        eval=SideEvaluationConfig(every=6, limit=12),
        checkpoint_every=6,
        alarms=AlarmConfig(window=1),
    )
    summary = asyncio.run(rloo.main(config))
    assert summary["engine"] == ENGINE
    assert summary["sandbox"]["provider"] == "bubblewrap"
    assert (summary["learner"], summary["world_size"]) == ("FSDPPolicyNetwork", 1)
    assert summary["weight_syncs"] == 13 and summary["weight_syncs_in_flight"] > 0
    assert summary["max_staleness_seen"] <= 1
    history = read_history(config.run)
    scores = {metrics["eval/version"]: metrics["eval/solved"] for _, metrics in history if "eval/version" in metrics}
    assert 6.0 in scores and summary["best_version"] in (6, 12)
    assert (config.run / "best" / "model.safetensors").is_file() == (summary["best_version"] == 6)
    rewards = [metrics["reward_mean"] for _, metrics in history]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:2]) / 2 + 0.08, rewards
    assert (config.run / "model" / "model.safetensors").is_file()
    assert list((config.run / "tb").iterdir())


def test_on_policy_rloo_equals_a_plain_synchronous_loop(taught: Path, tmp_path: Path) -> None:
    """Same groups, tokens, rewards and weights; and at staleness 0 every token is of the current version."""
    config = rloo.Config(
        run=tmp_path / "rloo",
        tasks="shell:train[400:]",
        steps=3,
        groups_per_step=6,
        group_size=4,
        max_staleness=0,
        policy=PolicyConfig(model=str(taught / "model")),
        episode=SEEDED,
        loss=LossConfig(kind=LossKind.REINFORCE),
    )
    summary = asyncio.run(rloo.main(config))
    assert summary["max_staleness_seen"] == 0
    steps = asyncio.run(play_and_train_in_turn(config, tmp_path / "plain"))
    played, replayed = stored(config.run), stored(tmp_path / "plain")
    assert sum(row["plan/samples"] for row in rows(config.run)) > 0, "nothing was trained, so nothing was compared"
    for step, handles in enumerate(steps):
        for handle in handles:
            ours, theirs = played[handle.group_id], replayed[handle.group_id]
            assert [t.reward for t in ours.trajectories] == [t.reward for t in theirs.trajectories]
            assert sampled_ids(ours) == sampled_ids(theirs)
            assert versions(ours) == {PolicyVersion(lineage=0, n=step)}
    ours, theirs = (load_file(run / "model" / "model.safetensors") for run in (config.run, tmp_path / "plain"))
    start = load_file(taught / "model" / "model.safetensors")
    assert max(float((ours[name] - theirs[name]).abs().max()) for name in ours) < 1e-5
    assert max(float((ours[name] - start[name]).abs().max()) for name in ours) > 1e-4, "training changed nothing"


async def play_and_train_in_turn(config: rloo.Config, run: Path) -> list[list[GroupHandle]]:
    """RLOO as a loop that does one thing after the other; returns each step's Groups."""
    store = run / "store"
    store.mkdir(parents=True)
    model = Path(config.policy.model)
    tasks = resolve_tasks(config.tasks)
    ledger = Ledger(run / "ledger" / "store")
    requests = iter(Schedule(tasks, ledger, seed=config.seed, epochs=None))
    steps: list[list[GroupHandle]] = []
    async with (
        start_cluster(ClusterConfig()),
        start_learner_group(config.learners, config.learner, model=model, store=store) as learner,
        start_inference_pool(config.policy.pool, model=model) as servers,
        start_rollout_pool(
            RolloutPoolConfig(), config.episode, store=store, prefix="plain", model=model, sampler=servers.sampler()
        ) as rollouts,
    ):
        weights = WeightSync(source=learner, target=servers)
        await weights.publish(PolicyVersion(lineage=0, n=0))
        for step in range(config.steps):
            batch = [next(requests) for _ in range(config.groups_per_step)]
            handles = list(await asyncio.gather(*(rollouts.play(request, config.group_size) for request in batch)))
            plan = plan_batch(handles, num_ranks=1, max_tokens=config.learner.max_tokens)
            await learner.forward_backward(plan, config.loss)
            await learner.optim_step()
            await weights.publish(PolicyVersion(lineage=0, n=step + 1))
            steps.append(handles)
        await weights.close()
        await learner.save_pretrained(run / "model")
    ledger.close()
    return steps


def sampled_ids(group: Group) -> list[list[tuple[int, ...]]]:
    return [[turn.tokens.sampled_ids for turn in t.turns if turn.tokens] for t in group.trajectories]


def versions(group: Group) -> set[PolicyVersion]:
    turns = [turn for trajectory in group.trajectories for turn in trajectory.turns]
    return {span.version for turn in turns if turn.tokens for span in turn.tokens.spans}


def test_two_ranks_and_two_servers_train_together(taught: Path, tmp_path: Path) -> None:
    config = rloo.Config(
        run=tmp_path / "rloo",
        tasks="shell:train[400:]",
        steps=3,
        groups_per_step=6,
        group_size=4,
        max_staleness=2,
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
