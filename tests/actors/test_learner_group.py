"""The learner group over fake ranks: whose death explains a failure."""

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray.exceptions

from actors import learner_group
from actors.cluster import ClusterConfig, Resources, start_cluster
from actors.errors import CheckpointFailed, DeadlineMissed, LearnerLost, PlacementError
from actors.learner_group import LearnerGroup, LearnerGroupConfig, start_learner_group
from learners.config import LearnerConfig
from learners.plan import BatchPlan, plan_samples


class FakeRank:
    """Ends its optimizer step after `delay_s` as told."""

    def __init__(self, ending: Exception | None, delay_s: float = 0.0) -> None:
        self.optim_step = SimpleNamespace(remote=self._optim_step)
        self._ending = ending
        self._delay_s = delay_s

    async def _optim_step(self) -> dict[str, float]:
        await asyncio.sleep(self._delay_s)
        if self._ending is not None:
            raise self._ending
        return {"lr": 0.5}


class WritingRank:
    """Is asked `num_asks` times before its checkpoint is written, well or for a `reason` not."""

    def __init__(self, num_asks: int, reason: str | None = None) -> None:
        self.begin_save, self.is_saved, self.finish_save = (
            SimpleNamespace(remote=method) for method in (self._begin_save, self._is_saved, self._finish_save)
        )
        self._num_asks, self._reason = num_asks, reason

    async def _begin_save(self, directory: Path) -> None:
        return None

    async def _is_saved(self) -> bool:
        self._num_asks -= 1
        return self._num_asks < 0

    async def _finish_save(self) -> str | None:
        assert self._num_asks < 0, "a rank that still writes is not made to wait"
        return self._reason


def group_of(*ranks: FakeRank | WritingRank) -> LearnerGroup:
    config = LearnerGroupConfig(num_ranks=max(1, len(ranks)))
    return LearnerGroup(config, LearnerConfig(lr=0.1), model=Path("m"), store=Path("s"), ranks=ranks)


DEATH = ray.exceptions.ActorUnavailableError("gone", None)


async def test_a_rank_that_dies_is_a_lost_learner_even_if_others_hang() -> None:
    with pytest.raises(LearnerLost, match="the learner is lost: optim_step on rank 1: its process cannot be reached"):
        await asyncio.wait_for(group_of(FakeRank(None, 30), FakeRank(DEATH)).optim_step(), 5)


async def test_a_broken_connection_that_a_death_explains_is_a_lost_learner() -> None:
    with pytest.raises(LearnerLost, match="rank 1"):
        await group_of(FakeRank(RuntimeError("connection closed by peer")), FakeRank(DEATH, 0.05)).optim_step()


async def test_a_failure_without_a_death_is_raised_as_it_is() -> None:
    with pytest.raises(RuntimeError, match="out of memory"):
        await group_of(FakeRank(RuntimeError("out of memory")), FakeRank(None, 0.05)).optim_step()


async def test_ranks_that_live_give_the_first_ones_metrics() -> None:
    assert await group_of(FakeRank(None), FakeRank(None)).optim_step() == {"lr": 0.5}


def sharing(num_ranks: int, sequence_parallel: int) -> LearnerGroup:
    config, learner = LearnerGroupConfig(num_ranks=num_ranks), LearnerConfig(sequence_parallel=sequence_parallel)
    return LearnerGroup(config, learner, model=Path("m"), store=Path("s"))


def plan(num_ranks: int) -> BatchPlan:
    return plan_samples([], num_ranks=num_ranks, max_tokens=8)


def test_neighbours_that_share_micro_batches_get_the_same_share() -> None:
    group, dealt = sharing(4, 2), plan(2)
    assert group.num_shares == 2
    first, second = dealt.ranks
    shares = group._shares(dealt)
    assert all(share is expected for share, expected in zip(shares, (first, first, second, second), strict=True))


def test_a_plan_for_another_number_of_ranks_is_refused() -> None:
    with pytest.raises(ValueError, match=r"a plan for 4 ranks does not fit 4 learner ranks .* plan with num_ranks=2"):
        sharing(4, 2)._shares(plan(4))


async def test_ranks_that_cannot_share_are_refused_before_any_starts() -> None:
    config, learner = LearnerGroupConfig(num_ranks=3), LearnerConfig(sequence_parallel=2)
    with pytest.raises(ValueError, match=r"learner\.sequence_parallel=2 must divide learner\.num_ranks=3"):
        async with start_learner_group(config, learner, model=Path("model"), store=Path("store")):
            pass


@pytest.mark.ray
async def test_a_learner_without_room_names_what_is_missing() -> None:
    config = LearnerGroupConfig(resources=Resources(num_cpus=64), start_deadline_s=3)
    async with start_cluster(ClusterConfig()):
        with pytest.raises(PlacementError, match=r"start of learner rank 0: .* missing: 64 CPU \(.* in the cluster\)"):
            async with start_learner_group(config, LearnerConfig(), model=Path("model"), store=Path("store")):
                pass


async def test_a_learner_without_ranks_is_lost_and_saves_nothing() -> None:
    with pytest.raises(LearnerLost, match="no ranks for begin_save"):
        await group_of().begin_save(Path("checkpoint"))


async def test_a_checkpoint_is_complete_when_every_rank_has_written() -> None:
    group = group_of(WritingRank(0), WritingRank(2))
    await group.begin_save(Path("checkpoint"))
    assert [await group.is_saved() for _ in range(3)] == [False, False, True]


async def test_a_checkpoint_that_one_rank_cannot_write_fails_when_all_have_ended() -> None:
    group = group_of(WritingRank(0, "No space left on device"), WritingRank(1))
    assert not await group.is_saved()
    with pytest.raises(CheckpointFailed, match=r"could not be written: No space left on device; the run's last one"):
        await group.is_saved()


async def test_waiting_for_a_checkpoint_has_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learner_group, "_SAVE_POLL_S", 0.001)
    config = LearnerGroupConfig(step_deadline_s=0.02)
    ranks = [WritingRank(1_000_000)]
    group = LearnerGroup(config, LearnerConfig(lr=0.1), model=Path("m"), store=Path("s"), ranks=ranks)
    with pytest.raises(DeadlineMissed, match=r"not written within learner\.step_deadline_s=0\.02 s"):
        await group.finish_save()
