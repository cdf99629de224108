"""Curves of SFT and RLOO on recorded data: what tests/golden/*.json hold and tests/learners/test_golden.py compares.

Invariant: float32 on one thread; data, weights and order are fixed, so a curve changes only when the numerics do.
Called by the test and by tests/golden/record.py.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from envs.renderer import load_renderer
from envs.transcript import render_transcript
from learners.config import KlEstimator, LearnerConfig, LossConfig, LossKind, Schedule
from learners.learner import Learner
from learners.models import make_tiny_model
from learners.plan import BatchPlan, SizedSample, plan_batch, plan_samples
from trajectories.conversations import read_conversations
from trajectories.handle import summarize
from trajectories.samples import conversation_sample
from trajectories.store import StoreWriter, scan

HERE = Path(__file__).parent
CONVERSATIONS = HERE / "conversations.jsonl"
ROLLOUTS = HERE / "rollouts"
"""A store of Groups that the untrained model sampled."""
SFT_STEPS = 12
RLOO_STEPS = 8
SFT_METRICS = ("train/loss", "train/entropy", "optim/grad_norm", "optim/lr")
RLOO_METRICS = (*SFT_METRICS, "train/ess", "train/clip_fraction", "train/kl", "train/reference_kl")

Curve = dict[str, list[float]]
"""Metric -> its value at each step."""


def golden_model(directory: Path) -> Path:
    """The policy that both curves start from, made in `directory`."""
    corpus = [message["content"] for row in read_conversations(CONVERSATIONS) for message in row.messages]
    return make_tiny_model(directory, corpus * 20, seed=0)


def sft_curve(model: Path, scratch: Path) -> Curve:
    """Cross-entropy with warm-up, cosine schedule, weight decay and clipping; three Samples a step, packed."""
    renderer = load_renderer(model)
    sized: list[SizedSample] = []
    with StoreWriter(scratch, "golden") as writer:
        for row in read_conversations(CONVERSATIONS):
            sample = conversation_sample(*render_transcript(renderer, row.messages))
            location = writer.append_sample(sample)
            sized.append(SizedSample(location=location, num_tokens=len(sample.ids), num_trained=int(sample.mask.sum())))
    config = LearnerConfig(
        lr=3e-3, schedule=Schedule.COSINE, warmup_ratio=0.25, total_steps=SFT_STEPS, weight_decay=0.1, max_tokens=200
    )
    learner = Learner(config, model=model)
    plans = [
        plan_samples([sized[(3 * step + k) % len(sized)] for k in range(3)], num_ranks=1, max_tokens=config.max_tokens)
        for step in range(SFT_STEPS)
    ]
    return _curve(learner, plans, LossConfig(kind=LossKind.CROSS_ENTROPY), scratch, SFT_METRICS)


def rloo_curve(model: Path) -> Curve:
    """Clipped RLOO with a penalty, on the same recorded Groups at each step, so that ratios leave 1."""
    config = LearnerConfig(lr=1e-3, max_tokens=200, reference=model)
    handles = [summarize(group, location) for location, group in scan(ROLLOUTS)]
    plan = plan_batch(handles, num_ranks=1, max_tokens=config.max_tokens)
    loss = LossConfig(kind=LossKind.CLIPPED, kl_coef=0.05, kl_estimator=KlEstimator.K3)
    return _curve(Learner(config, model=model), [plan] * RLOO_STEPS, loss, ROLLOUTS, RLOO_METRICS)


def read_curve(name: str) -> Curve:
    """The recorded curve `name`."""
    return json.loads((HERE / f"{name}.json").read_text())


@contextmanager
def one_thread() -> Iterator[None]:
    """Sums in a fixed order for the length of the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _curve(learner: Learner, plans: list[BatchPlan], loss: LossConfig, store: Path, metrics: tuple[str, ...]) -> Curve:
    rows = [learner.forward_backward(plan.ranks[0], loss, store) | learner.optim_step() for plan in plans]
    return {name: [row[name] for row in rows] for name in metrics}
