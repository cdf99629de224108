"""Steps, separate verifiers, health checks, artifacts and users, played in a directory."""

import json
import os
import pwd
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from envs.conversation import ScriptedConversation
from envs.episode import Episode, run_episode
from envs.errors import SandboxRefused
from envs.harbor import load_task
from envs.harness import Conversation
from envs.healthcheck import wait_healthy
from envs.sandbox import ExecResult, Sandbox
from envs.steps import steps_of, whole_verdict
from envs.task import AgentSpec, Artifact, Collect, Environment, Healthcheck, Step, Task, VerifierSpec
from envs.users import UserSandbox, check_users
from envs.verifier import Verdict
from tests.contracts import sandbox as contract
from tests.envs.task_dirs import NO_NETWORK, make_task_dir
from tests.fakes.directory_sandbox import DirectoryProvider, DirectorySandbox
from tests.fakes.harness import FunctionHarness
from trajectories.schema import Outcome, Trajectory

ME = pwd.getpwuid(os.getuid()).pw_name


async def obey(task: Task, sandbox: Sandbox, conversation: Conversation) -> None:
    """Runs each step's reply."""
    await sandbox.exec(await conversation.ask(task.instruction), timeout_s=5)


async def play(task: Task, provider: DirectoryProvider, *replies: str, keep_dir: Path | None = None) -> Trajectory:
    episode = Episode(
        provider=provider,
        harness=FunctionHarness(obey),
        converse=lambda task, key: ScriptedConversation(replies),
        keep_dir=keep_dir,
    )
    return await run_episode(task, episode=episode, trajectory_id="g.0", group_id="g", member=0)


@pytest.fixture
def provider(tmp_path: Path) -> DirectoryProvider:
    return DirectoryProvider(tmp_path / "boxes")


def two_steps(root: Path, *, toml: str = "", **floors: float) -> Task:
    """Step `one` wants /app/one, step `two` wants /app/two; the shared test.sh reads which file from its step."""
    tables = [
        f'[[steps]]\nname = "{name}"\n' + (f"min_reward = {floors[name]}\n" if name in floors else "")
        for name in ("one", "two")
    ]
    path = make_task_dir(
        root,
        toml=toml + "".join(tables) + NO_NETWORK,
        test_sh="[ -f /app/$(cat ${0%/*}/wanted) ]; echo $((1 - $?)) >/logs/verifier/reward.txt\n",
    )
    for name in ("one", "two"):
        (path / "steps" / name / "tests").mkdir(parents=True)
        (path / "steps" / name / "instruction.md").write_text(f"Make {name}\n")
        (path / "steps" / name / "tests" / "wanted").write_text(name)
    return load_task(path)


async def test_steps_are_played_in_order_in_one_sandbox_and_one_conversation(
    tmp_path: Path, provider: DirectoryProvider
) -> None:
    trajectory = await play(two_steps(tmp_path), provider, "touch one", "ls one && touch two")
    assert (trajectory.outcome, trajectory.reward) == (Outcome.COMPLETED, 1.0)
    assert (trajectory.prompt, [turn.observation for turn in trajectory.turns]) == ("Make one", ["Make two", ""])
    assert trajectory.evidence == "[step one: reward 1]\n[step two: reward 1]\n"
    assert list(provider.sandboxes) == ["g.0"]


async def test_the_reward_is_the_mean_of_the_steps_or_that_of_the_last(
    tmp_path: Path, provider: DirectoryProvider
) -> None:
    task = two_steps(tmp_path)
    assert (await play(task, provider, "touch one", "true")).reward == 0.5
    assert (await play(replace(task, step_rewards="final"), provider, "true", "touch two")).reward == 1.0


async def test_a_step_below_its_floor_is_the_last_one_played(tmp_path: Path, provider: DirectoryProvider) -> None:
    task = two_steps(tmp_path, one=0.5)
    trajectory = await play(task, provider, "true", "touch two")
    assert (trajectory.outcome, trajectory.reward, len(trajectory.turns)) == (Outcome.COMPLETED, 0.0, 1)
    assert (await play(task, provider, "touch one", "touch two")).reward == 1.0


def test_a_floor_on_a_key_that_was_not_written_is_not_met(tmp_path: Path) -> None:
    (step, _) = steps_of(two_steps(tmp_path))
    assert step.step is not None
    floor = replace(step, step=replace(step.step, min_reward={"style": -1.0}))
    assert not floor.is_passed(Verdict(reward=1.0, evidence="", rewards={"reward": 1.0}))
    assert floor.is_passed(Verdict(reward=0.0, evidence="", rewards={"style": -1.0}))


def test_means_are_taken_key_by_key_and_a_missing_key_is_0(tmp_path: Path) -> None:
    task = two_steps(tmp_path)
    rewards = ({"reward": 1.0, "style": 1.0}, {"reward": 0.0})
    verdicts = [Verdict(reward=r["reward"], evidence="", rewards=r) for r in rewards]
    whole = whole_verdict(task, dict(zip(steps_of(task), verdicts, strict=True)))
    assert (whole.reward, whole.rewards) == (0.5, {"reward": 0.5, "style": 0.5})


async def test_a_step_sees_nothing_of_the_tests_before_it(tmp_path: Path, provider: DirectoryProvider) -> None:
    peek = "test -e /tests/wanted || test -e /logs/verifier/reward.txt || touch two"
    assert (await play(two_steps(tmp_path), provider, "touch one", peek)).reward == 1.0


async def test_a_step_that_cannot_be_judged_ends_the_rollout_without_reward(
    tmp_path: Path, provider: DirectoryProvider
) -> None:
    task = two_steps(tmp_path)
    (task.path / "steps" / "two" / "tests" / "test.sh").write_text("echo no\n")
    trajectory = await play(task, provider, "touch one", "touch two")
    assert (trajectory.outcome, trajectory.reward, len(trajectory.turns)) == (Outcome.VERIFIER_ERROR, None, 2)


async def test_the_conversations_end_ends_every_step_and_each_is_judged(
    tmp_path: Path, provider: DirectoryProvider
) -> None:
    trajectory = await play(two_steps(tmp_path), provider, "touch one")
    assert (trajectory.outcome, trajectory.reward) == (Outcome.TURN_LIMIT, 0.5)


async def test_a_steps_files_and_setup_come_before_it(tmp_path: Path, provider: DirectoryProvider) -> None:
    task = two_steps(tmp_path)
    files = task.path / "steps" / "two" / "workdir"
    files.mkdir()
    (files / "given").write_text("x")
    (files / "setup.sh").write_text("cp given made\n")
    assert (await play(task, provider, "touch one; ls given made && rm one", "ls made && touch two")).reward == 1.0


async def test_a_setup_that_fails_is_infrastructure_at_first_and_the_agents_doing_later(
    tmp_path: Path, provider: DirectoryProvider
) -> None:
    for name, outcome in (("one", Outcome.SANDBOX_ERROR), ("two", Outcome.AGENT_ERROR)):
        task = two_steps(tmp_path / name)
        (task.path / "steps" / name / "workdir").mkdir()
        (task.path / "steps" / name / "workdir" / "setup.sh").write_text("echo no room >&2; exit 3\n")
        trajectory = await play(task, provider, "touch one", "touch two")
        assert (trajectory.outcome, trajectory.reward) == (outcome, None)
        assert trajectory.error.endswith(f"step {name}: setup.sh ended with exit code 3: no room")


async def test_an_unhealthy_environment_is_a_sandbox_error_before_the_agent_is_asked(
    tmp_path: Path, provider: DirectoryProvider
) -> None:
    task = load_task(make_task_dir(tmp_path))
    check = Healthcheck(command="echo sick >&2; exit 1", interval_s=0.001, retries=2)
    sick = replace(task, environment=Environment(network_mode="no-network", healthcheck=check))
    trajectory = await play(sick, provider, "true")
    assert (trajectory.outcome, trajectory.turns) == (Outcome.SANDBOX_ERROR, ())
    expected = "SandboxError: not healthy: 2 checks in a row failed, the last with exit code 1: sick"
    assert trajectory.error == expected


async def test_failures_within_the_start_period_do_not_count(tmp_path: Path) -> None:
    sandbox = DirectorySandbox(tmp_path / "box")
    fourth = "echo x >>tries; [ $(wc -l <tries) -ge 4 ]"
    patient = Healthcheck(command=fourth, start_period_s=30, start_interval_s=0.001, retries=1)
    assert await wait_healthy(patient, sandbox) == ""
    await sandbox.exec("rm tries", timeout_s=5)
    assert "3 checks in a row" in await wait_healthy(Healthcheck(command=fourth, interval_s=0.001), sandbox)


SEPARATE = VerifierSpec(is_separate=True)


async def test_a_separate_verifier_sees_the_artifacts_and_nothing_else(
    tmp_path: Path, provider: DirectoryProvider
) -> None:
    test_sh = "cd /app; find . /logs/artifacts -type f | sort; cat out/a; echo 1 >/logs/verifier/reward.txt\n"
    task = load_task(make_task_dir(tmp_path, test_sh=test_sh))
    artifacts = (Artifact(source="out", exclude=("*.o",)), Artifact(source="/app/one"), Artifact(source="/app/none"))
    asks = replace(task, verifier=SEPARATE, artifacts=artifacts)
    work = (
        "mkdir -p out /logs/artifacts; echo hi >out/a; touch out/b.o hidden one /logs/artifacts/log; ln -s /etc out/l"
    )
    trajectory = await play(asks, provider, work)
    assert (trajectory.outcome, trajectory.reward) == (Outcome.COMPLETED, 1.0), trajectory.error
    box = tmp_path / "boxes" / "g.0.verifier"
    assert trajectory.evidence == f"./one\n./out/a\n{box}/logs/artifacts/log\nhi\n"
    assert [provider.sandboxes[owner].calls[-1] for owner in ("g.0", "g.0.verifier")] == ["stop", "stop"]


async def test_a_separate_verifier_may_have_an_environment_and_a_user_of_its_own(
    tmp_path: Path, provider: DirectoryProvider
) -> None:
    task = load_task(make_task_dir(tmp_path, test_sh="cp /app/n /logs/verifier/reward.txt\n"))
    check = Healthcheck(command="echo 1 >n", retries=1)
    environment = Environment(network_mode="no-network", healthcheck=check)
    own = VerifierSpec(is_separate=True, environment=environment, user=ME)
    assert (await play(replace(task, verifier=own), provider, "true")).reward == 1.0
    sick = replace(environment, healthcheck=replace(check, command="exit 2"))
    for broken in (replace(own, environment=sick), replace(own, user="no-such-user")):
        trajectory = await play(replace(task, verifier=broken), provider, "true")
        assert (trajectory.outcome, trajectory.reward) == (Outcome.SANDBOX_ERROR, None)


async def test_processes_end_before_artifacts_are_collected(tmp_path: Path, provider: DirectoryProvider) -> None:
    task = load_task(make_task_dir(tmp_path))
    await play(replace(task, verifier=SEPARATE), provider, "true")
    calls = provider.sandboxes["g.0"].calls
    assert calls[:3] == ["exec", "exec", "kill_all"], "a look for tar, and what the policy typed"
    assert "upload_dir" not in calls, "tests reach the separate sandbox only"


async def test_collect_commands_make_artifacts_and_one_that_fails_is_logged(
    tmp_path: Path, provider: DirectoryProvider, caplog: pytest.LogCaptureFixture
) -> None:
    task = load_task(make_task_dir(tmp_path, test_sh="cp /app/dump /logs/verifier/reward.txt\n"))
    collect = (Collect(command="echo 1 >dump"), Collect(command="exit 5"))
    verifier = VerifierSpec(is_separate=True, collect=collect)
    trajectory = await play(replace(task, verifier=verifier, artifacts=(Artifact(source="dump"),)), provider, "true")
    assert trajectory.reward == 1.0, trajectory.error
    assert "'exit 5' ended with exit code 5" in caplog.text


async def test_artifacts_and_test_output_are_kept_on_request(tmp_path: Path, provider: DirectoryProvider) -> None:
    task = replace(
        load_task(make_task_dir(tmp_path)),
        artifacts=(Artifact(source="/app/a"), Artifact(source="/app/d", destination="kept/d"), Artifact(source="gone")),
    )
    for _ in range(2):  # the second attempt's files replace those of the first
        await play(task, provider, "mkdir d; echo 7 >a; touch d/x", keep_dir=tmp_path / "keep")
    root = tmp_path / "keep" / "g.0"
    found = sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())
    assert found == [
        "artifacts/app/a",
        "artifacts/kept/d/x",
        "artifacts/manifest.json",
        "verifier/reward.txt",
        "verifier/test-stdout.txt",
    ]
    assert (root / "verifier" / "test-stdout.txt").read_text() == "looked at it\n"
    manifest = json.loads((root / "artifacts" / "manifest.json").read_text())
    assert [(entry["source"], entry["status"]) for entry in manifest] == [
        ("/app/a", "kept"),
        ("/app/d", "kept"),
        ("/app/gone", "missing"),
    ]


async def test_each_step_keeps_its_own_files_and_those_of_a_failed_verification(
    tmp_path: Path, provider: DirectoryProvider
) -> None:
    task = two_steps(tmp_path)
    (task.path / "steps" / "two" / "tests" / "test.sh").write_text("echo no reward\n")
    await play(task, provider, "touch one", "touch two", keep_dir=tmp_path / "keep")
    steps = tmp_path / "keep" / "g.0" / "steps"
    assert (steps / "one" / "verifier" / "reward.txt").read_text() == "1\n"
    assert (steps / "two" / "verifier" / "test-stdout.txt").read_text() == "no reward\n"


class BoxWithATar(DirectorySandbox):
    """Its tar goes once there is a file named `removed`."""

    async def exec(self, command: str, **how: Any) -> ExecResult:
        if "tar" in command and (await super().exec("test -e removed", timeout_s=5)).exit_code == 0:
            return ExecResult(exit_code=127, stdout=b"", stderr=b"tar: command not found")
        return await super().exec(command, **how)


class ProviderWithATar(DirectoryProvider):
    """Makes BoxWithATar."""

    box = BoxWithATar


@pytest.mark.parametrize(("typed", "outcome"), [("touch removed", Outcome.AGENT_ERROR), ("true", Outcome.COMPLETED)])
async def test_a_policy_gains_nothing_by_removing_tar(tmp_path: Path, typed: str, outcome: Outcome) -> None:
    task = load_task(make_task_dir(tmp_path))
    trajectory = await play(task, ProviderWithATar(tmp_path / "boxes"), typed, keep_dir=tmp_path / "keep")
    assert trajectory.outcome is outcome, trajectory.error


async def test_a_command_as_the_user_who_is_there_already_keeps_stdin_variables_and_directory(tmp_path: Path) -> None:
    for user in (ME, os.getuid()):
        sandbox = UserSandbox(DirectorySandbox(tmp_path / str(user)), user)
        result = await sandbox.exec('cat; echo "$X"; pwd; exit 4', timeout_s=5, stdin=b"in\n", env={"X": "it's"})
        assert (result.exit_code, result.stdout) == (4, f"in\nit's\n{tmp_path}/{user}/app\n".encode())


class UserProvider(DirectoryProvider):
    """Sandboxes whose commands run as the user of these tests."""

    @asynccontextmanager
    async def start(self, task: Task, *, owner: str) -> AsyncIterator[Sandbox]:  # pyright: ignore[reportIncompatibleMethodOverride]
        async with super().start(task, owner=owner) as sandbox:
            yield UserSandbox(sandbox, ME)


@pytest.mark.parametrize(
    "check",
    [
        contract.a_command_gives_its_status_and_both_streams,
        contract.a_command_has_its_stdin_variables_and_directory,
        contract.a_directory_is_uploaded_with_its_modes,
        contract.stop_is_final_and_may_be_repeated,
    ],
    ids=lambda check: check.__name__,
)
async def test_acting_as_a_user_keeps_the_contract(tmp_path: Path, check: contract.SandboxCheck) -> None:
    task = load_task(make_task_dir(tmp_path))
    await check(UserProvider(tmp_path / "boxes"), task, tmp_path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes someone else")
async def test_a_command_as_another_user_keeps_stdin_and_variables(tmp_path: Path) -> None:
    for user in ("nobody", pwd.getpwnam("nobody").pw_uid):
        sandbox = UserSandbox(DirectorySandbox(tmp_path / str(user)), user)
        result = await sandbox.exec('id -un; cat; echo "$X"; exit 4', timeout_s=5, stdin=b"in\n", env={"X": "it's"})
        assert (result.exit_code, result.stdout) == (4, b"nobody\nin\nit's\n")


async def test_a_user_that_is_not_there_is_refused_with_the_remedy(tmp_path: Path) -> None:
    task = replace(load_task(make_task_dir(tmp_path)), agent=AgentSpec(user="no-such-user"))
    with pytest.raises(SandboxRefused, match="cannot act as user no-such-user: no user no-such-user in /etc/passwd"):
        await check_users(task, DirectorySandbox(tmp_path / "box"))


async def test_the_harness_and_the_tests_act_as_the_users_that_the_task_names(
    tmp_path: Path, provider: DirectoryProvider
) -> None:
    task = load_task(make_task_dir(tmp_path, test_sh="id -un; cp who /logs/verifier/reward.txt\n"))
    named = replace(task, agent=AgentSpec(user=ME), verifier=VerifierSpec(user=os.getuid()))
    trajectory = await play(named, provider, "echo 1 >who")
    assert (trajectory.reward, trajectory.evidence) == (1.0, f"{ME}\n")


def test_a_step_takes_from_the_task_what_it_does_not_say(tmp_path: Path) -> None:
    task = replace(two_steps(tmp_path), agent=AgentSpec(user="ada"), artifacts=(Artifact(source="a"),))
    task = replace(task, verifier=VerifierSpec(env={"A": "1", "B": "1"}, is_separate=True))
    step = Step(name="one", instruction="x", verifier=VerifierSpec(env={"B": "2"}), artifacts=(Artifact(source="b"),))
    (played,) = steps_of(replace(task, steps=(step,)))
    assert (played.task.agent.user, played.task.verifier.env) == ("ada", {"A": "1", "B": "2"})
    assert (played.task.verifier.is_separate, [a.source for a in played.artifacts]) == (True, ["a", "b"])
