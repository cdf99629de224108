"""The steps of a Task: each is set up, then played by the harness, then judged; a Task without steps is one step.

Invariant: what a step was judged by is gone before the next one is played; in its own eyes each step is a whole Task.
Called by envs/episode.py.
"""

import logging
import math
import shlex
import shutil
import tempfile
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from envs.artifacts import download_dir, keep_artifacts, place_artifacts, require_tar
from envs.errors import SandboxDied, SandboxError, VerifierError
from envs.healthcheck import wait_healthy
from envs.sandbox import Sandbox, SandboxProvider
from envs.task import AgentSpec, Artifact, Healthcheck, Step, Task, VerifierSpec
from envs.users import UserSandbox, as_user, check_users
from envs.verifier import Verdict, verify

logger = logging.getLogger(__name__)

_SETUP_LIMIT_S = 600.0
_CLEAR = "rm -rf /tests /logs/verifier && mkdir -p -m 777 /logs/verifier"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlayedStep:
    """One step as it is played."""

    name: str
    """"" of a Task without steps."""
    is_first: bool
    task: Task
    """A Task of this step alone, for the harness and for the Verifier."""
    tests: tuple[Path, ...]
    """Directories that are laid over each other as /tests."""
    files: Path | None
    """Copied into the working directory before the step; its setup.sh is then run."""
    artifacts: tuple[Artifact, ...]
    step: Step | None

    def is_passed(self, verdict: Verdict) -> bool:
        """Whether no reward is below the step's floor; a key that the tests did not write is below any."""
        if self.step is None:
            return True
        return all(verdict.rewards.get(key, -math.inf) >= floor for key, floor in self.step.min_reward.items())

    def inside(self, sandbox: Sandbox) -> Sandbox:
        """The Sandbox as the harness uses it."""
        user = self.task.agent.user
        return sandbox if user is None else UserSandbox(sandbox, user)


def steps_of(task: Task) -> tuple[PlayedStep, ...]:
    """The steps in their order."""
    if task.steps:
        return tuple(_played(task, step, is_first=k == 0) for k, step in enumerate(task.steps))
    tests = (task.path / "tests",)
    return (
        PlayedStep(name="", is_first=True, task=task, tests=tests, files=None, artifacts=task.artifacts, step=None),
    )


def separate_tasks(task: Task) -> tuple[Task, ...]:
    """The Tasks whose Sandboxes separate verifiers use, as a provider is given them."""
    return tuple(_separate_task(step, task) for step in steps_of(task) if step.task.verifier.is_separate)


def whole_verdict(task: Task, verdicts: Mapping[PlayedStep, Verdict]) -> Verdict:
    """The Verdict on a Task, of those on the steps that were played: their mean, key by key, or the last.

    Means of rewards {a: 1, b: 1} and {a: 0}: a 0.5, b 0.5, as a missing key counts as 0.
    """
    *_, last = verdicts.values()
    if not task.steps:
        return last
    evidence = "".join(f"[step {step.name}: reward {v.reward:g}]\n{v.evidence}" for step, v in verdicts.items())
    if task.step_rewards == "final":
        return replace(last, evidence=evidence)
    keys = sorted({key for verdict in verdicts.values() for key in verdict.rewards})
    means = {key: fmean(verdict.rewards.get(key, 0.0) for verdict in verdicts.values()) for key in keys}
    return Verdict(reward=fmean(v.reward for v in verdicts.values()), evidence=evidence, rewards=means)


async def set_up(step: PlayedStep, whole: Task, sandbox: Sandbox, *, is_kept: bool) -> None:
    """Brings the step's files, runs its setup.sh and waits for its health; `is_kept`: artifacts will stay on the host.

    What fails is the Task's or the provider's doing (SandboxError) in the first step, and counts as the agent's
    (SandboxDied) after it: a policy must not gain by breaking what comes next.
    """
    failure = SandboxError if step.is_first else SandboxDied
    if not step.is_first:
        cleared = await sandbox.exec(_CLEAR, timeout_s=_SETUP_LIMIT_S, cwd="/")
        if cleared.exit_code:
            raise failure(f"step {step.name}: the last step's tests could not be removed")
    if step.files is not None:
        await sandbox.upload_dir(step.files, sandbox.workdir)
        if (step.files / "setup.sh").is_file():
            script = f"cd {shlex.quote(sandbox.workdir)} && bash ./setup.sh"
            result = await step.inside(sandbox).exec(script, timeout_s=_SETUP_LIMIT_S, cwd="/")
            if result.exit_code:
                said = result.stderr.decode(errors="replace").strip()[-300:]
                raise failure(f"step {step.name}: setup.sh ended with exit code {result.exit_code}: {said}")
    if step.is_first and (is_kept or whole.verifier.is_separate or step.task.verifier.is_separate):
        await require_tar(sandbox)
    checks = (whole.environment.healthcheck if step.is_first else None, step.step.healthcheck if step.step else None)
    await _wait_healthy(checks, step.inside(sandbox), failure)


async def judge(
    step: PlayedStep,
    whole: Task,
    sandbox: Sandbox,
    *,
    provider: SandboxProvider,
    owner: str,
    timeout_s: float,
    keep: Path | None,
) -> Verdict:
    """The Verdict on a step; its artifacts and what its tests wrote stay under `keep`, if that is given.

    A separate verifier's Sandbox is started only now, and sees the artifacts alone. Files of an earlier attempt at the
    same rollout give way.
    """
    if keep is None and not step.task.verifier.is_separate:
        return await verify(step.task, sandbox, timeout_s=timeout_s, tests=step.tests)
    await sandbox.kill_all()
    await _collect(step, sandbox)
    with _folder(keep) as folder:
        kept = await keep_artifacts(step.artifacts, sandbox, folder / "artifacts")
        if not step.task.verifier.is_separate:
            return await _verify(step, sandbox, timeout_s=timeout_s, keep=keep)
        separate_task = _separate_task(step, whole)
        async with provider.start(separate_task, owner=f"{owner}.verifier") as separate:
            await check_users(separate_task, separate)
            await _wait_healthy((separate_task.environment.healthcheck,), separate, SandboxError)
            await place_artifacts(kept, separate)
            return await _verify(step, separate, timeout_s=timeout_s, keep=keep)


def _played(task: Task, step: Step, *, is_first: bool) -> PlayedStep:
    path = task.path / "steps" / step.name
    of_task, of_step = task.verifier, step.verifier
    verifier = replace(
        of_step,
        env={**of_task.env, **of_step.env},
        user=of_task.user if of_step.user is None else of_step.user,
        is_separate=of_step.is_separate or of_task.is_separate,
        environment=of_step.environment or of_task.environment,
        collect=(*of_task.collect, *of_step.collect),
    )
    user = task.agent.user if step.agent.user is None else step.agent.user
    return PlayedStep(
        name=step.name,
        is_first=is_first,
        task=replace(
            task,
            instruction=step.instruction,
            agent=replace(step.agent, user=user),
            verifier=verifier,
            limits=task.limits if step.limits.agent_timeout_s is None else step.limits,
            path=path,
            steps=(),
        ),
        tests=tuple(folder for folder in (task.path / "tests", path / "tests") if folder.is_dir()),
        files=path / "workdir" if (path / "workdir").is_dir() else None,
        artifacts=(*task.artifacts, *step.artifacts),
        step=step,
    )


def _separate_task(step: PlayedStep, whole: Task) -> Task:
    """Another id where it is another environment, because providers remember what they prepared by it."""
    spec = step.task.verifier
    return replace(
        whole,
        id=whole.id if spec.environment is None else f"{whole.id}.verifier",
        environment=spec.environment or whole.environment,
        agent=AgentSpec(user=spec.user),  # the only one at work inside
        verifier=VerifierSpec(),
        steps=(),
    )


async def _wait_healthy(
    checks: Sequence[Healthcheck | None], sandbox: Sandbox, failure: type[SandboxError | SandboxDied]
) -> None:
    for check in checks:
        if check is not None and (problem := await wait_healthy(check, sandbox)):
            raise failure(f"not healthy: {problem}")


async def _collect(step: PlayedStep, sandbox: Sandbox) -> None:
    """Runs the commands that gather artifacts; one that fails leaves nothing to keep, and the log says so."""
    for collect in step.task.verifier.collect:
        result = await sandbox.exec(as_user(collect.command, collect.user), timeout_s=collect.timeout_s)
        if result.exit_code:
            logger.warning(
                "task=%s collect %r ended with exit code %d", step.task.id, collect.command, result.exit_code
            )


async def _verify(step: PlayedStep, sandbox: Sandbox, *, timeout_s: float, keep: Path | None) -> Verdict:
    """As `verify`, and what the tests wrote is kept, a failure's too."""
    try:
        result = await verify(step.task, sandbox, timeout_s=timeout_s, tests=step.tests)
    except VerifierError as error:
        result = error
    if keep is not None:
        status = await download_dir(sandbox, "/logs/verifier", keep / "verifier")
        if status != "kept":
            logger.warning("task=%s %s: /logs/verifier %s", step.task.id, keep, status)
    if isinstance(result, VerifierError):
        raise result
    return result


@contextmanager
def _folder(keep: Path | None) -> Generator[Path]:
    """Where artifacts lie on the host: for good, or for the time of a separate verification."""
    if keep is None:
        with tempfile.TemporaryDirectory(prefix="thresher-artifacts-") as folder:
            yield Path(folder)
        return
    shutil.rmtree(keep, ignore_errors=True)
    yield keep
