"""A rollout worker without Ray: Groups that end together are all in the store, and closing waits for the last."""

import asyncio
import gc
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from actors.rollout_worker import RolloutWorker
from benchmarks.timed_parts import TimedEpisodes, timed_task
from benchmarks.timed_server import REPLY_IDS
from envs.build import EpisodeConfig
from envs.sampler import Completion, SamplingParams
from tests.trajectories.records import version
from trajectories.schema import VersionSpan
from trajectories.store import read_group, scan


class InstantSampler:
    async def sample(
        self, prompt_ids: Sequence[int], params: SamplingParams, *, stop_ids: Sequence[int], key: str
    ) -> Completion:
        spans = (VersionSpan(version=version(0), num_tokens=len(REPLY_IDS)),)
        return Completion(ids=REPLY_IDS, logprobs=(-0.5,) * len(REPLY_IDS), spans=spans, finish_reason="stop")


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[RolloutWorker]:
    thresholds = gc.get_threshold()
    yield RolloutWorker(
        "w0", EpisodeConfig(), store=tmp_path, model=None, sampler=InstantSampler(), build=TimedEpisodes()
    )
    gc.set_threshold(*thresholds)
    gc.unfreeze()


async def test_groups_that_end_together_lie_where_their_handles_say(worker: RolloutWorker, tmp_path: Path) -> None:
    handles = await asyncio.gather(*(worker.play(timed_task(f"t{k}"), f"g{k}", 3) for k in range(20)))
    assert [read_group(tmp_path, handle.location).id for handle in handles] == [f"g{k}" for k in range(20)]
    await worker.close()


async def test_closing_waits_for_groups_that_are_being_written(worker: RolloutWorker, tmp_path: Path) -> None:
    playing = [asyncio.create_task(worker.play(timed_task(f"t{k}"), f"g{k}", 2)) for k in range(8)]
    await asyncio.wait(playing, return_when=asyncio.FIRST_COMPLETED)
    await worker.close()
    finished = [task for task in await asyncio.gather(*playing, return_exceptions=True) if hasattr(task, "group_id")]
    assert len(list(scan(tmp_path))) == len(finished) >= 1, "each that was written is whole, and told"


async def test_groups_in_segments_begun_after_the_known_one_are_found_too(tmp_path: Path) -> None:
    thresholds = gc.get_threshold()
    worker = RolloutWorker(
        *("w0", EpisodeConfig()),
        **{"store": tmp_path, "model": None, "sampler": InstantSampler(), "build": TimedEpisodes(), "segment_mb": 1e-6},
    )
    handles = [await worker.play(timed_task(f"t{k}"), f"g{k}", 2) for k in range(3)]
    assert [handle.location.segment for handle in handles] == ["w0.seg", "w0.0001.seg", "w0.0002.seg"]
    assert await worker.find({"w0.seg": handles[0].location.length, "w0.0001.seg": 0}) == handles[1:]
    await worker.close()
    gc.set_threshold(*thresholds)
    gc.unfreeze()
