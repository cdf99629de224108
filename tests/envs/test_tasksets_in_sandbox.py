"""The task sets in real sandboxes: their solutions solve them, and what judges them is hidden from the agent."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from envs.conversation import ScriptedConversation
from envs.episode import Episode, run_episode
from envs.group import run_group
from envs.harbor import load_task
from envs.harness import Conversation
from envs.local.provider import LocalProvider
from envs.sandbox import Sandbox
from envs.task import Task
from envs.tasksets import humaneval, shell
from envs.tasksets.shell_families import FAMILIES
from tests.envs.task_dirs import load_tasks, make_task_dir
from tests.fakes.harness import FunctionHarness
from trajectories.schema import Outcome

pytestmark = pytest.mark.sandbox


@pytest.fixture
async def provider() -> AsyncIterator[LocalProvider]:
    provider = LocalProvider()
    yield provider
    await provider.close()


def make_episode(provider: LocalProvider, play) -> Episode:
    return Episode(
        provider=provider,
        harness=FunctionHarness(play),
        converse=lambda task, trajectory_id: ScriptedConversation(()),
    )


async def solve(task: Task, sandbox: Sandbox, conversation: Conversation) -> None:
    command = (task.path / "solution" / "solve.sh").read_text()
    assert (await sandbox.exec(command, timeout_s=20)).exit_code == 0


async def do_nothing(task: Task, sandbox: Sandbox, conversation: Conversation) -> None:
    pass


async def play(task: Task, episode: Episode) -> tuple[Outcome, float | None, str]:
    trajectory = await run_episode(task, episode=episode, trajectory_id=f"{task.id}.0", group_id=task.id, member=0)
    return trajectory.outcome, trajectory.reward, trajectory.error


async def test_solutions_solve_and_nothing_does_not(provider: LocalProvider, tmp_path: Path) -> None:
    shell.write_task_set(tmp_path, split="heldout", count=2 * len(FAMILIES), families=tuple(FAMILIES))
    tasks = load_tasks(tmp_path)
    solved = await asyncio.gather(*(play(task, make_episode(provider, solve)) for task in tasks))
    assert solved == [(Outcome.COMPLETED, 1.0, "")] * len(tasks)
    idle = await asyncio.gather(*(play(task, make_episode(provider, do_nothing)) for task in tasks))
    assert idle == [(Outcome.COMPLETED, 0.0, "")] * len(tasks)


async def test_humaneval_solutions_pass_their_checks(provider: LocalProvider, tmp_path: Path) -> None:
    humaneval.write_task_set(tmp_path)
    tasks = load_tasks(tmp_path, names=[f"humaneval-{index:03d}" for index in (0, 32, 72, 125)])
    solved = await asyncio.gather(*(play(task, make_episode(provider, solve)) for task in tasks))
    assert solved == [(Outcome.COMPLETED, 1.0, "")] * len(tasks)
    assert (await play(tasks[0], make_episode(provider, do_nothing)))[1] == 0.0


async def test_neither_solution_nor_tests_are_in_the_sandbox_of_an_agent(
    provider: LocalProvider, tmp_path: Path
) -> None:
    path = make_task_dir(tmp_path, test_sh="# marker-zq7x\necho 1 >/logs/verifier/reward.txt\n")
    (path / "solution" / "solve.sh").write_text("# marker-zq7x\n")
    (path / "environment" / "files").mkdir()
    (path / "environment" / "files" / "given.txt").write_text("marker-zq7x\n")
    (path / "environment" / "Dockerfile").write_text("FROM scratch\nWORKDIR /app\nCOPY files/ /app/\n")
    found: dict[str, list[str]] = {}

    async def search(task: Task, sandbox: Sandbox, conversation: Conversation) -> None:
        """Every file with the marker in it, and every file or directory with a telling name, but in the host's /usr."""
        shared = " -o ".join(f"-path {p}" for p in ("/proc", "/sys", "/dev", "/usr", "'/lib*'", "/bin", "/sbin"))
        places = rf"find / \( {shared} \) -prune -o"
        for name, command in {
            "by content": rf"{places} -type f -exec grep -l marker-[z]q7x {{}} + 2>/dev/null",
            "by name": rf"{places} -regex '.*/\(solve\.sh\|test\.sh\|given\.txt\|tests\|solution\)' -print",
            "host path": f"ls -d {task.path} {task.path.parent}",
        }.items():
            result = await sandbox.exec(command, timeout_s=60)
            found[name] = result.stdout.decode().split()

    outcome, reward, _ = await play(load_task(path), make_episode(provider, search))
    assert (outcome, reward) == (Outcome.COMPLETED, 1.0)
    assert found == {"by content": ["/app/given.txt"], "by name": ["/app/given.txt"], "host path": []}


async def test_a_process_left_by_the_agent_is_gone_before_the_tests(provider: LocalProvider, tmp_path: Path) -> None:
    test_sh = "sleep 1\n[ -f /tmp/forged ] && r=1 || r=0\necho $r >/logs/verifier/reward.txt\n"
    path = make_task_dir(tmp_path, test_sh=test_sh)

    async def linger(task: Task, sandbox: Sandbox, conversation: Conversation) -> None:
        forge = "sleep 0.5; while sleep 0.02; do touch /tmp/forged; echo 1 >/logs/verifier/reward.json; done"
        await sandbox.exec(f"setsid bash -c '{forge}' >/dev/null 2>&1 </dev/null &", timeout_s=5)

    assert await play(load_task(path), make_episode(provider, linger)) == (Outcome.COMPLETED, 0.0, "")


@pytest.mark.parametrize(
    "wreck",
    ["rm -rf /app /tmp /logs", "chmod 000 /app", "mkdir -p /tests && chmod 000 /tests", "mkdir -p /logs/verifier/x/y"],
)
async def test_wrecking_the_places_of_the_tests_gains_nothing(
    provider: LocalProvider, tmp_path: Path, wreck: str
) -> None:
    shell.write_task_set(tmp_path, split="train", count=1)

    async def spoil(task: Task, sandbox: Sandbox, conversation: Conversation) -> None:
        await sandbox.exec(wreck, timeout_s=5)

    outcome, reward, error = await play(load_tasks(tmp_path)[0], make_episode(provider, spoil))
    assert (outcome, reward) in [(Outcome.COMPLETED, 0.0), (Outcome.AGENT_ERROR, None)], error


async def test_a_group_in_real_sandboxes_shares_nothing(provider: LocalProvider, tmp_path: Path) -> None:
    shell.write_task_set(tmp_path, split="train", count=1)
    (task,) = load_tasks(tmp_path)
    turns = iter(range(4))

    async def half_solve(task: Task, sandbox: Sandbox, conversation: Conversation) -> None:
        if next(turns) % 2 == 0:
            await solve(task, sandbox, conversation)

    group = await run_group(task, size=4, episode=make_episode(provider, half_solve), group_id="g", deadline_s=60)
    assert sorted(trajectory.reward or 0.0 for trajectory in group.trajectories) == [0.0, 0.0, 1.0, 1.0]
