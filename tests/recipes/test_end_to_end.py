"""The whole path with every part real: vLLM, bubblewrap, FSDP2 over gloo, Ray."""

import asyncio
from pathlib import Path

import pytest
from safetensors.torch import load_file

from actors.cluster import ClusterConfig, start_cluster
from actors.inference_pool import start_inference_pool
from actors.learner_group import start_learner_group
from actors.rollout_pool import RolloutPoolConfig, start_rollout_pool
from actors.weight_sync import WeightSync
from envs.build import EpisodeConfig
from envs.sampler import SamplingParams
from envs.tasksets import resolve_tasks
from envs.terminus2.harness import Malformed
from learners.config import LearnerConfig, LossConfig, LossKind
from learners.plan import plan_batch
from recipes import rloo
from recipes.alarms import AlarmConfig
from recipes.event_log import read_history
from recipes.policies import PolicyConfig
from recipes.schedule import Schedule
from recipes.side_evaluation import SideEvaluationConfig
from tests.recipes.conftest import TINY
from tests.recipes.runs import rows, stored, versions
from trajectories.handle import GroupHandle
from trajectories.ledger import Ledger
from trajectories.schema import Group, PolicyVersion

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.sandbox, pytest.mark.timeout(900)]

ENGINE = "vllm.v1.engine.async_llm.AsyncLLM"
SEEDED = EpisodeConfig(malformed=Malformed.END, sampling=SamplingParams(max_tokens=60, seed=7))


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
