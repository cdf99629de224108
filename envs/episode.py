"""One episode: a Task played once in a Sandbox of its own, judged, and recorded as a Trajectory.

Invariant: an EpisodeError always becomes the Trajectory's Outcome, here and nowhere else; every other exception is a
bug, or a cancellation, and propagates after the Sandbox was stopped. Called by envs/group.py.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Generator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from envs.errors import EpisodeError, GroupDeadline, HarnessTimeout
from envs.harness import Conversation, Harness
from envs.playable import refuse_unplayable
from envs.sandbox import Sandbox, SandboxProvider
from envs.steps import PlayedStep, judge, set_up, steps_of, whole_verdict
from envs.task import Task
from envs.timeouts import TimeoutRule, harbor_timeout_s, paper_timeout_s
from envs.users import check_users
from envs.verifier import Verdict
from trajectories.schema import DEFAULT_TREATMENTS, Outcome, Trajectory, Treatment

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """How Tasks are played: everything about a rollout but its Task and its name."""

    provider: SandboxProvider
    harness: Harness
    converse: Callable[[Task, str], Conversation]
    """A fresh Conversation for a Task and a trajectory id."""
    agent_timeout_s: float | None = None
    """Replaces the Task's own limit; None keeps it."""
    max_agent_timeout_s: float = 1800.0
    """Caps each Task's limit before the multiplier; a Task without a limit gets this one."""
    max_verifier_timeout_s: float = 120.0
    """Caps the limit of each Task's tests before the multiplier."""
    timeout_rule: TimeoutRule = TimeoutRule.HARBOR
    timeout_multiplier: float = 1.0
    treatments: Mapping[Outcome, Treatment] = field(default_factory=lambda: DEFAULT_TREATMENTS)
    """What each Outcome counts as; the Verifier runs for those that `score`."""
    keep_dir: Path | None = None
    """Artifacts and what the tests wrote stay in keep_dir/TRAJECTORY (of steps: .../steps/NAME); None keeps neither."""
    provenance: Mapping[str, str] = field(default_factory=dict[str, str])
    """Goes into every Trajectory: sampler, task set, run."""

    def __post_init__(self) -> None:
        for name in ("agent_timeout_s", "max_agent_timeout_s", "max_verifier_timeout_s", "timeout_multiplier"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"{name} must be above 0, got {value}")
        missing = [outcome.value for outcome in Outcome if outcome not in self.treatments]
        if missing:
            raise ValueError(f"treatments must name every outcome; missing: {', '.join(missing)}")

    def agent_limit_s(self, task: Task) -> float:
        """Seconds the harness may run, by the rule; `agent_timeout_s` goes before the Task's limit in both."""
        wanted_s = self.agent_timeout_s if self.agent_timeout_s is not None else task.limits.agent_timeout_s
        if self.timeout_rule is TimeoutRule.PAPER:
            return paper_timeout_s(wanted_s, multiplier=self.timeout_multiplier)
        cap_s = self.max_agent_timeout_s
        limit_s = harbor_timeout_s(wanted_s, max_s=cap_s, multiplier=self.timeout_multiplier)
        return cap_s * self.timeout_multiplier if limit_s is None else limit_s  # Harbor would wait forever

    def verifier_limit_s(self, task: Task) -> float:
        """Seconds the tests may run; the paper's rule is for agents, so its multiplier leaves them alone."""
        multiplier = 1.0 if self.timeout_rule is TimeoutRule.PAPER else self.timeout_multiplier
        limit_s = harbor_timeout_s(task.verifier.timeout_s, max_s=self.max_verifier_timeout_s, multiplier=multiplier)
        assert limit_s is not None  # a Task's tests always have a limit
        return limit_s


async def run_episode(
    task: Task, *, episode: Episode, trajectory_id: str, group_id: str, member: int, deadline_s: float | None = None
) -> Trajectory:
    """The Trajectory of one rollout, its Turns kept however it ended.

    A rollout still running `deadline_s` seconds from now ends as `cancelled` (None: never). TaskError before anything
    is started when the Task asks for what no episode does.
    """
    refuse_unplayable(task)
    conversation = episode.converse(task, trajectory_id)
    ending, timings_s = _Ending(), dict[str, float]()
    with ending.boundary():
        async with (
            _limited(deadline_s, GroupDeadline(f"not done {deadline_s} s after its group began")),
            _started(episode.provider, task, trajectory_id, timings_s) as sandbox,
        ):
            await check_users(task, sandbox)
            for step in steps_of(task):
                with ending.boundary(), _timed(timings_s, "harness"):
                    await set_up(step, task, sandbox, is_kept=episode.keep_dir is not None)
                    await _act(step, sandbox, conversation, episode)
                if episode.treatments[ending.outcome] is not Treatment.SCORE:
                    break
                with ending.boundary(), _timed(timings_s, "verifier"):
                    ending.verdicts[step] = await _judge(step, task, sandbox, trajectory_id, episode)
                if not ending.passed(step):
                    break
            ending.is_final = True
    verdict = ending.verdict(task, episode)
    return Trajectory(
        id=trajectory_id,
        task_id=task.id,
        group_id=group_id,
        member=member,
        prompt=conversation.prompt,
        turns=tuple(conversation.turns),
        outcome=ending.outcome,
        reward=verdict.reward if verdict else None,
        evidence=verdict.evidence if verdict else "",
        error=ending.error,
        timings_s=timings_s,
        provenance={
            **episode.provenance,
            "family": task.provenance.family,
            "harness": episode.harness.name,
            "sandbox": episode.provider.name,
        },
    )


async def _act(step: PlayedStep, sandbox: Sandbox, conversation: Conversation, episode: Episode) -> None:
    """Plays a step, within its limit."""
    limit_s = episode.agent_limit_s(step.task)
    async with _limited(limit_s, HarnessTimeout(f"harness did not end within {limit_s:g} s")):
        await episode.harness.run(step.task, step.inside(sandbox), conversation)


async def _judge(step: PlayedStep, whole: Task, sandbox: Sandbox, trajectory_id: str, episode: Episode) -> Verdict:
    """The Verdict on a step."""
    keep = episode.keep_dir and episode.keep_dir / trajectory_id
    return await judge(
        step,
        whole,
        sandbox,
        provider=episode.provider,
        owner=trajectory_id,
        timeout_s=episode.verifier_limit_s(step.task),
        keep=keep / "steps" / step.name if keep and step.name else keep,
    )


class _Ending:
    """How the rollout ends, as far as it is known: completed until an EpisodeError says otherwise."""

    def __init__(self) -> None:
        self.outcome = Outcome.COMPLETED
        self.error = ""
        self.verdicts = dict[PlayedStep, Verdict]()
        self.is_final = False

    def verdict(self, task: Task, episode: Episode) -> Verdict | None:
        """That on the whole Task; None when the Outcome does not score, whatever earlier steps came to."""
        is_scored = episode.treatments[self.outcome] is Treatment.SCORE
        return whole_verdict(task, self.verdicts) if self.verdicts and is_scored else None

    def passed(self, step: PlayedStep) -> bool:
        """Whether the step was judged, and well enough for the next one to be played."""
        return step in self.verdicts and step.is_passed(self.verdicts[step])

    @contextmanager
    def boundary(self) -> Generator[None]:
        """Turns an EpisodeError inside into the Outcome; the one place that does."""
        try:
            yield
        except EpisodeError as error:
            line = f"{type(error).__name__}: {error}"
            if self.is_final:  # stopping failed: the rollout's result stands, and the provider's sweep finds the rest
                logger.warning("sandbox not stopped cleanly after outcome=%s: %s", self.outcome, line)
                return
            self.outcome, self.error = error.outcome, line


@asynccontextmanager
async def _limited(limit_s: float | None, late: EpisodeError) -> AsyncGenerator[None]:
    """Raises `late` when the block runs longer; a TimeoutError of the block's own propagates as the bug it is.

    An EpisodeError that comes while the block is being ended for lateness is a consequence of it.
    """
    timer = asyncio.timeout(limit_s)
    try:
        async with timer:
            yield
    except (TimeoutError, EpisodeError):
        if not timer.expired():
            raise
    if timer.expired():
        raise late


@asynccontextmanager
async def _started(
    provider: SandboxProvider, task: Task, owner: str, timings_s: dict[str, float]
) -> AsyncGenerator[Sandbox]:
    """The Task's Sandbox, with the seconds that starting and stopping it took."""
    began = time.monotonic()
    try:
        async with provider.start(task, owner=owner) as sandbox:
            timings_s["sandbox_start"] = time.monotonic() - began
            try:
                yield sandbox
            finally:
                began = time.monotonic()
    finally:
        timings_s["sandbox_stop" if "sandbox_start" in timings_s else "sandbox_start"] = time.monotonic() - began


@contextmanager
def _timed(timings_s: dict[str, float], stage: str) -> Generator[None]:
    """Adds the seconds of the block, however it ends."""
    began = time.monotonic()
    try:
        yield
    finally:
        timings_s[stage] = timings_s.get(stage, 0.0) + time.monotonic() - began
