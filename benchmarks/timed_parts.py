"""Timed rollouts: a harness and a sandbox that take time and nothing else, under the shipped control plane.

Invariant: everything between them is the product's own (rollout workers, sockets, conversations, store, buffer), and a
rollout's script follows from its id alone, so a driver knows what an excluded one would have brought.
Called by benchmarks/{control_plane,async_loop,usable_data}.py and by the test of what crosses the driver.
"""

import asyncio
import json
import math
import os
import random
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.loop_probe import LoopProbe
from envs.build import EpisodeConfig
from envs.conversation import SampledConversation
from envs.creation import CreationGate
from envs.episode import Episode
from envs.errors import SandboxError
from envs.harness import Conversation
from envs.remote_sampler import Teacher
from envs.sampler import Sampler
from envs.sandbox import ExecResult, Sandbox
from envs.task import Environment, Limits, Provenance, Task, VerifierSpec
from learners.config import LossConfig
from learners.plan import RankPlan

MESSAGE_IDS = tuple(range(1, 33))


def timed_task(name: str) -> Task:
    """A Task that asks for nothing."""
    return Task(
        id=name,
        instruction="",
        environment=Environment(),
        verifier=VerifierSpec(),
        limits=Limits(),
        provenance=Provenance(),
        path=Path("/nonexistent"),
    )


class TimedRank:
    """A learner rank whose update takes `update_s` seconds."""

    def __init__(self, update_s: float) -> None:
        self._update_s = update_s

    def forward_backward(self, plan: RankPlan, loss: LossConfig) -> dict[str, float]:
        """See Learner."""
        time.sleep(self._update_s)
        return {}

    def optim_step(self) -> dict[str, float]:
        """See Learner."""
        return {}


class CountedRenderer:
    """A Renderer whose every message is the same 32 ids."""

    stop_ids = (0,)

    def first(self, prompt: str) -> tuple[int, ...]:
        """See Renderer."""
        return MESSAGE_IDS

    def next(
        self, context_ids: Sequence[int], sampled_ids: Sequence[int], observation: str
    ) -> tuple[int, tuple[int, ...]]:
        """See Renderer."""
        return len(context_ids) + len(sampled_ids), MESSAGE_IDS

    def decode(self, ids: Sequence[int]) -> str:
        """See Renderer."""
        return "ok"


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """What one rollout will do."""

    latencies_s: tuple[float, ...]
    """Seconds its sandbox takes to answer each Turn."""
    fails: bool
    """Whether its sandbox dies of its provider's fault after the last Turn."""
    reward: float


@dataclass(frozen=True, kw_only=True)
class TimedEpisodes:
    """An EpisodeBuilder of timed rollouts; picklable."""

    seed: int = 0
    min_turns: int = 4
    max_turns: int = 4
    latency_s: float = 0.0
    """Mean seconds of a sandbox's answer, log-normal."""
    sigma: float = 1.0
    """Standard deviation of the latency's logarithm."""
    failure_rate: float = 0.0
    """Share of rollouts whose sandbox fails."""
    failures_grow: bool = False
    """A rollout fails in proportion to its Turns, at the same rate over all."""
    solved_first: float = 0.5
    """Probability that a rollout of one Turn is solved."""
    solved_per_turn: float = 0.0
    """What each further Turn adds to it."""
    probes: Path | None = None
    """Where each worker leaves what it timed of itself when it closes."""

    def script(self, trajectory_id: str) -> Script:
        """The script of this rollout, the same in every process."""
        draw = random.Random(f"{self.seed}/{trajectory_id}")
        num_turns = draw.randint(self.min_turns, self.max_turns)
        failure_rate = self.failure_rate
        if self.failures_grow:
            failure_rate *= num_turns / ((self.min_turns + self.max_turns) / 2)
        fails = draw.random() < failure_rate
        solved = draw.random() < self.solved_first + self.solved_per_turn * (num_turns - 1)
        middle = math.log(self.latency_s) - self.sigma**2 / 2 if self.latency_s else 0.0
        latencies_s = tuple(
            draw.lognormvariate(middle, self.sigma) if self.latency_s else 0.0 for _ in range(num_turns)
        )
        return Script(latencies_s=latencies_s, fails=fails, reward=float(solved))

    def __call__(
        self,
        config: EpisodeConfig,
        *,
        model: Path | None,
        sampler: Sampler | Teacher | None,
        run: str,
        gate: CreationGate | None,
    ) -> Episode:
        """The Episode of a worker; only `config` and `sampler` are looked at."""
        assert sampler is not None and not isinstance(sampler, Teacher), "timed rollouts sample"
        renderer = CountedRenderer()

        def converse(task: Task, key: str) -> Conversation:
            return SampledConversation(
                renderer,
                sampler,
                config.sampling,
                max_turns=self.max_turns,
                context_tokens=config.context_tokens,
                key=key,
            )

        return Episode(provider=TimedProvider(self), harness=TimedHarness(), converse=converse)


class TimedSandbox:
    """A Sandbox in which a command takes its script's time, and whose Verifier finds its script's reward."""

    workdir = "/"

    def __init__(self, script: Script) -> None:
        self.script = script

    async def exec(
        self,
        command: str,
        *,
        timeout_s: float,
        env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
        cwd: str | None = None,
    ) -> ExecResult:
        """Whatever is run has the reward file's content as its output, as the Verifier expects it."""
        return ExecResult(exit_code=0, stdout=b"reward.txt\n%d\0" % self.script.reward, stderr=b"")

    async def write_file(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """See Sandbox."""

    async def read_file(self, path: str, *, max_bytes: int = 1 << 20) -> bytes | None:
        """See Sandbox."""
        return None

    async def upload_dir(self, source: Path, target: str) -> None:
        """See Sandbox."""

    async def kill_all(self) -> None:
        """See Sandbox."""

    async def stop(self) -> None:
        """See Sandbox."""


class TimedHarness:
    """Asks for a reply and waits for its sandbox, as often as the script says."""

    name = "timed"

    async def run(self, task: Task, sandbox: Sandbox, conversation: Conversation) -> None:
        """See Harness; SandboxError at the end of a script that fails."""
        assert isinstance(sandbox, TimedSandbox)
        for latency_s in sandbox.script.latencies_s:
            await conversation.ask("go on")
            if latency_s:
                await asyncio.sleep(latency_s)
        if sandbox.script.fails:
            raise SandboxError("the script says so")


class TimedProvider:
    """Makes TimedSandboxes, counts those alive, and times the event loop that it lives in."""

    name = "timed"

    def __init__(self, episodes: TimedEpisodes) -> None:
        self._episodes = episodes
        self._num_alive = 0
        self._busy_s = 0.0
        self._probe = LoopProbe(lambda: self._num_alive)

    async def provenance(self) -> Mapping[str, str]:
        """Begins to time the loop."""
        self._probe.begin()
        return {"provider": self.name}

    async def close(self) -> None:
        """Writes what was timed."""
        ticks = self._probe.end()
        if self._episodes.probes is not None:
            record = {"ticks": ticks, "cpu_s": time.process_time(), "busy_s": self._busy_s}
            (self._episodes.probes / f"{os.getpid()}.json").write_text(json.dumps(record))

    @asynccontextmanager
    async def start(self, task: Task, *, owner: str) -> AsyncIterator[Sandbox]:
        """See SandboxProvider."""
        began = time.monotonic()
        self._num_alive += 1
        try:
            yield TimedSandbox(self._episodes.script(owner))
        finally:
            self._num_alive -= 1
            self._busy_s += time.monotonic() - began
