"""What the fakes promise of steps, separate verifiers, users and tool harnesses, kept in real boxes."""

import json
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path

import pytest

from envs.answer import AnswerForm, AnswerHarness
from envs.bash_tools import BashTools
from envs.conversation import ScriptedConversation
from envs.episode import Episode, run_episode
from envs.errors import SandboxError
from envs.harbor import load_task
from envs.harness import Conversation, Harness
from envs.local.provider import LocalProvider
from envs.sandbox import Sandbox
from envs.task import AgentSpec, Artifact, Environment, Task, VerifierSpec
from envs.terminus2.harness import Terminus2
from tests.envs.local.boxes import make_provider
from tests.envs.task_dirs import make_task_dir
from tests.envs.test_steps import two_steps
from trajectories.schema import Outcome, Trajectory

pytestmark = pytest.mark.sandbox

SUBMIT = '<tool_call>{"name": "submit"}</tool_call>'


@pytest.fixture
async def provider() -> AsyncGenerator[LocalProvider]:
    provider = make_provider()
    yield provider
    await provider.close()


def bash(command: str) -> str:
    return f"<tool_call>{json.dumps({'name': 'bash', 'arguments': {'command': command}})}</tool_call>"


async def play(
    task: Task, provider: LocalProvider, harness: Harness, *replies: str, keep_dir: Path | None = None
) -> Trajectory:
    episode = Episode(
        provider=provider,
        harness=harness,
        converse=lambda task, key: ScriptedConversation(replies),
        keep_dir=keep_dir,
    )
    return await run_episode(task, episode=episode, trajectory_id="t", group_id="g", member=0)


async def test_steps_share_a_box_and_separate_verifiers_see_their_artifacts_alone(
    provider: LocalProvider, tmp_path: Path
) -> None:
    verifier = VerifierSpec(is_separate=True, user="root")
    artifacts = (Artifact(source="/app/one"), Artifact(source="/app/two"))
    task = replace(two_steps(tmp_path), verifier=verifier, artifacts=artifacts, agent=AgentSpec(user=0))
    replies = (bash("mkdir d; cd d; touch ../one ../secret"), SUBMIT, bash("ls one secret && touch two"), SUBMIT)
    trajectory = await play(task, provider, BashTools(), *replies, keep_dir=tmp_path / "keep")
    assert (trajectory.outcome, trajectory.reward) == (Outcome.COMPLETED, 1.0), trajectory
    kept = sorted(
        str(p.relative_to(tmp_path / "keep" / "t" / "steps")) for p in tmp_path.rglob("keep/t/steps/*/artifacts/app/*")
    )
    assert kept == ["one/artifacts/app/one", "two/artifacts/app/one", "two/artifacts/app/two"]


class WithoutTmux:
    """Takes every program but a few out of the PATH, then lets the harness play."""

    name = "without-tmux"

    def __init__(self, harness: Harness) -> None:
        self._harness = harness

    async def run(self, task: Task, sandbox: Sandbox, conversation: Conversation) -> None:
        link = "/bin/mkdir -p /opt/bin && /bin/ln -s /bin/bash /bin/cat /bin/mkdir /bin/rm /bin/mv /opt/bin/"
        assert (await sandbox.exec(link, timeout_s=20)).exit_code == 0
        assert (await sandbox.exec("command -v tmux", timeout_s=20)).exit_code == 1
        await self._harness.run(task, sandbox, conversation)


async def test_bash_tools_and_answers_need_no_tmux(provider: LocalProvider, tmp_path: Path) -> None:
    test_sh = 'read -r text </app/answer.py; [[ $text == "x = 1" ]]; echo $((1 - $?)) >/logs/verifier/reward.txt\n'
    plain = load_task(make_task_dir(tmp_path, test_sh=test_sh))
    environment = Environment(network_mode="no-network", env={"PATH": "/opt/bin"})
    task = replace(plain, environment=environment, metadata={"answer_file": "answer.py"})
    tools = WithoutTmux(BashTools())
    trajectory = await play(task, provider, tools, bash("echo x = 1 >answer.py; cat answer.py"), SUBMIT)
    assert (trajectory.reward, trajectory.turns[0].observation) == (
        1.0,
        "<tool_response>\nx = 1\n[exit status 0]\n</tool_response>",
    )
    answer = WithoutTmux(AnswerHarness(AnswerForm.CODE))
    assert (await play(task, provider, answer, "Here:\n```py\nx = 1\n```")).reward == 1.0
    terminal = await play(task, provider, WithoutTmux(Terminus2()), "{}")
    assert terminal.outcome == Outcome.SANDBOX_ERROR
    assert terminal.error.startswith(f"{SandboxError.__name__}: no tmux in the Sandbox; install it")


async def test_a_call_past_its_deadline_leaves_the_box_usable(provider: LocalProvider, tmp_path: Path) -> None:
    task = load_task(make_task_dir(tmp_path))
    slow = json.dumps({"name": "bash", "arguments": {"command": "cd /tmp; sleep 60 & sleep 60", "timeout": 0.5}})
    trajectory = await play(task, provider, BashTools(), f"<tool_call>{slow}</tool_call>", bash("pwd"), SUBMIT)
    told = [turn.observation for turn in trajectory.turns[:2]]
    assert told == [
        "<tool_response>\n[killed: it did not end within 0.5 s]\n</tool_response>",
        "<tool_response>\n/app\n[exit status 0]\n</tool_response>",
    ]


async def test_a_command_longer_than_an_argument_may_be_runs_in_the_same_directory(
    provider: LocalProvider, tmp_path: Path
) -> None:
    task = load_task(make_task_dir(tmp_path))
    paste = "cat >a <<'X'\n" + "it's é\n" * 40_000 + "X\nwc -l <a; pwd; false"
    trajectory = await play(task, provider, BashTools(), bash("mkdir d; cd d"), bash(paste), bash("ls"), SUBMIT)
    told = [turn.observation for turn in trajectory.turns[1:3]]
    assert told == [
        "<tool_response>\n40000\n/app/d\n[exit status 1]\n</tool_response>",
        "<tool_response>\na\n[exit status 0]\n</tool_response>",
    ]
