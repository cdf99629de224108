"""One step of the asynchronous loop: take Groups, train on them, publish what came of it.

Invariant: a step consumes the Groups of exactly one `take` and publishes exactly one version; what takes, trains and
publishes is given, so that a benchmark of the loop runs this very function. Called by recipes/rloo.py and
benchmarks/async_loop.py.

Consumes: `groups_per_step` finished Groups. Waits for: Groups that are fresh enough (`take`), the learner, the stage of
the new weights (and every server, with a barrier). Unblocks: admission, as soon as the servers have the new version.
"""

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Protocol

from trajectories.handle import GroupHandle
from trajectories.metrics import summarize_groups
from trajectories.schema import DEFAULT_TREATMENTS, PolicyVersion


class GroupStream(Protocol):
    """Where Groups come from: a RolloutStream."""

    async def take(self, version: PolicyVersion, deadline_s: float) -> list[GroupHandle]:
        """The Groups of one step at `version`; raises when they do not come within `deadline_s`."""
        ...


class Publisher(Protocol):
    """Who hands weights to the servers: a WeightSync."""

    async def publish(self, version: PolicyVersion) -> dict[str, float]:
        """Publishes the learner's weights as `version`."""
        ...


Update = Callable[[Sequence[GroupHandle]], Awaitable[dict[str, float]]]
"""One optimizer step on these Groups; returns its metrics."""


async def training_step(
    version: PolicyVersion, *, stream: GroupStream, update: Update, publisher: Publisher, take_deadline_s: float
) -> dict[str, float]:
    """Takes at `version`, trains, publishes the next version; the step's metrics, with its seconds under "time/"."""
    clock = _Clock()
    groups = await stream.take(version, take_deadline_s)
    metrics = clock.lap("take_s") | summarize_groups(groups, DEFAULT_TREATMENTS, version=version)
    metrics |= await update(groups)
    metrics |= clock.lap("train_s")
    metrics |= await publisher.publish(replace(version, n=version.n + 1))
    return metrics | clock.lap("publish_s")


class _Clock:
    """Seconds since the last lap."""

    def __init__(self) -> None:
        self._began = time.monotonic()

    def lap(self, name: str) -> dict[str, float]:
        now = time.monotonic()
        seconds, self._began = now - self._began, now
        return {f"time/{name}": seconds}
