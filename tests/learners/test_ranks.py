"""Ranks over gloo, in real processes, against one rank on the same Samples."""

from dataclasses import replace
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing import get_context

from learners.config import LearnerConfig, LossConfig, LossKind, Schedule
from learners.learner import Learner
from learners.plan import BatchPlan, SizedSample, plan_samples
from learners.process_group import init_process_group
from tests.learners.conftest import make_samples, store_samples, with_prefix

CONFIG = LearnerConfig(lr=2e-4, schedule=Schedule.LINEAR, warmup_steps=1, total_steps=9, max_tokens=128)
LENGTHS = [33, 5, 64, 61, 2, 60, 17, 40, 90]
PROBE = [3, 1, 4, 1, 5]


def plans(sized: list[SizedSample], num_ranks: int) -> list[BatchPlan]:
    """Three steps; the last has one Sample, so that all ranks but the first are without work."""
    batches = [sized[:5], sized[5:], sized[2:3]]
    return [plan_samples(batch, num_ranks=num_ranks, max_tokens=CONFIG.max_tokens) for batch in batches]


def train(learner: Learner, plans: list[BatchPlan], store: Path, rank: int) -> list[dict[str, float]]:
    sft = LossConfig(kind=LossKind.CROSS_ENTROPY)
    losses = (sft, LossConfig(kind=LossKind.CLIPPED, kl_coef=0.1), sft)
    return [
        learner.forward_backward(plan.ranks[rank], loss, store) | learner.optim_step()
        for plan, loss in zip(plans, losses, strict=True)
    ]


def observe(learner: Learner, plan: BatchPlan, store: Path, rank: int) -> dict[str, Any]:
    return {
        "logprobs": learner.logprobs(PROBE),
        "sequences": learner.sequence_logprobs(plan.ranks[rank], store),
        "weights": {name: tensor.tolist() for name, tensor in learner.export_weights()},
    }


def run_rank(
    rank: int,
    num_ranks: int,
    sequence_parallel: int,
    model: Path,
    sized: list[SizedSample],
    directory: Path,
    results: "Queue[Any]",
) -> None:
    torch.set_num_threads(1)
    init_process_group(f"file://{directory}/meet", rank=rank, world_size=num_ranks, timeout_s=60)
    config = replace(CONFIG, sequence_parallel=sequence_parallel, reference=model)
    learner = Learner(config, model=model, rank=rank, world_size=num_ranks)
    steps = plans(sized, num_ranks // sequence_parallel)
    store, share = directory / "store", rank // sequence_parallel
    metrics = train(learner, steps, store, share)
    learner.begin_save(directory / "checkpoint")
    learner.save_pretrained(directory / "saved")
    learner.finish_save()
    results.put((rank, metrics, observe(learner, steps[0], store, share)))
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("num_ranks", "sequence_parallel"),
    [
        pytest.param(2, 1, marks=pytest.mark.slow),
        pytest.param(2, 2, marks=pytest.mark.slow),
        pytest.param(4, 1, marks=pytest.mark.exhaustive),
        pytest.param(4, 2, marks=pytest.mark.exhaustive),
    ],
)
def test_ranks_give_the_losses_updates_and_checkpoint_of_one(
    tiny_model: Path, tmp_path: Path, num_ranks: int, sequence_parallel: int
) -> None:
    sized = store_samples(tmp_path / "store", with_prefix(make_samples(LENGTHS), 20))
    context = get_context("spawn")
    results = context.Queue()
    arguments = (num_ranks, sequence_parallel, tiny_model, sized, tmp_path, results)
    processes = [context.Process(target=run_rank, args=(rank, *arguments)) for rank in range(num_ranks)]
    for process in processes:
        process.start()
    by_rank = {rank: rest for rank, *rest in (results.get(timeout=240) for _ in processes)}
    for process in processes:
        process.join(30)
        assert process.exitcode == 0

    one = Learner(replace(CONFIG, reference=tiny_model), model=tiny_model)
    steps = plans(sized, 1)
    expected_metrics = train(one, steps, tmp_path / "store", 0)
    expected = observe(one, steps[0], tmp_path / "store", 0)
    for rank in range(num_ranks):
        metrics, seen = by_rank[rank]
        assert metrics == by_rank[0][0]
        assert seen["logprobs"] == pytest.approx(expected["logprobs"], abs=1e-5)
        assert_same_weights(seen["weights"], expected["weights"])
    for ours, theirs in zip(by_rank[0][0], expected_metrics, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-6)
    shares = [by_rank[rank][1]["sequences"] for rank in range(0, num_ranks, sequence_parallel)]
    sequences = plans(sized, len(shares))[0].in_given_order([value for share in shares for value in share])
    assert sequences == pytest.approx(steps[0].in_given_order(expected["sequences"]), abs=1e-4)

    resharded = Learner(CONFIG, model=tiny_model)
    resharded.load(tmp_path / "checkpoint")
    assert resharded.step == 3
    assert resharded.logprobs(PROBE) == pytest.approx(expected["logprobs"], abs=1e-5)
    one.forward_backward(steps[0].ranks[0], LossConfig(kind=LossKind.CROSS_ENTROPY), tmp_path / "store")
    resharded.forward_backward(steps[0].ranks[0], LossConfig(kind=LossKind.CROSS_ENTROPY), tmp_path / "store")
    assert resharded.optim_step() == pytest.approx(one.optim_step(), rel=1e-5)
    saved = Learner(CONFIG, model=tmp_path / "saved")
    assert saved.logprobs(PROBE) == pytest.approx(expected["logprobs"], abs=1e-5)


def assert_same_weights(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert ours.keys() == theirs.keys()
    for name, values in theirs.items():
        weight, other = torch.tensor(values), torch.tensor(ours[name])
        assert float((weight - other).norm() / weight.norm()) < 1e-6, name


def test_several_ranks_without_an_address_are_refused() -> None:
    with pytest.raises(ValueError, match="2 ranks need an address"):
        init_process_group(rank=0, world_size=2)
