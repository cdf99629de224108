"""Segments roll over, are found again, and go only when nobody can ask for what they hold."""

from pathlib import Path

import pytest

from tests.trajectories.records import scored_group
from trajectories.ledger import Ledger
from trajectories.schema import PolicyVersion
from trajectories.segments import SegmentedWriter, later_segments, prune, segments_of
from trajectories.store import StoreWriter, scan

TINY = 1e-6
"""A segment that is full after one Group."""


def v(n: int, lineage: int = 0) -> PolicyVersion:
    return PolicyVersion(lineage=lineage, n=n)


def names(store: Path) -> list[str]:
    return sorted(path.name for path in store.glob("*.seg"))


def play(ledger: Ledger, writer: SegmentedWriter | StoreWriter, *slots: int) -> None:
    for slot in slots:
        ledger.issue(f"g{slot}", slot)
        ledger.run(f"g{slot}")
        ledger.finish(f"g{slot}", writer.append(scored_group([1.0, 0.0], group_id=f"g{slot}")))


def test_a_full_segment_is_followed_by_the_next_and_a_writer_goes_on_in_its_newest(tmp_path: Path) -> None:
    writer = SegmentedWriter(tmp_path, "w0", segment_mb=TINY)
    segments = [writer.append(scored_group([1.0], group_id=f"g{k}")).segment for k in range(3)]
    writer.close()
    assert segments == ["w0.seg", "w0.0001.seg", "w0.0002.seg"]
    again = SegmentedWriter(tmp_path, "w0", segment_mb=1)
    assert again.append(scored_group([1.0], group_id="g3")).segment == "w0.0002.seg"
    again.close()
    assert {group.id for _, group in scan(tmp_path)} == {"g0", "g1", "g2", "g3"}


def test_later_segments_are_those_of_the_same_writer(tmp_path: Path) -> None:
    for name in ("w0.seg", "w0.0001.seg", "w0.0002.seg", "w0.0010.seg", "w01.seg", "w01.0001.seg", "w0.x.seg"):
        (tmp_path / name).touch()
    assert [path.name for path in segments_of(tmp_path, "w0")] == [
        "w0.seg",
        "w0.0001.seg",
        "w0.0002.seg",
        "w0.0010.seg",
    ]
    assert later_segments(tmp_path, ["w0.seg", "w0.0001.seg"]) == ["w0.0002.seg", "w0.0010.seg"]
    assert later_segments(tmp_path, ["w9.seg"]) == []


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"


def test_what_was_consumed_long_enough_ago_or_dropped_goes_and_the_ledger_says_so(tmp_path: Path, store: Path) -> None:
    with Ledger(tmp_path / "ledger") as ledger:
        ledger.fork(None)
        writer = SegmentedWriter(store, "w0", segment_mb=TINY)
        play(ledger, writer, 0, 1, 2, 3, 4, 5)
        writer.close()
        for n in (0, 1, 2):
            ledger.consume([f"g{n}"], v(n))
        ledger.drop("g3", "zero_variance")
        everything = names(store)
        # Behind version 2 lie the steps 0 and 1; one of them is kept. g4 is not consumed, g5 is in the newest segment.
        removed, num_bytes = prune(ledger, store, v(2), keep_steps=1)
        assert removed == ["w0.0003.seg", "w0.seg"] and num_bytes > 0
        assert sorted([*removed, *names(store)]) == everything
        assert prune(ledger, store, v(2), keep_steps=1) == ([], 0)
        assert prune(ledger, store, v(3), keep_steps=0)[0] == ["w0.0001.seg", "w0.0002.seg"]
        ledger.drop("g4", "zero_variance")
        ledger.drop("g5", "zero_variance")
        assert prune(ledger, store, v(3), keep_steps=0)[0] == ["w0.0004.seg"], "the newest one stays"
        assert ledger.index.num_pruned() == 5
    with Ledger(tmp_path / "ledger") as ledger:
        assert ledger.index.num_pruned() == 5
        assert ledger.index.locations("g0"), "what became of it is still known"


def test_steps_of_an_abandoned_lineage_settle_nothing(tmp_path: Path, store: Path) -> None:
    with Ledger(tmp_path / "ledger") as ledger:
        ledger.fork(None)
        writer = SegmentedWriter(store, "w0", segment_mb=TINY)
        play(ledger, writer, 0, 1, 2)
        writer.close()
        ledger.consume(["g0"], v(0))
        ledger.consume(["g1"], v(1))
        ledger.fork(v(1))  # the step taken at 0:1 is thrown away, so g1 may be trained on again
        assert prune(ledger, store, v(3, lineage=1), keep_steps=0)[0] == ["w0.seg"]
        ledger.consume(["g1"], v(1, lineage=1))
        assert prune(ledger, store, v(3, lineage=1), keep_steps=0)[0] == ["w0.0001.seg"]


def test_a_segment_with_a_group_that_was_not_reported_stays(tmp_path: Path, store: Path) -> None:
    with Ledger(tmp_path / "ledger") as ledger:
        ledger.fork(None)
        with StoreWriter(store, "w0") as writer:
            play(ledger, writer, 0)
            writer.append(scored_group([1.0], group_id="g1"))
        with StoreWriter(store, "w0.0001"):
            pass
        ledger.consume(["g0"], v(0))
        assert prune(ledger, store, v(5), keep_steps=0) == ([], 0)


def test_a_kill_between_the_ledger_and_the_disk_is_made_good(tmp_path: Path, store: Path) -> None:
    with Ledger(tmp_path / "ledger") as ledger:
        ledger.fork(None)
        writer = SegmentedWriter(store, "w0", segment_mb=TINY)
        play(ledger, writer, 0, 1)
        writer.close()
        ledger.prune(["w0.seg"])
        assert prune(ledger, store, v(0), keep_steps=0)[0] == ["w0.seg"]
