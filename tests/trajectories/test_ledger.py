"""The ledger: what survives a kill, what may follow what, and what counts as behind the present weights."""

import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from trajectories.ancestry import Ancestry, ancestry_of
from trajectories.frames import CorruptFrame
from trajectories.handle import Location
from trajectories.ledger import JOURNAL, Frontier, Ledger, LedgerError
from trajectories.ledger_index import GroupState
from trajectories.schema import PolicyVersion
from trajectories.store import SegmentInUse


def v(lineage: int, n: int) -> PolicyVersion:
    return PolicyVersion(lineage=lineage, n=n)


def at(offset: int) -> Location:
    return Location(segment="w0.seg", offset=offset, length=10)


def play(ledger: Ledger, group_id: str, slot: int) -> None:
    ledger.issue(group_id, slot)
    ledger.run(group_id)
    ledger.finish(group_id, at(10 * slot))


def state(ledger: Ledger, group_id: str) -> GroupState | None:
    row = ledger.index.group(group_id)
    return None if row is None else row.state


def die(ledger: Ledger) -> None:
    """Ends the writer as `kill -9` does: what waits is gone, what was written is not."""
    ledger._waiting.clear()
    ledger.close()


def test_a_group_goes_from_pending_to_consumed_and_the_next_process_knows(tmp_path: Path):
    with Ledger(tmp_path) as ledger:
        ledger.fork(None)
        play(ledger, "a", 0)
        ledger.consume(["a"], v(0, 0))
    with Ledger(tmp_path) as ledger:
        assert state(ledger, "a") is GroupState.CONSUMED
        assert ledger.index.steps_of("a") == [v(0, 0)]
        assert ledger.index.locations("a") == [at(0)]
        assert ledger.index.next_slot() == 1


def test_a_running_group_is_in_the_journal_before_it_runs_and_what_waits_dies_with_the_process(tmp_path: Path):
    ledger = Ledger(tmp_path)
    ledger.fork(None)
    ledger.issue("a", 0)
    ledger.run("a")
    ledger.finish("a", at(0))  # waits for its batch
    die(ledger)
    with Ledger(tmp_path) as ledger:
        assert state(ledger, "a") is GroupState.RUNNING


def test_rows_go_out_in_batches_one_frame_each(tmp_path: Path):
    with Ledger(tmp_path, batch=4, batch_s=1000) as ledger:
        ledger.fork(None)
        empty = ledger.frontier(v(0, 0)).journal_bytes
        for slot in range(3):
            ledger.issue(f"g{slot}", slot)
        assert (tmp_path / f"{JOURNAL}.seg").stat().st_size == empty
        ledger.issue("g3", 3)
        assert (tmp_path / f"{JOURNAL}.seg").stat().st_size > empty
    frames = (tmp_path / f"{JOURNAL}.seg").read_bytes().count(b"TRJ1")
    assert frames == 2, "one of the fork and one of the batch"


def test_a_torn_tail_is_cut_and_damage_is_an_error(tmp_path: Path):
    with Ledger(tmp_path) as ledger:
        ledger.fork(None)
        play(ledger, "a", 0)
    journal = tmp_path / f"{JOURNAL}.seg"
    whole = journal.read_bytes()
    journal.write_bytes(whole[:-3])
    with Ledger(tmp_path) as ledger:
        assert state(ledger, "a") is GroupState.RUNNING, "the batch of the finish was torn"
    journal.write_bytes(whole[:20] + b"\xff" + whole[21:])
    with pytest.raises(CorruptFrame, match="does not match its checksum"):
        Ledger(tmp_path)


def test_one_process_at_a_time_writes(tmp_path: Path):
    with Ledger(tmp_path), pytest.raises(SegmentInUse):
        Ledger(tmp_path)


def test_a_state_that_cannot_follow_is_refused(tmp_path: Path):
    with Ledger(tmp_path) as ledger:
        ledger.fork(None)
        with pytest.raises(LedgerError, match="group a cannot become running: it is unknown"):
            ledger.run("a")
        with pytest.raises(LedgerError, match="finished but was never issued"):
            ledger.finish("a", at(0))
        play(ledger, "a", 0)
        with pytest.raises(LedgerError, match="cannot become finished: it is finished"):
            ledger.finish("a", at(0))
        ledger.drop("a", "stale")
        with pytest.raises(LedgerError, match="cannot become consumed: it is dropped"):
            ledger.consume(["a"], v(0, 0))


def test_no_group_is_trained_twice_behind_the_same_weights_but_may_be_in_another_lineage(tmp_path: Path):
    with Ledger(tmp_path) as ledger:
        ledger.fork(None)
        play(ledger, "early", 0)
        play(ledger, "late", 1)
        ledger.consume(["early"], v(0, 0))
        ledger.consume(["late"], v(0, 1))
        with pytest.raises(LedgerError, match="trained twice"):
            ledger.consume(["late"], v(0, 2))
        assert ledger.fork(v(0, 1)) == 1
        assert ledger.is_consumed("early") and not ledger.is_consumed("late")
        with pytest.raises(LedgerError, match="trained twice"):
            ledger.consume(["early"], v(1, 1))
        ledger.consume(["late"], v(1, 1))
        assert ledger.index.steps_of("late") == [v(0, 1), v(1, 1)]


def test_a_frontier_that_the_journal_does_not_reach_is_an_error(tmp_path: Path):
    with Ledger(tmp_path) as ledger:
        ledger.fork(None)
        play(ledger, "a", 0)
        ledger.consume(["a"], v(0, 0))
        frontier = ledger.frontier(v(0, 1))
        assert frontier.num_consumed == 1 and ledger.frontier(v(0, 0)).num_consumed == 0
        ledger.check_frontier(frontier, v(0, 1))
        longer = Frontier(journal_bytes=frontier.journal_bytes + 1, num_consumed=1)
        with pytest.raises(LedgerError, match="restore the journal from a copy"):
            ledger.check_frontier(longer, v(0, 1))
        with pytest.raises(LedgerError, match="counts 0 Groups behind the checkpoint, which was made with 1"):
            ledger.check_frontier(frontier, v(0, 0))


def test_segments_are_read_again_from_the_first_frame_that_was_not_reported(tmp_path: Path):
    with Ledger(tmp_path) as ledger:
        for slot in (0, 1, 3):  # each frame is 10 bytes; that of slot 2 was not reported
            play(ledger, f"g{slot}", slot)
        assert ledger.index.reported_ends() == {"w0.seg": 20}


def test_the_past_of_a_lineage_is_cut_where_each_restore_began():
    assert ancestry_of(2, {1: v(0, 20), 2: v(1, 25)}) == Ancestry(lineage=2, forks={1: 25, 0: 20})
    past = ancestry_of(2, {1: v(0, 20), 2: v(1, 20)})
    assert past.has_weights(v(0, 20)) and not past.has_weights(v(0, 21)) and past.has_weights(v(2, 99))
    assert past.has_step(v(0, 19)) and not past.has_step(v(0, 20)) and not past.has_step(v(3, 0))


class Life(RuleBasedStateMachine):
    """Random moves, kills and restores against plain sets."""

    def __init__(self) -> None:
        super().__init__()
        self._scratch = tempfile.TemporaryDirectory()
        self.ledger = Ledger(Path(self._scratch.name), batch=3, batch_s=1000)
        self.weights: list[str] = []
        """Ids behind the present weights, a step each."""
        self.saved: list[str] = []
        self.finished: set[str] = set()
        self.num_issued = 0
        self.version = v(0, 0)

    @initialize()
    def begin(self) -> None:
        self.ledger.fork(None)

    @rule()
    def play(self) -> None:
        group_id = f"g{self.num_issued}"
        play(self.ledger, group_id, self.num_issued)
        self.num_issued += 1
        self.finished.add(group_id)

    @precondition(lambda self: self.finished)
    @rule(data=st.data())
    def train(self, data: st.DataObject) -> None:
        group_id = data.draw(st.sampled_from(sorted(self.finished)))
        self.ledger.consume([group_id], self.version)
        self.finished.discard(group_id)
        self.weights.append(group_id)
        self.version = v(self.version.lineage, self.version.n + 1)

    @rule()
    def checkpoint(self) -> None:
        assert self.ledger.frontier(self.version).num_consumed == len(self.weights)
        self.saved = list(self.weights)

    @rule()
    def kill(self) -> None:
        die(self.ledger)
        self.ledger = Ledger(Path(self._scratch.name), batch=3, batch_s=1000)
        for slot in range(self.num_issued):  # what the store holds is found there
            if state(self.ledger, f"g{slot}") is not GroupState.FINISHED and not self.ledger.index.steps_of(f"g{slot}"):
                self.ledger.finish(f"g{slot}", at(10 * slot), slot=slot)
        self._restore()

    @rule()
    def lose_the_learner(self) -> None:
        self._restore()

    def _restore(self) -> None:
        lineage = self.ledger.fork(v(self.version.lineage, len(self.saved)))
        self.version = v(lineage, len(self.saved))
        self.finished |= set(self.weights) - set(self.saved)
        self.weights = list(self.saved)

    @invariant()
    def what_is_behind_the_weights_is_known_exactly(self) -> None:
        if self.num_issued:
            everything = {f"g{slot}" for slot in range(self.num_issued)}
            consumed = {group_id for group_id in everything if self.ledger.is_consumed(group_id)}
            assert consumed == set(self.weights)

    def teardown(self) -> None:
        self.ledger.close()
        self._scratch.cleanup()


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=15, stateful_step_count=25)
