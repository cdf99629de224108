"""A program inside a sandbox without a network reaches the gateway's door, and nothing else. About 5 s in all."""

import asyncio
import os
import socket
from pathlib import Path

import pytest

from envs.agent_command import DOOR_PORT, AgentCommandConfig
from envs.build import EpisodeConfig, HarnessName
from envs.errors import AgentCommandError
from envs.harbor import load_task
from envs.local.provider import LocalConfig
from envs.task import Task
from tests.envs.agents import END, agent_episode, play, python, scripted_sampler, write_model
from tests.envs.task_dirs import make_task_dir
from tests.envs.test_steps import two_steps
from tests.envs.tokens import text_ids
from trajectories.samples import trajectory_samples
from trajectories.schema import Outcome

ASK = """
import json, os, urllib.request
def ask(messages, **more):
    body = {"model": os.environ["THRESHER_MODEL"], "messages": messages, **more}
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)) as answer:
        return json.load(answer)["choices"][0]["message"]
"""
PLAY = (
    ASK
    + """
messages = [{"role": "user", "content": os.environ["THRESHER_INSTRUCTION"]}]
for _ in range(2):
    messages.append(ask(messages))
    os.system(messages[-1]["content"])
    messages.append({"role": "user", "content": "done"})
"""
)
PROBE = (
    ASK
    + """
import errno, socket, subprocess
def attempt(name, family, address):
    try:
        with socket.socket(family) as s:
            s.settimeout(3)
            s.connect(address)
        print(name, "reached")
    except OSError as error:
        print(name, errno.errorcode.get(error.errno, type(error).__name__))
attempt("door", socket.AF_INET, ("127.0.0.1", DOOR))
attempt("host-port", socket.AF_INET, ("127.0.0.1", PORT))
attempt("outside", socket.AF_INET, ("192.0.2.1", 80))
attempt("host-abstract", socket.AF_UNIX, ABSTRACT)
attempt("host-socket", socket.AF_UNIX, PATH)
print("interfaces", sorted(name for _, name in socket.if_nameindex()))
print("sockets", subprocess.run(["find", "/", "-xdev", "-type", "s"], capture_output=True, text=True).stdout.split())
print("door-directory", os.listdir("/.thresher-door"))
try:
    open("/.thresher-door/x", "w")
    print("door-writable")
except OSError as error:
    print("door-write", errno.errorcode[error.errno])
ask([{"role": "user", "content": "x"}])
"""
)

LATE = """
import socket
request = "GET /v1/models HTTP/1.1\\r\\nHost: x\\r\\nAuthorization: Bearer %s\\r\\n\\r\\n"
with socket.socket(socket.AF_UNIX) as door:
    door.connect("/.thresher-door/door.sock")
    door.sendall((request % open("/app/key").read()).encode())
    print(door.recv(99))
"""


@pytest.fixture
def task(tmp_path: Path) -> Task:
    check = "[ -f /app/made ]; echo $((1 - $?)) >/logs/verifier/reward.txt\n"
    return load_task(make_task_dir(tmp_path, test_sh=check))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model")


@pytest.mark.sandbox
async def test_a_program_plays_a_task_and_yields_a_trainable_trajectory(task: Task, model: Path) -> None:
    sampler = scripted_sampler("ls", "touch made")
    async with agent_episode(model, sampler, python(PLAY)) as episode:
        trajectory = await play(task, episode)
    assert (trajectory.outcome, trajectory.reward, trajectory.error) == (Outcome.COMPLETED, 1.0, "")
    assert [(turn.reply, turn.observation) for turn in trajectory.turns] == [("ls", "done"), ("touch made", "")]
    assert (trajectory.prompt, trajectory.provenance["harness"]) == (task.instruction, "agent-command")
    (sample,) = trajectory_samples(trajectory)
    (prompt, _, key), (last_prompt, _, _) = sampler.calls
    assert key == "t"
    assert sample.ids.tolist() == [*last_prompt, *text_ids("touch made"), END]
    assert last_prompt[: len(prompt) + 3] == (*prompt, *text_ids("ls"), END)
    assert int(sample.mask.sum()) == 3 + 11


@pytest.mark.sandbox
async def test_the_steps_of_a_task_are_played_in_one_session(model: Path, tmp_path: Path) -> None:
    sampler = scripted_sampler("touch one", "touch two")
    async with agent_episode(model, sampler, python(PLAY.replace("range(2)", "range(1)"))) as episode:
        trajectory = await play(two_steps(tmp_path), episode)
    assert (trajectory.outcome, trajectory.reward, trajectory.error) == (Outcome.COMPLETED, 1.0, "")
    assert [turn.reply for turn in trajectory.turns] == ["touch one", "touch two"]
    assert len(trajectory_samples(trajectory)) == 2, "the program began a dialogue of its own in each step"


@pytest.mark.sandbox
async def test_the_door_is_all_that_can_be_reached(task: Task, model: Path, tmp_path: Path) -> None:
    abstract = f"\0thresher-test-{os.getpid()}"
    with socket.socket() as port, socket.socket(socket.AF_UNIX) as hidden, socket.socket(socket.AF_UNIX) as plain:
        port.bind(("127.0.0.1", 0))
        hidden.bind(abstract)
        plain.bind(str(tmp_path / "plain.sock"))
        for listener in (port, hidden, plain):
            listener.listen()
        number = port.getsockname()[1]
        names = f"DOOR, PORT, ABSTRACT, PATH = {DOOR_PORT}, {number}, {abstract!r}, {str(tmp_path / 'plain.sock')!r}\n"
        probe = names + PROBE
        command = f"{python(probe)} > /logs/agent/found; cp /logs/agent/found /app"
        check = "cat /app/found; echo 1 >/logs/verifier/reward.txt\n"
        (task.path / "tests" / "test.sh").write_text(check)
        async with agent_episode(model, scripted_sampler("y"), command) as episode:
            trajectory = await play(task, episode)
    found = dict(line.split(" ", 1) for line in trajectory.evidence.splitlines())
    assert found == {
        "door": "reached",
        "host-port": "ECONNREFUSED",
        "outside": "ENETUNREACH",
        "host-abstract": "ECONNREFUSED",
        "host-socket": "ENOENT",
        "interfaces": "['lo']",
        "sockets": "[]",
        "door-directory": "['door.sock']",
        "door-write": "EROFS",
    }


@pytest.mark.sandbox
async def test_a_token_is_void_once_its_rollout_is_over(task: Task, model: Path) -> None:
    """What the agent hid for later finds the door shut when the tests run."""
    keep = python(ASK + "ask([{'role': 'user', 'content': 'x'}]); open('key', 'w').write(os.environ['OPENAI_API_KEY'])")
    (task.path / "tests" / "late.py").write_text(LATE)
    check = "/usr/bin/python3 $(dirname $0)/late.py; echo 1 >/logs/verifier/reward.txt\n"
    (task.path / "tests" / "test.sh").write_text(check)
    async with agent_episode(model, scripted_sampler("y"), keep) as episode:
        trajectory = await play(task, episode)
    assert trajectory.outcome is Outcome.COMPLETED
    assert "401 Unauthorized" in trajectory.evidence


@pytest.mark.sandbox
async def test_a_program_that_fails_later_is_the_agents_error(task: Task, model: Path) -> None:
    command = python(ASK + "ask([{'role': 'user', 'content': 'x'}]); raise SystemExit('gave up')")
    async with agent_episode(model, scripted_sampler("y"), command) as episode:
        trajectory = await play(task, episode)
    assert trajectory.outcome is Outcome.AGENT_ERROR
    assert "exit status 1: gave up" in trajectory.error
    assert len(trajectory.turns) == 1


@pytest.mark.sandbox
async def test_a_program_that_is_not_there_ends_the_run(task: Task, model: Path) -> None:
    async with agent_episode(model, scripted_sampler(), "no-such-agent") as episode:
        with pytest.raises(AgentCommandError, match=r"exit status 127: .*no-such-agent"):
            await play(task, episode)


@pytest.mark.sandbox
async def test_limits_end_as_themselves(task: Task, model: Path) -> None:
    ask_on = python(ASK + "\nwhile True: ask([{'role': 'user', 'content': 'x'}])")
    async with agent_episode(model, scripted_sampler("y", "y", "y"), ask_on, max_turns=2) as episode:
        assert (await play(task, episode)).outcome is Outcome.TURN_LIMIT
    ask_long = python(ASK + "\nask([{'role': 'user', 'content': 'x' * 99}])")
    async with agent_episode(model, scripted_sampler(), ask_long, context_tokens=50) as episode:
        assert (await play(task, episode)).outcome is Outcome.CONTEXT_LIMIT
    async with agent_episode(model, scripted_sampler(), "sleep 60", agent_timeout_s=0.3) as episode:
        trajectory = await play(task, episode)
    assert (trajectory.outcome, trajectory.reward) == (Outcome.AGENT_TIMEOUT, 0.0)


@pytest.mark.sandbox
async def test_members_of_a_group_have_doors_to_their_own_sessions(task: Task, model: Path) -> None:
    sampler = scripted_sampler(*["touch made"] * 8)
    async with agent_episode(model, sampler, python(PLAY)) as episode:
        trajectories = await asyncio.gather(*(play(task, episode) for _ in range(4)))
    assert [len(trajectory.turns) for trajectory in trajectories] == [2] * 4
    assert all(len(trajectory_samples(trajectory)) == 1 for trajectory in trajectories)


def test_a_command_and_its_harness_go_together() -> None:
    with pytest.raises(ValueError, match="go together"):
        EpisodeConfig(harness=HarnessName.AGENT_COMMAND)
    with pytest.raises(ValueError, match="go together"):
        EpisodeConfig(agent=AgentCommandConfig(command="x"))


@pytest.mark.parametrize("mount", ["/a", "a:/b", "/a:b", "/a:/", "/a:/b:/c"])
def test_a_mount_names_two_paths(mount: str) -> None:
    with pytest.raises(ValueError, match="HOST:INSIDE"):
        LocalConfig(mounts=(mount,))


def test_a_variable_of_an_agent_has_a_name() -> None:
    with pytest.raises(ValueError, match="NAME=VALUE"):
        AgentCommandConfig(command="x", env=("=1",))
