"""Users of an image: the agent and the tests act as them in a container, by its own su. About 3 s."""

import json
import shutil
from pathlib import Path

import pytest

from envs.bash_tools import BashTools
from envs.containers.provider import ContainerProvider
from envs.conversation import ScriptedConversation
from envs.episode import Episode, run_episode
from envs.harbor import load_task
from envs.task import Task
from tests.envs.containers.base_image import libraries
from tests.envs.local.boxes import IS_ROOT
from tests.envs.task_dirs import make_task_dir
from trajectories.schema import Outcome, Trajectory

pytestmark = [pytest.mark.sandbox, pytest.mark.skipif(not IS_ROOT, reason="podman is set up for root here")]

PASSWD = "root:x:0:0:root:/root:/bin/bash\nada:x:1234:1234::/home/ada:/bin/bash\n"
PAM = "auth sufficient pam_rootok.so\naccount sufficient pam_permit.so\nsession sufficient pam_permit.so\n"
TEST_SH = "id -u; [ -O /app/mine ] && echo 1 >/logs/verifier/reward.txt\n"
TOML = '[agent]\nuser = "{agent}"\n[verifier]\nuser = 1234\n[environment]\nnetwork_mode = "no-network"\n'


def task_with_users(root: Path, image: str, *, agent: str) -> Task:
    """An image with ada in it, and this machine's su."""
    path = make_task_dir(root, toml=TOML.format(agent=agent), test_sh=TEST_SH)
    su = shutil.which("su")
    modules = [next(Path("/").glob(f"lib/*/security/pam_{name}.so")) for name in ("rootok", "permit")]
    assert su is not None
    files = {"bin/su": Path(su)} | {str(module).lstrip("/"): module for module in modules}
    files |= {library.lstrip("/"): Path(library) for library in libraries([su, *map(str, modules)])}
    for name, source in files.items():
        target = path / "environment" / "root" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)
        target.chmod(0o755)
    for name, text in {"etc/passwd": PASSWD, "etc/pam.d/su": PAM}.items():
        target = path / "environment" / "root" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
    dockerfile = f"FROM {image}\nCOPY root/ /\nRUN mkdir -p /home/ada && chown 1234 /app /home/ada\n"
    (path / "environment" / "Dockerfile").write_text(dockerfile)
    return load_task(path)


async def play(task: Task, provider: ContainerProvider) -> Trajectory:
    call = {"name": "bash", "arguments": {"command": "id -un; echo $HOME; touch mine; touch /root/not"}}
    replies = [f"<tool_call>{json.dumps(call)}</tool_call>", '<tool_call>{"name": "submit"}</tool_call>']
    episode = Episode(provider=provider, harness=BashTools(), converse=lambda task, key: ScriptedConversation(replies))
    return await run_episode(task, episode=episode, trajectory_id="t", group_id="g", member=0)


async def test_agent_and_tests_act_as_users_of_the_image_and_one_it_lacks_is_refused(
    image: str, provider: ContainerProvider, tmp_path: Path
) -> None:
    trajectory = await play(task_with_users(tmp_path / "a", image, agent="ada"), provider)
    assert (trajectory.outcome, trajectory.reward, trajectory.evidence) == (Outcome.COMPLETED, 1.0, "1234\n"), (
        trajectory
    )
    told = trajectory.turns[0].observation
    assert "\nada\n/home/ada\n" in told
    assert "Permission denied" in told
    refused = await play(task_with_users(tmp_path / "b", image, agent="bob"), provider)
    assert (refused.outcome, refused.turns) == (Outcome.SANDBOX_ERROR, ())
    assert "cannot act as user bob: no user bob in /etc/passwd" in refused.error
