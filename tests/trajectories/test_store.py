"""The store: nothing acknowledged is lost, nothing damaged is read, one writer a segment."""

import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.trajectories.records import scored_group, tokens, trajectory, turn
from trajectories.frames import HEADER, CorruptFrame, NoSuchFrame, StoreError
from trajectories.handle import Location
from trajectories.samples import trajectory_samples
from trajectories.store import (
    SegmentInUse,
    StoreWriter,
    read_group,
    read_sample,
    scan,
    scan_tails,
    segments_in_use,
)

GROUPS = [scored_group([1.0, 0.0, None], group_id=f"g{index}") for index in range(3)]
ROOT = Path(__file__).parents[2]


def _write(directory: Path, writer: str = "w0") -> list[Location]:
    with StoreWriter(directory, writer) as store:
        return [store.append(group) for group in GROUPS]


def _read(directory: Path) -> list[str]:
    return [group.id for _, group in scan(directory)]


def test_groups_are_read_back_by_location_and_by_scan(tmp_path: Path):
    locations = _write(tmp_path)
    assert [read_group(tmp_path, location) for location in locations] == GROUPS
    assert list(scan(tmp_path)) == list(zip(locations, GROUPS, strict=True))


def test_a_second_opening_appends_after_the_first(tmp_path: Path):
    first = _write(tmp_path)
    second = _write(tmp_path)
    assert second[0].offset == first[-1].offset + first[-1].length
    assert _read(tmp_path) == ["g0", "g1", "g2", "g0", "g1", "g2"]


def test_segments_are_scanned_in_the_order_of_their_names(tmp_path: Path):
    for writer, group in zip(["w1", "w0"], GROUPS, strict=False):
        with StoreWriter(tmp_path, writer) as store:
            store.append(group)
    assert [(location.segment, group.id) for location, group in scan(tmp_path)] == [("w0.seg", "g1"), ("w1.seg", "g0")]


def test_an_append_is_readable_before_any_flush(tmp_path: Path):
    with StoreWriter(tmp_path, "w0", fsync_every_s=1e9) as store:
        location = store.append(GROUPS[0])
        assert read_group(tmp_path, location) == GROUPS[0]


def test_samples_and_groups_may_share_a_store(tmp_path: Path):
    sample = trajectory_samples(trajectory(turn(tokens((1, 2), (3, 4)))))[0]
    with StoreWriter(tmp_path, "w0") as store:
        where = store.append_sample(sample)
        store.append(GROUPS[0])
    assert read_sample(tmp_path, where).ids.tolist() == [1, 2, 3, 4]
    assert _read(tmp_path) == ["g0"]


def test_a_tail_torn_at_any_byte_is_cut_reported_and_loses_nothing_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(os, "fsync", lambda fd: None)  # a thousand of them take seconds, and nothing here needs one
    last = _write(tmp_path)[-1]
    segment = tmp_path / "w0.seg"
    whole = segment.read_bytes()
    for kept in range(last.length):
        segment.write_bytes(whole[: last.offset + kept])
        assert _read(tmp_path) == ["g0", "g1"], "a reader stops before the torn tail"
        caplog.clear()
        with caplog.at_level(logging.WARNING), StoreWriter(tmp_path, "w0", fsync_every_s=1e9) as store:
            assert store.cut_bytes == kept
            assert (f"{kept} bytes after byte {last.offset}" in caplog.text) == (kept > 0)
            assert store.append(GROUPS[2]) == last
        assert segment.read_bytes() == whole


def test_a_tail_of_zeros_is_torn_and_zeros_before_data_are_corrupt(tmp_path: Path):
    _write(tmp_path)
    segment = tmp_path / "w0.seg"
    whole = segment.read_bytes()
    segment.write_bytes(whole + bytes(5000))
    with StoreWriter(tmp_path, "w0") as store:
        assert store.cut_bytes == 5000
    segment.write_bytes(whole + bytes(5000) + whole)
    with pytest.raises(CorruptFrame):
        StoreWriter(tmp_path, "w0")


@pytest.mark.parametrize("bit", range(8))
def test_a_flipped_bit_anywhere_in_a_middle_frame_is_an_error_that_names_segment_and_offset(tmp_path: Path, bit: int):
    middle = _write(tmp_path)[1]
    segment = tmp_path / "w0.seg"
    whole = segment.read_bytes()
    for position in range(middle.offset, middle.offset + middle.length, 1 if bit == 0 else 7):
        damaged = bytearray(whole)
        damaged[position] ^= 1 << bit
        segment.write_bytes(damaged)
        read: list[str] = []
        with pytest.raises(CorruptFrame) as caught:
            read.extend(group.id for _, group in scan(tmp_path))
        assert (caught.value.segment, caught.value.offset) == (segment, middle.offset)
        with pytest.raises((CorruptFrame, NoSuchFrame)):
            read_group(tmp_path, middle)
    with pytest.raises(CorruptFrame, match=f"corrupt frame at byte {middle.offset}"):
        StoreWriter(tmp_path, "w0")
    assert segment.read_bytes() == bytes(damaged), "a refused opening changes nothing"


def test_a_flipped_bit_in_the_last_whole_frame_is_an_error_too(tmp_path: Path):
    last = _write(tmp_path)[-1]
    segment = tmp_path / "w0.seg"
    damaged = bytearray(segment.read_bytes())
    damaged[last.offset + HEADER.size + 5] ^= 1
    segment.write_bytes(damaged)
    with pytest.raises(CorruptFrame, match="payload"):
        list(scan(tmp_path))


def test_a_second_writer_of_a_segment_is_refused_and_another_segment_is_not(tmp_path: Path):
    with StoreWriter(tmp_path, "w0"):
        with pytest.raises(SegmentInUse, match=r"w0\.seg: another writer holds this segment"):
            StoreWriter(tmp_path, "w0")
        StoreWriter(tmp_path, "w1").close()
    StoreWriter(tmp_path, "w0").close()


def test_a_failed_append_leaves_the_segment_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    real = os.pwrite

    def full_disk(fd: int, data: memoryview, offset: int) -> int:
        if offset > first.offset + first.length:
            raise OSError(28, "No space left on device")
        return real(fd, data[:40], offset)

    with StoreWriter(tmp_path, "w0") as store:
        first = store.append(GROUPS[0])
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", full_disk)
            with pytest.raises(OSError, match="No space left"):
                store.append(GROUPS[1])
        assert (tmp_path / "w0.seg").stat().st_size == first.length
        store.append(GROUPS[2])
    assert _read(tmp_path) == ["g0", "g2"]


def test_a_frame_that_is_not_there_is_named(tmp_path: Path):
    location = _write(tmp_path)[-1]
    with pytest.raises(NoSuchFrame, match=r"w9\.seg: no such segment"):
        read_group(tmp_path, Location(segment="w9.seg", offset=0, length=100))
    with pytest.raises(NoSuchFrame, match="the file is shorter"):
        read_group(tmp_path, Location(segment="w0.seg", offset=location.offset, length=location.length + 1))
    with pytest.raises(NoSuchFrame, match="is not 40 bytes long"):
        read_group(tmp_path, Location(segment="w0.seg", offset=location.offset, length=40))


def test_a_missing_store_and_a_bad_writer_name_are_refused(tmp_path: Path):
    with pytest.raises(StoreError, match="no such store"):
        list(scan(tmp_path / "missing"))
    with pytest.raises(ValueError, match="writer must be"):
        StoreWriter(tmp_path, "../escape")


def test_a_closed_writer_appends_no_more_and_closes_twice(tmp_path: Path):
    store = StoreWriter(tmp_path, "w0")
    store.close()
    store.close()
    with pytest.raises(ValueError, match="closed"):
        store.append(GROUPS[0])


KILLED_WRITER = """
import sys
from pathlib import Path
from tests.trajectories.records import scored_group
from trajectories.store import StoreWriter

with StoreWriter(Path(sys.argv[1]), "w0", fsync_every_s=1e9) as store:
    for index in range(10**9):
        store.append(scored_group([1.0, 0.0] * (1 + index % 40), group_id=f"g{index}"))
        print(index, flush=True)  # acknowledged: from here on the Group must survive
"""


def test_every_acknowledged_group_survives_a_writer_killed_while_appending(tmp_path: Path):
    acknowledged = -1
    for lives in range(3):
        with subprocess.Popen(
            [sys.executable, "-c", KILLED_WRITER, str(tmp_path / str(lives))], cwd=ROOT, stdout=subprocess.PIPE
        ) as writer:
            assert writer.stdout is not None
            for _ in range(50 + 13 * lives):
                acknowledged = int(writer.stdout.readline())
            seen = [group.id for _, group in scan(tmp_path / str(lives))]  # while it writes
            assert seen[: acknowledged + 1] == [f"g{index}" for index in range(acknowledged + 1)]
            writer.send_signal(signal.SIGKILL)
            rest = writer.stdout.read().split(b"\n")
            acknowledged = int(rest[-2]) if len(rest) > 1 else acknowledged
        survivors = [group.id for _, group in scan(tmp_path / str(lives))]
        assert survivors[: acknowledged + 1] == [f"g{index}" for index in range(acknowledged + 1)]
        assert len(survivors) - (acknowledged + 1) <= 1
        with StoreWriter(tmp_path / str(lives), "w0") as store:
            store.append(GROUPS[0])
        assert _read(tmp_path / str(lives)) == [*survivors, "g0"]


def test_a_tail_is_read_from_the_byte_given_and_a_segment_that_was_never_written_is_empty(tmp_path: Path):
    with StoreWriter(tmp_path, "w0") as writer:
        locations = [writer.append(group) for group in GROUPS]
        assert writer.num_bytes == locations[-1].offset + locations[-1].length
    starts = {"w0.seg": locations[1].offset, "w9.seg": 0}
    assert list(scan_tails(tmp_path, starts)) == list(zip(locations[1:], GROUPS[1:], strict=True))
    assert list(scan_tails(tmp_path, {"w0.seg": locations[-1].offset + locations[-1].length})) == []


def test_segments_of_living_writers_are_known(tmp_path: Path):
    with StoreWriter(tmp_path, "w0"):
        StoreWriter(tmp_path, "w1").close()
        assert segments_in_use(tmp_path) == [tmp_path / "w0.seg"]
    assert segments_in_use(tmp_path) == []
