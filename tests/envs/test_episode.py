"""run_episode and run_group: every way a rollout can end, and what is kept of it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from envs.conversation import ScriptedConversation
from envs.episode import Episode, run_episode
from envs.errors import ContextLimit, EpisodeError, SamplerError, SandboxDied, SandboxError, TaskError, TurnLimit
from envs.group import run_group
from envs.harbor import load_task
from envs.harness import Conversation
from envs.sandbox import Sandbox
from envs.task import Environment, Limits, Task
from envs.timeouts import TimeoutRule
from tests.envs.task_dirs import make_task_dir
from tests.fakes.directory_sandbox import DirectoryProvider
from tests.fakes.harness import FunctionHarness
from trajectories.schema import DEFAULT_TREATMENTS, Outcome, Trajectory, Treatment

IS_DONE = "[ -f /app/done ] && reward=1 || reward=0\necho judged\necho $reward >/logs/verifier/reward.txt\n"


async def do_it(task: Task, sandbox: Sandbox, conversation: Conversation) -> None:
    command = await conversation.ask(task.instruction)
    await sandbox.exec(command, timeout_s=5)


@pytest.fixture
def task(tmp_path: Path) -> Task:
    return load_task(make_task_dir(tmp_path, test_sh=IS_DONE))


@pytest.fixture
def provider(tmp_path: Path) -> DirectoryProvider:
    return DirectoryProvider(tmp_path / "boxes")


def make_episode(provider, play=do_it, *, replies=("touch done",), **options) -> Episode:
    return Episode(
        provider=provider,
        harness=FunctionHarness(play),
        converse=lambda task, trajectory_id: ScriptedConversation(replies),
        **options,
    )


async def play(task: Task, episode: Episode, deadline_s: float | None = None) -> Trajectory:
    return await run_episode(task, episode=episode, trajectory_id="g.0", group_id="g", member=0, deadline_s=deadline_s)


async def test_a_completed_rollout_is_recorded_whole(task: Task, provider: DirectoryProvider) -> None:
    trajectory = await play(task, make_episode(provider, provenance={"run": "r1"}))
    assert (trajectory.id, trajectory.task_id, trajectory.group_id, trajectory.member) == ("g.0", "a-task", "g", 0)
    assert (trajectory.outcome, trajectory.reward, trajectory.error) == (Outcome.COMPLETED, 1.0, "")
    assert trajectory.prompt == "Do it"
    assert [turn.reply for turn in trajectory.turns] == ["touch done"]
    assert trajectory.evidence == "judged\n"
    assert set(trajectory.timings_s) == {"sandbox_start", "harness", "verifier", "sandbox_stop"}
    assert trajectory.provenance == {
        "run": "r1",
        "family": "",
        "harness": "function",
        "sandbox": "directory",
    }
    assert provider.sandboxes["g.0"].calls[-1] == "stop"


async def test_work_that_is_not_done_gets_reward_0(task: Task, provider: DirectoryProvider) -> None:
    trajectory = await play(task, make_episode(provider, replies=("true",)))
    assert (trajectory.outcome, trajectory.reward) == (Outcome.COMPLETED, 0.0)


@pytest.mark.parametrize(
    ("error", "outcome", "reward"),
    [
        (TurnLimit("6 turns"), Outcome.TURN_LIMIT, 1.0),
        (ContextLimit("513 tokens"), Outcome.CONTEXT_LIMIT, 1.0),
        (SandboxDied("no shell"), Outcome.AGENT_ERROR, None),
        (SamplerError("no server"), Outcome.SAMPLER_ERROR, None),
        (SandboxError("lost"), Outcome.SANDBOX_ERROR, None),
    ],
)
async def test_each_error_becomes_its_outcome_and_the_turns_stay(
    task: Task, provider: DirectoryProvider, error: EpisodeError, outcome: Outcome, reward: float | None
) -> None:
    async def fail(task: Task, sandbox: Sandbox, conversation: Conversation) -> None:
        await do_it(task, sandbox, conversation)
        raise error

    trajectory = await play(task, make_episode(provider, fail))
    assert (trajectory.outcome, trajectory.reward) == (outcome, reward)
    assert trajectory.error == f"{type(error).__name__}: {error}"
    assert [turn.reply for turn in trajectory.turns] == ["touch done"]
    assert ("verifier" in trajectory.timings_s) == (reward is not None)
    assert provider.sandboxes["g.0"].calls[-1] == "stop"


async def test_the_treatment_table_decides_whether_the_verifier_runs(task: Task, provider: DirectoryProvider) -> None:
    treatments = {**DEFAULT_TREATMENTS, Outcome.COMPLETED: Treatment.EXCLUDE}
    trajectory = await play(task, make_episode(provider, treatments=treatments))
    assert (trajectory.outcome, trajectory.reward) == (Outcome.COMPLETED, None)
    assert "exec" not in provider.sandboxes["g.0"].calls[1:]


async def test_a_harness_past_its_limit_is_stopped_and_its_work_judged(task: Task, provider: DirectoryProvider) -> None:
    async def dawdle(task: Task, sandbox: Sandbox, conversation: Conversation) -> None:
        await do_it(task, sandbox, conversation)
        await asyncio.sleep(30)

    trajectory = await play(task, make_episode(provider, dawdle, agent_timeout_s=0.2))
    assert (trajectory.outcome, trajectory.reward) == (Outcome.AGENT_TIMEOUT, 1.0)
    assert trajectory.error == "HarnessTimeout: harness did not end within 0.2 s"
    assert 0.2 <= trajectory.timings_s["harness"] < 5


async def test_an_error_that_the_timeout_provoked_is_the_timeout(task: Task, provider: DirectoryProvider) -> None:
    async def complain(task: Task, sandbox: Sandbox, conversation: Conversation) -> None:
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            raise SamplerError("request was cut off") from None

    trajectory = await play(task, make_episode(provider, complain, agent_timeout_s=0.05))
    assert trajectory.outcome == Outcome.AGENT_TIMEOUT


async def test_a_timeout_of_the_harnesss_own_is_a_bug(task: Task, provider: DirectoryProvider) -> None:
    async def time_out(task: Task, sandbox: Sandbox, conversation: Conversation) -> None:
        async with asyncio.timeout(0.01):
            await asyncio.sleep(30)

    with pytest.raises(TimeoutError):
        await play(task, make_episode(provider, time_out))
    assert provider.sandboxes["g.0"].calls == ["stop"]


async def test_a_bug_propagates_and_the_sandbox_is_stopped(task: Task, provider: DirectoryProvider) -> None:
    async def stumble(task: Task, sandbox: Sandbox, conversation: Conversation) -> None:
        raise KeyError("typo")

    with pytest.raises(KeyError, match="typo"):
        await play(task, make_episode(provider, stumble))
    assert provider.sandboxes["g.0"].calls == ["stop"]


async def test_a_cancellation_propagates_and_the_sandbox_is_stopped(task: Task, provider: DirectoryProvider) -> None:
    began = asyncio.Event()

    async def dawdle(task: Task, sandbox: Sandbox, conversation: Conversation) -> None:
        began.set()
        await asyncio.sleep(30)

    rollout = asyncio.create_task(play(task, make_episode(provider, dawdle)))
    await began.wait()
    rollout.cancel()
    with pytest.raises(asyncio.CancelledError):
        await rollout
    assert provider.sandboxes["g.0"].calls == ["stop"]


async def test_a_reward_that_is_not_valid_is_a_verifier_error(tmp_path: Path, provider: DirectoryProvider) -> None:
    task = load_task(make_task_dir(tmp_path, "b", test_sh="echo oops >/logs/verifier/reward.txt\n"))
    trajectory = await play(task, make_episode(provider))
    assert (trajectory.outcome, trajectory.reward) == (Outcome.VERIFIER_ERROR, None)
    assert trajectory.error == "VerifierError: reward.txt holds no number: 'oops'"
    assert len(trajectory.turns) == 1


class FailingProvider(DirectoryProvider):
    """Fails with a SandboxError where it is told to."""

    def __init__(self, root: Path, *, at: str) -> None:
        super().__init__(root)
        self._at = at

    @asynccontextmanager
    async def start(self, task: Task, *, owner: str) -> AsyncIterator[Sandbox]:  # pyright: ignore[reportIncompatibleMethodOverride]
        if self._at == "start":
            raise SandboxError("no room")
        async with super().start(task, owner=owner) as sandbox:
            yield sandbox
        raise SandboxError("did not go away")


async def test_a_sandbox_that_does_not_start_is_a_sandbox_error_without_turns(task: Task, tmp_path: Path) -> None:
    trajectory = await play(task, make_episode(FailingProvider(tmp_path / "boxes", at="start")))
    assert (trajectory.outcome, trajectory.error) == (Outcome.SANDBOX_ERROR, "SandboxError: no room")
    assert (trajectory.prompt, trajectory.turns) == ("", ())
    assert set(trajectory.timings_s) == {"sandbox_start"}


async def test_a_sandbox_that_does_not_stop_leaves_the_result_as_it_is(task: Task, tmp_path: Path, caplog) -> None:
    trajectory = await play(task, make_episode(FailingProvider(tmp_path / "boxes", at="stop")))
    assert (trajectory.outcome, trajectory.reward, trajectory.error) == (Outcome.COMPLETED, 1.0, "")
    assert "did not go away" in caplog.text


def test_the_agents_limit_is_the_override_or_the_tasks_under_the_cap(task: Task, provider: DirectoryProvider) -> None:
    def limit_s(of_task: float | None, **options: Any) -> float:
        limited = replace(task, limits=Limits(agent_timeout_s=of_task))
        return make_episode(provider, **options).agent_limit_s(limited)

    assert limit_s(None) == 1800.0
    assert limit_s(900.0) == 900.0
    assert limit_s(3600.0) == 1800.0
    assert limit_s(900.0, agent_timeout_s=60.0) == 60.0
    assert limit_s(900.0, agent_timeout_s=60.0, max_agent_timeout_s=30.0) == 30.0
    assert limit_s(900.0, max_agent_timeout_s=600.0, timeout_multiplier=2.0) == 1200.0
    assert limit_s(None, max_agent_timeout_s=600.0, timeout_multiplier=2.0) == 1200.0
    assert limit_s(900.0, timeout_rule=TimeoutRule.PAPER, timeout_multiplier=16.0) == 7200.0


def test_the_verifiers_limit_is_multiplied_under_harbors_rule_only(task: Task, provider: DirectoryProvider) -> None:
    assert make_episode(provider, timeout_multiplier=2.0).verifier_limit_s(task) == 240.0
    assert (
        make_episode(provider, timeout_multiplier=2.0, timeout_rule=TimeoutRule.PAPER).verifier_limit_s(task) == 120.0
    )


async def test_a_task_that_no_episode_plays_is_refused_before_its_sandbox_starts(
    task: Task, provider: DirectoryProvider
) -> None:
    with pytest.raises(TaskError, match=r"environment\.skills_dir is not played yet"):
        await play(replace(task, environment=Environment(skills_dir="/skills")), make_episode(provider))
    assert provider.sandboxes == {}


def test_an_episode_that_cannot_be_played_is_refused(provider: DirectoryProvider) -> None:
    with pytest.raises(ValueError, match="missing: turn_limit"):
        make_episode(provider, treatments={o: t for o, t in DEFAULT_TREATMENTS.items() if o != Outcome.TURN_LIMIT})
    with pytest.raises(ValueError, match="agent_timeout_s must be above 0, got 0"):
        make_episode(provider, agent_timeout_s=0)


async def test_a_group_plays_its_members_at_once_and_in_order(task: Task, provider: DirectoryProvider) -> None:
    everyone = asyncio.Barrier(3)

    async def wait_for_all(task: Task, sandbox: Sandbox, conversation: Conversation) -> None:
        async with asyncio.timeout(5):
            await everyone.wait()

    group = await run_group(task, size=3, episode=make_episode(provider, wait_for_all), group_id="g7", deadline_s=20)
    assert (group.id, group.task_id) == ("g7", "a-task")
    assert [(t.id, t.group_id, t.member) for t in group.trajectories] == [
        ("g7.0", "g7", 0),
        ("g7.1", "g7", 1),
        ("g7.2", "g7", 2),
    ]
    assert [t.outcome for t in group.trajectories] == [Outcome.COMPLETED] * 3


async def test_a_group_closes_at_its_deadline_with_the_survivors(task: Task, provider: DirectoryProvider) -> None:
    starts = iter(range(2))

    async def one_dawdles(task: Task, sandbox: Sandbox, conversation: Conversation) -> None:
        is_slow = next(starts) == 1
        await do_it(task, sandbox, conversation)
        if is_slow:
            await asyncio.sleep(30)

    group = await run_group(task, size=2, episode=make_episode(provider, one_dawdles), group_id="g", deadline_s=1.0)
    done, late = sorted(group.trajectories, key=lambda trajectory: trajectory.outcome != Outcome.COMPLETED)
    assert (done.outcome, done.reward) == (Outcome.COMPLETED, 1.0)
    assert (late.outcome, late.reward) == (Outcome.CANCELLED, None)
    assert late.error == "GroupDeadline: not done 1.0 s after its group began"
    assert [turn.reply for turn in late.turns] == ["touch done"]
    assert all(sandbox.calls[-1] == "stop" for sandbox in provider.sandboxes.values())


async def test_a_bug_in_one_member_ends_the_group_and_stops_every_sandbox(
    task: Task, provider: DirectoryProvider
) -> None:
    starts = iter(range(3))

    async def one_stumbles(task: Task, sandbox: Sandbox, conversation: Conversation) -> None:
        if next(starts) == 2:
            raise KeyError("typo")
        await asyncio.sleep(30)

    with pytest.raises(ExceptionGroup) as caught:
        await run_group(task, size=3, episode=make_episode(provider, one_stumbles), group_id="g", deadline_s=20)
    assert [type(error) for error in caught.value.exceptions] == [KeyError]
    assert len(provider.sandboxes) == 3
    assert all(sandbox.calls[-1] == "stop" for sandbox in provider.sandboxes.values())


async def test_an_empty_group_is_refused(task: Task, provider: DirectoryProvider) -> None:
    with pytest.raises(ValueError, match="size must be >= 1, got 0"):
        await run_group(task, size=0, episode=make_episode(provider), group_id="g", deadline_s=1)
