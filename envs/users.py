"""Acting as a user: the commands of a harness or of tests, run as the user that the Task names.

Invariant: a command runs as that user or not at all; files still come and go as the Sandbox's own user. Called by
envs/episode.py for harnesses and by envs/verifier.py for tests.
"""

import shlex
from collections.abc import Mapping
from pathlib import Path

from envs.errors import SandboxRefused
from envs.sandbox import ExecResult, Sandbox
from envs.task import Task

User = str | int
"""A name, or a number, of the Sandbox's /etc/passwd."""

_CHECK_LIMIT_S = 30.0

# The passwd file is read on a descriptor of its own, because the command's stdin must stay the caller's.
_AS_USER = """\
who={user}
if [[ $EUID == "$who" || $(id -un) == "$who" ]]; then exec bash -c {command}; fi
while IFS=: read -r name _ uid _ <&9; do
    if [[ $name == "$who" || $uid == "$who" ]]; then exec su -s /bin/bash "$name" -c {command} 9<&-; fi
done 9</etc/passwd
echo "no user $who in /etc/passwd" >&2
exit 126
"""


def as_user(command: str, user: User | None) -> str:
    """The bash command that runs `command` as `user`, its directory, stdin and variables kept but for HOME and USER."""
    return command if user is None else _AS_USER.format(user=shlex.quote(str(user)), command=shlex.quote(command))


def users_at_work(task: Task) -> tuple[User, ...]:
    """Those that the Task names for the Sandbox that its agent uses."""
    users = [task.agent.user, *(step.agent.user for step in task.steps)]
    for verifier in (task.verifier, *(step.verifier for step in task.steps)):
        users += [collect.user for collect in verifier.collect]
        users += [] if verifier.is_separate or task.verifier.is_separate else [verifier.user]
    return tuple(sorted({user for user in users if user is not None}, key=str))


async def check_users(task: Task, sandbox: Sandbox) -> None:
    """Raises SandboxRefused when the Sandbox cannot act as one of `users_at_work`."""
    for user in users_at_work(task):
        result = await sandbox.exec(as_user("true", user), timeout_s=_CHECK_LIMIT_S)
        if result.exit_code:
            said = result.stderr.decode(errors="replace").strip()[-300:] or f"exit code {result.exit_code}"
            raise SandboxRefused(
                f"cannot act as user {user}: {said}; the Task's image must have that user, and the provider must let "
                "its sandboxes change users (docker, podman and daytona do)"
            )


class UserSandbox:
    """A Sandbox whose commands run as `user`."""

    def __init__(self, sandbox: Sandbox, user: User) -> None:
        self.workdir = sandbox.workdir
        self._sandbox = sandbox
        self._user = user

    async def exec(
        self,
        command: str,
        *,
        timeout_s: float,
        env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
        cwd: str | None = None,
    ) -> ExecResult:
        """See Sandbox."""
        command = as_user(command, self._user)
        return await self._sandbox.exec(command, timeout_s=timeout_s, env=env, stdin=stdin, cwd=cwd)

    async def write_file(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """See Sandbox."""
        await self._sandbox.write_file(path, data, mode=mode)

    async def read_file(self, path: str, *, max_bytes: int = 1 << 20) -> bytes | None:
        """See Sandbox."""
        return await self._sandbox.read_file(path, max_bytes=max_bytes)

    async def upload_dir(self, source: Path, target: str) -> None:
        """See Sandbox."""
        await self._sandbox.upload_dir(source, target)

    async def kill_all(self) -> None:
        """See Sandbox."""
        await self._sandbox.kill_all()

    async def stop(self) -> None:
        """See Sandbox."""
        await self._sandbox.stop()
