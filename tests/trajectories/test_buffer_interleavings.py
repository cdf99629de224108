"""Random interleavings of a learner, rollouts and weight syncs against one Group buffer.

Workers die, and so does the learner, which then goes back to a checkpoint under a new lineage. A model keeps the books
beside it. Shown: the bound holds for every consumed token, no token of weights that were thrown away is trained on,
each permit is accounted for, no Group is lost, and with WAIT nothing is ever given back as stale and every step ends
(no deadlock).
"""

import asyncio

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.trajectories.records import LOCATION, scored_group, version
from trajectories.buffer import GroupBuffer, StalenessPolicy
from trajectories.handle import GroupHandle, summarize
from trajectories.schema import PolicyVersion
from trajectories.staleness import down_weight

REWARDS = st.lists(st.sampled_from([0.0, 1.0, None]), min_size=1, max_size=3)


class Interleavings(RuleBasedStateMachine):
    """`served` is what the servers serve; the learner may be one version ahead of it."""

    policy = StalenessPolicy.WAIT

    @initialize(groups_per_step=st.integers(1, 3), max_staleness=st.integers(0, 3), refill=st.booleans())
    def begin(self, groups_per_step: int, max_staleness: int, refill: bool) -> None:
        self.loop = asyncio.new_event_loop()
        self.groups_per_step, self.max_staleness, self.refill = groups_per_step, max_staleness, refill
        self.buffer = GroupBuffer(
            groups_per_step=groups_per_step,
            max_staleness=max_staleness,
            version=version(0),
            policy=self.policy,
            refill=refill,
        )
        self.learner = self.served = self.lineage = 0
        self.forks: dict[int, int] = {}
        self.last_served: dict[int, int] = {}
        self.num_made = 0
        self.admitted: list[str] = []
        self.running: dict[str, PolicyVersion] = {}
        self.finished: dict[str, GroupHandle] = {}
        self.consumed: list[str] = []
        self.given_back: list[str] = []
        self.unlearned: list[str] = []
        self.num_beyond = 0
        self.taking: asyncio.Task[list[GroupHandle]] | None = None

    @rule()
    def admit(self) -> None:
        group_id = f"g{self.num_made}"
        task = self.loop.create_task(self.buffer.admit(group_id))
        self._settle()
        if self.permits() > 0:
            assert task.done()
            task.result()
            self.num_made += 1
            self.admitted.append(group_id)
        else:
            assert not task.done(), "admitted beyond the permits"
            task.cancel()
            self._settle()

    @rule(count=st.integers(2, 6))
    def launch(self, count: int) -> None:
        for _ in range(min(count, self.permits())):
            self.admit()
            self.buffer.start(self.admitted[-1], self.at(self.served))
            self.running[self.admitted.pop()] = self.at(self.served)

    @precondition(lambda self: self.admitted)
    @rule(data=st.data())
    def start(self, data: st.DataObject) -> None:
        group_id = data.draw(st.sampled_from(self.admitted))
        self.admitted.remove(group_id)
        self.running[group_id] = self.at(self.served)
        self.buffer.start(group_id, self.at(self.served))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), rewards=REWARDS)
    def put(self, data: st.DataObject, rewards: list[float | None]) -> None:
        group_id = data.draw(st.sampled_from(sorted(self.running)))
        start = self.running.pop(group_id)
        served = self.last_served.get(start.lineage, self.served)
        sampled_at = data.draw(st.integers(start.n, served))
        self._put(group_id, version(sampled_at, start.lineage), rewards)

    @precondition(lambda self: len(self.running) > 1)
    @rule(count=st.integers(1, 6))
    def overtake(self, count: int) -> None:
        """The newest Groups finish, the oldest goes on."""
        for group_id in list(self.running)[1:][-count:]:
            self._put(group_id, self.running.pop(group_id), [1.0, 0.0])

    @precondition(lambda self: self.admitted or self.running)
    @rule(data=st.data())
    def worker_dies(self, data: st.DataObject) -> None:
        group_id = data.draw(st.sampled_from([*self.admitted, *self.running]))
        if group_id in self.running:
            del self.running[group_id]
        else:
            self.admitted.remove(group_id)
        self.buffer.give_back(group_id, "worker_died")
        self.given_back.append(group_id)
        self._settle()

    @precondition(lambda self: self.taking is None)
    @rule()
    def take(self) -> None:
        self.taking = self.loop.create_task(self.buffer.take(self.at(self.learner), 1e6))
        self._settle()

    @precondition(lambda self: self.served < self.learner)
    @rule()
    def publish(self) -> None:
        self.served = self.learner
        self.buffer.advance(self.at(self.served))
        self._settle()

    @precondition(lambda self: self.learner > 0)
    @rule(data=st.data())
    def learner_dies(self, data: st.DataObject) -> None:
        """It goes back to a checkpoint, under a new lineage that every server then has."""
        self._stop_taking()
        n = data.draw(st.integers(max(0, self.learner - 2), self.learner))
        self.last_served[self.lineage] = self.served
        self.forks = {lineage: min(fork, n) for lineage, fork in self.forks.items()} | {self.lineage: n}
        self.lineage += 1
        self.learner = self.served = n
        self.unlearned += self.consumed[n * self.groups_per_step :]
        del self.consumed[n * self.groups_per_step :]
        self.buffer.restore(self.at(n))
        for group_id in [group_id for group_id, handle in self.finished.items() if not self.is_kin(handle)]:
            del self.finished[group_id]
            self.given_back.append(group_id)
        self._settle()

    @invariant()
    def books_agree(self) -> None:
        assert self.buffer.num_permits == self.permits()
        assert self.buffer.num_consumed == len(self.consumed) == self.learner * self.groups_per_step
        alive = [*self.admitted, *self.running, *self.finished]
        accounted = alive + self.consumed + self.given_back + self.unlearned
        assert sorted(accounted) == sorted(f"g{index}" for index in range(self.num_made)), "a Group was lost"
        reasons = self.buffer.metrics()
        assert sum(v for k, v in reasons.items() if k.startswith("buffer/given_back/")) == len(self.given_back)
        if self.policy is not StalenessPolicy.DROP:
            assert "buffer/given_back/stale" not in reasons
        assert sum(v for k, v in reasons.items() if k.startswith("buffer/beyond/")) == self.num_beyond
        if self.refill:
            assert all(len({m.reward for m in h.members if m.reward is not None}) == 2 for h in self.finished.values())

    def permits(self) -> int:
        alive = len(self.admitted) + len(self.running) + len(self.finished)
        return (self.max_staleness + self.served + 1) * self.groups_per_step - len(self.consumed) - alive

    def at(self, n: int) -> PolicyVersion:
        """Version n of the present lineage."""
        return version(n, self.lineage)

    def current(self) -> set[PolicyVersion]:
        """Names of the learner's weights: in this lineage, and in those that were restored to this very version."""
        forked = {lineage for lineage, n in self.forks.items() if n >= self.learner}
        return {version(self.learner, lineage) for lineage in {self.lineage} | forked}

    def descends_from(self, earlier: PolicyVersion) -> bool:
        """Whether the present weights come from these."""
        return earlier.lineage == self.lineage or earlier.n <= self.forks[earlier.lineage]

    def is_kin(self, handle: GroupHandle) -> bool:
        """Whether no trained token is of weights that a restore threw away."""
        trained = [m for m in handle.members if m.reward is not None]
        return all(m.max_version is not None and self.descends_from(m.max_version) for m in trained)

    def teardown(self) -> None:
        if not hasattr(self, "loop"):
            return
        try:
            self._drive_two_more_steps()
        finally:
            self._stop_taking()
            self.loop.close()

    def _drive_two_more_steps(self) -> None:
        """From wherever the interleaving ended, rollouts that finish and workers that go on end every step."""
        goal = self.learner + 2
        for _ in range(200):
            if self.learner >= goal:
                return
            if self.taking is None:
                self.take()
            if self.served < self.learner:
                self.publish()
            if self.permits() > 0:
                self.admit()
            for group_id in list(self.admitted):
                self.admitted.remove(group_id)
                self.running[group_id] = self.at(self.served)
                self.buffer.start(group_id, self.at(self.served))
            for group_id in list(self.running):
                self._put(group_id, self.running.pop(group_id), [1.0, 0.0])
            self.books_agree()
        pytest.fail("deadlock: the steps did not end")

    def _put(self, group_id: str, sampled_at: PolicyVersion, rewards: list[float | None]) -> None:
        group = scored_group(rewards, group_id=group_id, n=sampled_at.n, lineage=sampled_at.lineage)
        handle = summarize(group, LOCATION)
        if self.buffer.put(handle):
            assert self.is_kin(handle), "kept although its weights were thrown away"
            self.finished[group_id] = handle
        else:
            assert self.refill or not self.is_kin(handle)
            self.given_back.append(group_id)
        self._settle()

    def _stop_taking(self) -> None:
        taking, self.taking = self.taking, None
        if taking:
            taking.cancel()
            self._settle()

    def _settle(self) -> None:
        """Lets every waiter see the last change; books a finished take."""

        async def turns() -> None:
            for _ in range(6):
                await asyncio.sleep(0)

        self.loop.run_until_complete(turns())
        if self.policy is StalenessPolicy.DROP:
            self._book_stale()
        if self.taking and self.taking.done():
            self._book_step(self.taking.result())
            self.taking = None

    def _book_stale(self) -> None:
        known = {group_id for group_id, _ in self.buffer._finished()}  # pyright: ignore[reportPrivateUsage]
        taken = {h.group_id for h in self.taking.result()} if self.taking and self.taking.done() else set()
        for group_id in set(self.finished) - known - taken:
            trained = [m for m in self.finished.pop(group_id).members if m.reward is not None]
            oldest = min((m.min_version.n for m in trained if m.min_version), default=self.learner)
            assert oldest < self.learner - self.max_staleness, "dropped although it was fresh"
            self.given_back.append(group_id)

    def _book_step(self, handles: list[GroupHandle]) -> None:
        assert len(handles) == self.groups_per_step
        bound = self.learner - self.max_staleness
        for handle in handles:
            trained = [m for m in handle.members if m.reward is not None]
            is_fresh = all(m.min_version is not None and m.min_version.n >= bound for m in trained)
            assert self.is_kin(handle), "trained on tokens of weights that were thrown away"
            if self.policy is StalenessPolicy.DOWN_WEIGHT:
                self.num_beyond += not is_fresh
                age = max((self.learner - m.min_version.n for m in trained if m.min_version), default=0)
                beyond = max(0, age - self.max_staleness)
                assert down_weight(handle, self.at(self.learner), self.max_staleness) == 1 / (1 + beyond)
            else:
                assert is_fresh, "beyond the bound"
            if self.max_staleness == 0 and is_fresh:
                assert all(m.min_version == m.max_version and m.min_version in self.current() for m in trained)
            assert self.finished.pop(handle.group_id) == handle
            self.consumed.append(handle.group_id)
        if self.policy is StalenessPolicy.WAIT:
            oldest = self.learner + 1 - self.max_staleness
            assert not [g for g, start in self.running.items() if start.n < oldest and self.descends_from(start)]
        self.learner += 1


class DroppingInterleavings(Interleavings):
    """The same with DROP: Groups may be given back as stale, and only when they are."""

    policy = StalenessPolicy.DROP


class DownWeightingInterleavings(Interleavings):
    """The same with DOWN_WEIGHT: no Group is lost or waited for, and each one beyond the bound is counted."""

    policy = StalenessPolicy.DOWN_WEIGHT


MACHINES = [Interleavings, DroppingInterleavings, DownWeightingInterleavings]


def interleave(machine: type[RuleBasedStateMachine], *, max_examples: int, steps: int) -> None:
    run_state_machine_as_test(machine, settings=settings(max_examples=max_examples, stateful_step_count=steps))


@pytest.mark.parametrize("machine", MACHINES)
def test_random_interleavings_keep_the_bound_the_books_and_every_group(machine: type[RuleBasedStateMachine]):
    interleave(machine, max_examples=60 if machine is Interleavings else 20, steps=60)  # WAIT promises most


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
@pytest.mark.parametrize("machine", MACHINES)
def test_many_long_interleavings_do_so_too(machine: type[RuleBasedStateMachine]):
    interleave(machine, max_examples=500, steps=100)
