"""The Group buffer: admits Groups, holds finished ones, and hands each step its Groups within the staleness bound.

Invariant: a Group is consumed at version v only if every token that could be trained was sampled at v - max_staleness
or later (DOWN_WEIGHT alone relaxes this, and counts it), and every permit ends as exactly one Group consumed or given
back, with a counted reason.
Called by actors/rollout_pool (admit, start, put) and by recipes (take, advance); lives in one event loop.

Why WAIT neither drops nor deadlocks: when servers sample at version w or later, at most
(max_staleness + w + 1) * groups_per_step Groups were ever admitted and not given back. Of those that may hold tokens
of version v - max_staleness or older, v * groups_per_step were consumed before step v, so at most groups_per_step are
left, and `take(v)` waits for the running ones among them and takes the oldest first: none is left behind.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from trajectories.handle import GroupHandle, MemberSummary
from trajectories.metrics import power_of_two_at_least
from trajectories.schema import DEFAULT_TREATMENTS, Outcome, PolicyVersion, Treatment
from trajectories.staleness import oldest_version, staleness
from trajectories.validity import member_reward, member_rewards, no_gradient

logger = logging.getLogger(__name__)

_MAX_NAMED = 8


class StalenessPolicy(StrEnum):
    """What happens to a Group that is about to be too old."""

    WAIT = "wait"
    """`take` waits for it, so the learner never passes the version that would strand it. Loses no rollout."""
    DROP = "drop"
    """It is given back, counted by length: biased against long rollouts."""
    DOWN_WEIGHT = "down_weight"
    """It is consumed all the same, counted by length and logged: the bound is relaxed, and whoever trains on it gives
    it the weight of trajectories/staleness.down_weight."""


class GiveBack(StrEnum):
    """Why the buffer itself gave a Group back; NoGradient's values are the other reasons."""

    STALE = "stale"
    ABANDONED_LINEAGE = "abandoned_lineage"
    """It holds tokens of weights that a restore from an earlier checkpoint threw away."""
    SURPLUS = "surplus"
    """It was played before a restart, and there was no permit for it any more."""


class EndOfTasks(Exception):
    """The buffer is closed and no Group is left."""


class TakeTimeout(TimeoutError):
    """The Groups of a step did not come within the deadline; the message names those that are missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Live:
    """A Group that holds a permit: admitted, then running, then buffered."""

    since: float
    """Monotonic time of its last change, seconds."""
    start: PolicyVersion | None = None
    """Oldest version that its tokens may come from; None before it runs."""
    handle: GroupHandle | None = None
    """None before it is finished."""


class GroupBuffer:
    """Paces one stream of Groups; see the module's docstring."""

    def __init__(
        self,
        *,
        groups_per_step: int,
        max_staleness: int,
        version: PolicyVersion,
        policy: StalenessPolicy = StalenessPolicy.WAIT,
        refill: bool = False,
        min_valid: int = 2,
        treatments: Mapping[Outcome, Treatment] = DEFAULT_TREATMENTS,
        forks: Mapping[int, int] | None = None,
        on_given_back: Callable[[str, str], None] = lambda group_id, reason: None,
    ) -> None:
        """`version` is what every server serves now; `forks`, after a restart, is what it descends from (Ancestry).

        `on_given_back` is told the id of each Group that will not be consumed, and why.

        `refill` gives Groups without gradient back (fewer than `min_valid` valid members, or zero variance) instead of
        keeping them.
        """
        if groups_per_step < 1 or max_staleness < 0 or min_valid < 1:
            raise ValueError(
                "groups_per_step and min_valid must be >= 1 and max_staleness >= 0, "
                f"got {groups_per_step}, {min_valid}, {max_staleness}"
            )
        self.version = version
        self.num_consumed = version.n * groups_per_step
        """Groups behind the weights, those before a restart included."""
        self.max_staleness_seen = 0
        """Versions between the oldest token consumed and the step that consumed it, at most."""
        self._groups_per_step = groups_per_step
        self._max_staleness = max_staleness
        self._policy = policy
        self._refill = refill
        self._min_valid = min_valid
        self._treatments = treatments
        self._on_given_back = on_given_back
        self._forks = dict(forks or {})  # earlier lineage -> the last n whose weights these descend from
        self._live: dict[str, _Live] = {}  # in the order of admission
        self._given_back: Counter[str] = Counter()
        self._stale_by_tokens: Counter[int] = Counter()
        self._beyond_by_tokens: Counter[int] = Counter()
        self._is_closed = False
        self._changed = asyncio.Event()

    @property
    def num_permits(self) -> int:
        """How many Groups may be admitted now; negative after a restore while too many are alive."""
        allowed = (self._max_staleness + self.version.n + 1) * self._groups_per_step
        return allowed - self.num_consumed - len(self._live)

    async def admit(self, group_id: str) -> None:
        """Returns once `group_id` holds a permit. Waits for `take`, `advance` or a permit given back."""
        while True:
            if self._is_closed:
                raise EndOfTasks(f"group {group_id} came after the buffer was closed")
            if group_id in self._live:
                raise ValueError(f"group {group_id} is already admitted; a Group's id is used once")
            if self.num_permits > 0:
                break
            await self._changed.wait()
        self._live[group_id] = _Live(since=time.monotonic())

    def start(self, group_id: str, version: PolicyVersion) -> None:
        """The admitted Group runs now, and none of its tokens will be older than `version`."""
        live = self._get(group_id, "start")
        if live.start is not None:
            raise ValueError(f"group {group_id} was started before")
        if version < self.version:
            raise ValueError(
                f"group {group_id} may sample at {_name(version)}, before {_name(self.version)}: "
                "advance the buffer only when every routable server has the version"
            )
        self._live[group_id] = replace(live, start=version, since=time.monotonic())

    def put(self, handle: GroupHandle) -> bool:
        """Hands a finished Group in; False when it was given back at once instead of kept."""
        live = self._get(handle.group_id, "put")
        if live.start is None or live.handle is not None:
            raise ValueError(f"group {handle.group_id} is not running: put each Group once, after start")
        oldest = oldest_version(handle, self._treatments) or live.start
        if oldest < live.start:
            raise ValueError(
                f"group {handle.group_id} holds tokens of {_name(oldest)} but started at {_name(live.start)}"
            )
        self._live[handle.group_id] = replace(live, handle=handle, since=time.monotonic())
        reason = no_gradient(member_rewards(handle, self._treatments), min_valid=self._min_valid)
        if not self._is_kin(handle):
            self.give_back(handle.group_id, GiveBack.ABANDONED_LINEAGE)
        elif self._refill and reason is not None:
            self.give_back(handle.group_id, reason)
        self._notify()
        return handle.group_id in self._live

    def holds(self, group_id: str) -> bool:
        """Whether the Group has a permit now: admitted, running or buffered."""
        return group_id in self._live

    def readmit(self, handle: GroupHandle) -> bool:
        """Takes a Group in that was finished before a restart or restore; False when it was given back at once."""
        if handle.group_id in self._live:
            raise ValueError(f"group {handle.group_id} is already admitted; a Group's id is used once")
        has_permit = self.num_permits > 0
        self._live[handle.group_id] = _Live(since=time.monotonic(), start=self.version, handle=handle)
        if not self._is_kin(handle):
            self.give_back(handle.group_id, GiveBack.ABANDONED_LINEAGE)
        elif not self._is_fresh(handle, self.version):
            self.give_back(handle.group_id, GiveBack.STALE)
        elif not has_permit:
            self.give_back(handle.group_id, GiveBack.SURPLUS)
        self._notify()
        return handle.group_id in self._live

    def give_back(self, group_id: str, reason: str) -> None:
        """The Group will not be consumed: its permit returns, counted under `reason`."""
        live = self._get(group_id, "give back")
        del self._live[group_id]
        self._given_back[reason] += 1
        if live.handle is not None and reason == GiveBack.STALE:
            self._stale_by_tokens[power_of_two_at_least(_longest(live.handle))] += 1
        logger.info("group=%s version=%s given back: %s", group_id, _name(self.version), reason)
        self._on_given_back(group_id, reason)
        self._notify()

    async def take(self, version: PolicyVersion, deadline_s: float) -> list[GroupHandle]:
        """Exactly groups_per_step Groups for the step at `version`, oldest first.

        Waits for finished Groups and, under WAIT, for each running one that would be too old at the next version.
        After `close` it returns fewer once no more can come, and raises EndOfTasks when none is left. TakeTimeout names
        the Groups that are missing after `deadline_s` and changes nothing: it may be called again.
        """
        if version.lineage != self.version.lineage or version < self.version:
            raise ValueError(f"take at {_name(version)}, but the servers are at {_name(self.version)}")
        try:
            async with asyncio.timeout(deadline_s):
                while not self._is_ready(version):
                    await self._changed.wait()
        except TimeoutError:
            raise TakeTimeout(self._describe_missing(version, deadline_s)) from None
        return self._consume(version)

    def advance(self, version: PolicyVersion) -> None:
        """From now on whatever is sampled is sampled at `version` or later: every routable server has it."""
        if version.lineage != self.version.lineage or version < self.version:
            raise ValueError(f"cannot advance from {_name(self.version)} to {_name(version)}; `restore` goes back")
        self.version = version
        self._notify()

    def restore(self, version: PolicyVersion) -> None:
        """The learner went back to a checkpoint: `version` is of a new lineage, and every server has it.

        Groups with tokens of weights past the checkpoint are given back, running ones when they finish.
        """
        if version.lineage <= self.version.lineage:
            raise ValueError(
                f"cannot restore from {_name(self.version)} to {_name(version)}: a restore starts a lineage"
            )
        self._forks = {lineage: min(n, version.n) for lineage, n in self._forks.items()}
        self._forks[self.version.lineage] = version.n
        self.version = version
        self.num_consumed = version.n * self._groups_per_step
        for group_id, handle in self._finished():
            if not self._is_kin(handle):
                self.give_back(group_id, GiveBack.ABANDONED_LINEAGE)
        self._notify()

    def reopen(self) -> None:
        """Undoes `close`: Groups may be admitted again."""
        self._is_closed = False

    def close(self) -> None:
        """No more Groups will be admitted: ends waiting `admit`s, and lets `take` return what is left."""
        self._is_closed = True
        self._notify()

    def describe_running(self, most: int = _MAX_NAMED) -> str:
        """The Groups that have not finished, longest first: "a@0.0 (running since version 0:2, 31 s), b@0.0 ..."."""
        now = time.monotonic()
        waiting = sorted((live.since, group_id, live) for group_id, live in self._live.items() if live.handle is None)
        named = [
            f"{group_id} ({'admitted' if live.start is None else f'running since {_name(live.start)}'}, "
            f"{now - since:.0f} s)"
            for since, group_id, live in waiting[:most]
        ]
        more = f" and {len(waiting) - most} more" if len(waiting) > most else ""
        return f"{', '.join(named) or 'none is running'}{more}"

    def metrics(self) -> dict[str, float]:
        """Sizes now, and totals of what was given back: by reason, and stale Groups by their longest member.

        `beyond` are those that DOWN_WEIGHT let through beyond the bound, by their longest member too.
        """
        finished = sum(live.handle is not None for live in self._live.values())
        sizes = {"running": len(self._live) - finished, "buffered": finished, "permits": self.num_permits}
        reasons = {f"given_back/{reason}": count for reason, count in self._given_back.items()}
        lengths = {f"stale/tokens_le_{edge}": count for edge, count in sorted(self._stale_by_tokens.items())}
        lengths |= {f"beyond/tokens_le_{edge}": count for edge, count in sorted(self._beyond_by_tokens.items())}
        return {f"buffer/{key}": float(value) for key, value in (sizes | reasons | lengths).items()}

    def _is_ready(self, version: PolicyVersion) -> bool:
        if self._policy is not StalenessPolicy.DOWN_WEIGHT:
            for group_id, handle in self._finished():
                if not self._is_fresh(handle, version):
                    self.give_back(group_id, GiveBack.STALE)
        unfinished = [live for live in self._live.values() if live.handle is None]
        if self._policy is StalenessPolicy.WAIT and any(self._would_strand(live, version) for live in unfinished):
            return False
        num_finished = len(self._live) - len(unfinished)
        return num_finished >= self._groups_per_step or (self._is_closed and not unfinished)

    def _consume(self, version: PolicyVersion) -> list[GroupHandle]:
        finished = [handle for _, handle in self._finished()]
        handles = sorted(finished, key=self._age)[: self._groups_per_step]  # stable: ties by admission
        if not handles:
            raise EndOfTasks(f"no Group is left at {_name(version)} and the buffer is closed")
        for handle in handles:
            if not self._is_fresh(handle, version):
                self._let_through(handle, version)
            self.max_staleness_seen = max(self.max_staleness_seen, staleness(handle, version, self._treatments))
            del self._live[handle.group_id]
        self.num_consumed += len(handles)
        self._notify()
        return handles

    def _let_through(self, handle: GroupHandle, version: PolicyVersion) -> None:
        assert self._policy is StalenessPolicy.DOWN_WEIGHT, f"group {handle.group_id} is too old at {_name(version)}"
        self._beyond_by_tokens[power_of_two_at_least(_longest(handle))] += 1
        age = staleness(handle, version, self._treatments)
        logger.info("group=%s version=%s consumed at age %d, beyond the bound", handle.group_id, _name(version), age)

    def _age(self, handle: GroupHandle) -> int:
        """Sort key, oldest first: version of the oldest token; without any, that of the Group's start."""
        start = self._live[handle.group_id].start
        assert start is not None
        oldest = oldest_version(handle, self._treatments)
        return start.n if oldest is None else oldest.n

    def _would_strand(self, live: _Live, version: PolicyVersion) -> bool:
        """Whether an unfinished Group can be consumed at `version` at the latest."""
        start = live.start or self.version
        return self._is_ancestor(start) and start.n <= version.n - self._max_staleness

    def _is_fresh(self, handle: GroupHandle, version: PolicyVersion) -> bool:
        return staleness(handle, version, self._treatments) <= self._max_staleness

    def _is_kin(self, handle: GroupHandle) -> bool:
        """Whether every token comes from weights that the present ones descend from.

        A member that spans two lineages is refused: its handle does not tell how far it went in the first.
        """
        return all(
            member.min_version.lineage == member.max_version.lineage and self._is_ancestor(member.max_version)
            for member in self._trained(handle)
            if member.min_version is not None and member.max_version is not None
        )

    def _is_ancestor(self, version: PolicyVersion) -> bool:
        return version.lineage == self.version.lineage or version.n <= self._forks.get(version.lineage, -1)

    def _trained(self, handle: GroupHandle) -> list[MemberSummary]:
        """The members that are not excluded; excluded ones are trained on nowhere, so their age does not matter."""
        return [member for member in handle.members if member_reward(member, self._treatments) is not None]

    def _finished(self) -> list[tuple[str, GroupHandle]]:
        return [(group_id, live.handle) for group_id, live in self._live.items() if live.handle is not None]

    def _get(self, group_id: str, verb: str) -> _Live:
        if group_id not in self._live:
            raise ValueError(f"cannot {verb} group {group_id}: it is not admitted, or already consumed or given back")
        return self._live[group_id]

    def _describe_missing(self, version: PolicyVersion, deadline_s: float) -> str:
        return (
            f"step {_name(version)} waited {deadline_s:g} s: {len(self._finished())} of {self._groups_per_step} Groups "
            f"are finished, {self.num_permits} may still be admitted, and these did not come: {self.describe_running()}"
        )

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def _longest(handle: GroupHandle) -> int:
    return max((sum(branch.num_tokens for branch in member.branches) for member in handle.members), default=0)


def _name(version: PolicyVersion) -> str:
    return f"version {version.lineage}:{version.n}"
