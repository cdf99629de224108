"""Random interleavings of takers that come, leave, end and are cancelled while the number of slots changes.

A model keeps the books beside it. Shown: no slot is lost or given twice, the limit holds for whoever is let in, takers
are served in order, and none waits while its slots are free.
"""

import asyncio

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

from actors.slots import Slots


class SlotInterleavings(RuleBasedStateMachine):
    """`holding` and `queue` are what the takers themselves believe."""

    @initialize(limit=st.integers(1, 6))
    def begin(self, limit: int) -> None:
        self.loop = asyncio.new_event_loop()
        self.slots = Slots(limit)
        self.holding: list[int] = []
        self.queue: list[tuple[int, asyncio.Task[None]]] = []

    @rule(count=st.integers(1, 8))
    def take(self, count: int) -> None:
        self.queue.append((count, self.loop.create_task(self.slots.take(count))))
        self._settle()

    @precondition(lambda self: self.holding)
    @rule(data=st.data())
    def give(self, data: st.DataObject) -> None:
        self.slots.give(self.holding.pop(data.draw(st.integers(0, len(self.holding) - 1))))
        self._settle()

    @precondition(lambda self: self.queue)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        _, task = self.queue.pop(data.draw(st.integers(0, len(self.queue) - 1)))
        task.cancel()
        self._settle()

    @precondition(lambda self: self.queue and self.holding)
    @rule(data=st.data())
    def cancel_in_the_moment_of_the_grant(self, data: st.DataObject) -> None:
        _, task = self.queue.pop(0)
        self.slots.give(self.holding.pop(data.draw(st.integers(0, len(self.holding) - 1))))
        task.cancel()
        self._settle()

    @rule(limit=st.integers(1, 8))
    def resize(self, limit: int) -> None:
        self.slots.resize(limit)
        self._settle()

    @invariant()
    def books_agree(self) -> None:
        assert self.slots.num_taken == sum(self.holding)
        assert self.slots.num_waiting == len(self.queue)
        if self.queue:
            first, _ = self.queue[0]
            assert self.holding, "nobody holds a slot, and yet somebody waits"
            assert sum(self.holding) + first > self.slots.limit, "the first taker waits for slots that are free"

    def teardown(self) -> None:
        if hasattr(self, "loop"):
            for _, task in self.queue:
                task.cancel()
            self.queue = []
            self._settle()
            self.loop.close()

    def _settle(self) -> None:
        async def turns() -> None:
            for _ in range(4):
                await asyncio.sleep(0)

        self.loop.run_until_complete(turns())
        served = [task.done() for _, task in self.queue]
        assert served == sorted(served, reverse=True), "a later taker overtook an earlier one"
        for count, _ in self.queue[: sum(served)]:
            self.holding.append(count)
            assert sum(self.holding) <= self.slots.limit or len(self.holding) == 1, "let in beyond the limit"
        self.queue = self.queue[sum(served) :]


def test_random_interleavings_lose_no_slot_and_let_nobody_overtake() -> None:
    run_state_machine_as_test(SlotInterleavings, settings=settings(max_examples=40, stateful_step_count=40))
