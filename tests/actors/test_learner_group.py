"""How a plan is dealt to the ranks; no Ray is started."""

from pathlib import Path
from typing import Any

import pytest

from actors.learner_group import LearnerGroup, LearnerGroupConfig, start_learner_group
from learners.config import LearnerConfig
from learners.plan import BatchPlan, plan_samples


def group(num_ranks: int, sequence_parallel: int) -> LearnerGroup:
    ranks: list[Any] = [None] * num_ranks
    config = LearnerGroupConfig(num_ranks=num_ranks)
    return LearnerGroup(config, ranks, sequence_parallel=sequence_parallel, world_size=num_ranks, sharding="")


def plan(num_ranks: int) -> BatchPlan:
    return plan_samples([], num_ranks=num_ranks, max_tokens=8)


def test_neighbours_that_share_micro_batches_get_the_same_share() -> None:
    sharing = group(4, 2)
    assert sharing.num_shares == 2
    dealt = plan(2)
    first, second = dealt.ranks
    shares = sharing._shares(dealt)
    assert [share is expected for share, expected in zip(shares, (first, first, second, second), strict=True)] == [
        True
    ] * 4


def test_a_plan_for_another_number_of_ranks_is_refused() -> None:
    with pytest.raises(ValueError, match=r"a plan for 4 ranks does not fit 4 learner ranks .* plan with num_ranks=2"):
        group(4, 2)._shares(plan(4))


async def test_ranks_that_cannot_share_are_refused_before_any_starts() -> None:
    config, learner = LearnerGroupConfig(num_ranks=3), LearnerConfig(sequence_parallel=2)
    with pytest.raises(ValueError, match=r"learner\.sequence_parallel=2 must divide learner\.num_ranks=3"):
        async with start_learner_group(config, learner, model=Path("model"), store=Path("store")):
            pass
