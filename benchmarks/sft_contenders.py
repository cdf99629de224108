"""The contenders of the SFT comparison: this project's Learner, TRL's SFTTrainer, and a plain loop.

Invariant: each runs alone in its process on the same Samples, model, precision, threads and learning rate; the first
step warms up, the others are timed from its end to the end of the last. Called by benchmarks/learner.py.
"""

import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.peak_memory import PeakMemory
from trajectories.samples import Sample

if TYPE_CHECKING:
    from learners.plan import SizedSample

MICRO_BATCH_TOKENS = 2048
LENGTHS = (1024, 512, 256, 256)
"""Samples of one micro-batch: any packing of these fills it."""
TRAINED_SHARE = 0.6
"""Share of a Sample's tokens that the policy said, at its end."""
LR = 1e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What one contender did."""

    tokens_per_s: float
    peak_mb: float
    """Resident memory above weights and optimizer, in MiB."""
    held_mb: float
    """Resident between steps, in MiB: weights, optimizer, libraries."""
    losses: list[float]


class Stopwatch:
    """Times all steps but the first, and the memory of the same."""

    def __init__(self) -> None:
        self._memory: PeakMemory | None = None
        self._began = self._ended = 0.0
        self._num_tokens = 0
        self.losses: list[float] = []

    def step_ended(self, num_tokens: int, loss: float) -> None:
        """To be called after each optimizer step."""
        self._ended = time.perf_counter()
        self.losses.append(loss)
        if self._memory is None:
            self._memory = PeakMemory()
            self._began = time.perf_counter()
        else:
            self._num_tokens += num_tokens

    def measured(self) -> Measured:
        """After the last step."""
        assert self._memory is not None and self._num_tokens
        rate = self._num_tokens / (self._ended - self._began)
        memory = self._memory
        return Measured(tokens_per_s=rate, peak_mb=memory.above_mb(), held_mb=memory.held_mb, losses=self.losses)


def make_samples(num_micro_batches: int, vocabulary: int) -> list[Sample]:
    """Random ids, the same for every contender, in the order of their micro-batches."""
    rng = np.random.default_rng(0)
    samples = []
    for length in LENGTHS * num_micro_batches:
        mask = np.arange(length) >= length * (1 - TRAINED_SHARE)
        ids = rng.integers(0, vocabulary, length).astype(np.int32)
        samples.append(Sample(ids=ids, mask=mask, logprobs=np.where(mask, np.float32("nan"), np.float32(0))))
    return samples


def store_samples(store: Path, samples: Sequence[Sample]) -> "list[SizedSample]":
    """Writes the Samples into a store, and says of each where it lies and how long it is."""
    from learners.plan import SizedSample
    from trajectories.store import StoreWriter

    with StoreWriter(store, "benchmark") as writer:
        return [
            SizedSample(location=writer.append_sample(s), num_tokens=len(s.ids), num_trained=int(s.mask.sum()))
            for s in samples
        ]


def run_thresher(model: Path, samples: list[Sample], *, activation_checkpointing: bool) -> Measured:
    """The Learner, one rank."""
    from learners.config import LearnerConfig, LossConfig, LossKind
    from learners.learner import Learner
    from learners.plan import plan_samples

    config = LearnerConfig(lr=LR, max_tokens=MICRO_BATCH_TOKENS, activation_checkpointing=activation_checkpointing)
    learner, watch = Learner(config, model=model), Stopwatch()
    with tempfile.TemporaryDirectory() as directory:
        store = Path(directory)
        sized = store_samples(store, samples)
        for first in range(0, len(sized), len(LENGTHS)):
            plan = plan_samples(sized[first : first + len(LENGTHS)], num_ranks=1, max_tokens=MICRO_BATCH_TOKENS)
            metrics = learner.forward_backward(plan.ranks[0], LossConfig(kind=LossKind.CROSS_ENTROPY), store)
            learner.optim_step()
            watch.step_ended(MICRO_BATCH_TOKENS, metrics["train/loss"])
    return watch.measured()


def run_plain(model: Path, samples: list[Sample]) -> Measured:
    """transformers with packed positions, whole logits, torch's cross-entropy and AdamW."""
    import torch
    from torch.nn.functional import cross_entropy
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="sdpa").train()
    optimizer, watch = torch.optim.AdamW(network.parameters(), lr=LR, weight_decay=0.0, fused=True), Stopwatch()
    for first in range(0, len(samples), len(LENGTHS)):
        packed = samples[first : first + len(LENGTHS)]
        ids = torch.from_numpy(np.concatenate([s.ids for s in packed])).long()
        mask = torch.from_numpy(np.concatenate([s.mask for s in packed]))
        positions = torch.cat([torch.arange(len(s.ids)) for s in packed])
        logits = network(input_ids=ids[None], position_ids=positions[None], use_cache=False).logits[0]
        loss = cross_entropy(logits[:-1], torch.where(mask, ids, -100)[1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        watch.step_ended(len(ids), loss.item())
        del logits, loss
    return watch.measured()


def run_trl(model: Path, samples: list[Sample], *, packing: str, activation_checkpointing: bool) -> Measured:
    """TRL's SFTTrainer with packing on."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl.trainer.sft_config import SFTConfig
    from trl.trainer.sft_trainer import SFTTrainer

    watch, seen = Stopwatch(), []

    class Watching(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            watch.step_ended(MICRO_BATCH_TOKENS, float("nan"))

        def on_log(self, *_: Any, logs: dict[str, float], **__: Any) -> None:
            seen.append(logs.get("loss"))

    rows = [{"input_ids": s.ids.tolist(), "labels": np.where(s.mask, s.ids, -100).tolist()} for s in samples]
    with tempfile.TemporaryDirectory() as directory:
        trainer = SFTTrainer(
            model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="sdpa"),
            args=SFTConfig(
                output_dir=directory,
                per_device_train_batch_size=1,
                gradient_accumulation_steps=1,
                max_steps=len(samples) // len(LENGTHS),
                max_length=MICRO_BATCH_TOKENS,
                packing=True,
                packing_strategy=packing,
                gradient_checkpointing=activation_checkpointing,
                learning_rate=LR,
                lr_scheduler_type="constant",
                optim="adamw_torch_fused",
                bf16=False,
                use_cpu=True,
                report_to=[],
                save_strategy="no",
                logging_steps=1,
                disable_tqdm=True,
            ),
            train_dataset=Dataset.from_list(rows),
            processing_class=AutoTokenizer.from_pretrained(model),
            callbacks=[Watching()],
        )
        trainer.train()
    watch.losses = [loss for loss in seen if loss is not None]
    return watch.measured()
