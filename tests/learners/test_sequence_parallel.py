"""How tokens and heads are shared, without a second rank; equality over real ranks is in test_ranks.py."""

from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.distributed as dist

from learners.config import LearnerConfig
from learners.learner import Learner
from learners.packing import WeightedSample, is_here, pack, share
from learners.sequence_parallel import SequenceParallel, kv_repeats
from tests.learners.conftest import make_samples

NO_GROUP = cast(Any, None)


def test_key_heads_are_repeated_only_as_often_as_the_ranks_need() -> None:
    assert kv_repeats(1, 32, 8) == 1
    assert kv_repeats(8, 32, 8) == 1
    assert kv_repeats(16, 32, 8) == 2
    assert kv_repeats(3, 9, 3) == 1


@pytest.mark.parametrize(("size", "num_heads", "num_kv_heads"), [(4, 2, 2), (2, 9, 3), (8, 12, 6)])
def test_heads_that_do_not_divide_are_refused(size: int, num_heads: int, num_kv_heads: int) -> None:
    with pytest.raises(ValueError, match=f"sequence_parallel={size} must divide the model's {num_heads}"):
        kv_repeats(size, num_heads, num_kv_heads)


def test_every_token_lies_on_one_rank_and_every_trained_one_beside_its_predictor() -> None:
    samples = [WeightedSample(sample=sample, advantage=2.0, weight=0.5) for sample in make_samples([9, 5, 3])]
    whole = pack(samples)
    parts = [share(whole, SequenceParallel(group=NO_GROUP, rank=rank, size=4)) for rank in range(4)]
    assert [part.ids_T.numel() for part in parts] == [5, 5, 5, 5]  # 17 tokens and 3 fillers
    assert torch.equal(torch.cat([part.ids_T for part in parts])[:17], whole.ids_T)
    assert all(part.layout.lengths == (9, 5, 3, 1, 1, 1) for part in parts)
    for name in ("targets_N", "behaviour_N", "members_N", "weights_N"):
        assert torch.equal(torch.cat([getattr(part, name) for part in parts]), getattr(whole, name))
    predictors = torch.cat([part.predictors_N + 5 * rank for rank, part in enumerate(parts)])
    assert torch.equal(predictors, whole.predictors_N)
    here = torch.stack([is_here(whole, SequenceParallel(group=NO_GROUP, rank=rank, size=4)) for rank in range(4)])
    assert torch.equal(here.sum(0), torch.ones(len(whole.targets_N), dtype=torch.int64))


def test_one_rank_cannot_share_with_another(tiny_model: Path) -> None:
    with pytest.raises(ValueError, match="sequence_parallel=2 must divide the 1 learner ranks"):
        Learner(LearnerConfig(sequence_parallel=2), model=tiny_model)


def test_exchanging_heads_for_tokens_and_back_changes_nothing_on_one_rank(tiny_model: Path) -> None:
    Learner(LearnerConfig(), model=tiny_model)  # meets in a process group of one
    group = dist.new_group([0])
    assert isinstance(group, dist.ProcessGroup)
    alone = SequenceParallel(group=group, rank=0, size=1)
    query = torch.from_numpy(np.arange(24.0).reshape(3, 4, 2)).requires_grad_()
    heads, _, _ = alone.to_heads(query, query[:, :2], query[:, :2])
    back = alone.to_tokens(heads)
    assert torch.equal(back, query)
    back.square().sum().backward()
    assert query.grad is not None and torch.equal(query.grad, 2 * query.detach())
