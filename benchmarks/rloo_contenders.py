"""The contenders of the RLOO comparison: this project's inference pool and learner group, and TRL's RLOOTrainer.

Invariant: the same prompts, group size, reply limit, temperature, rewards and threads; the first step warms up, the
others are timed whole: sampling, rewards, learning and, for this project, publishing the new weights with proof.
Called by benchmarks/learner.py.
"""

import asyncio
import itertools
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from actors.cluster import ClusterConfig, Resources, start_cluster
from actors.inference_config import DType, InferencePoolConfig, ServerConfig
from actors.inference_pool import start_inference_pool
from actors.learner_group import LearnerGroup, LearnerGroupConfig, start_learner_group
from actors.weight_sync import WeightSync
from envs.sampler import Completion, Sampler, SamplingParams
from learners.config import LearnerConfig, LossConfig, LossKind
from learners.plan import plan_batch
from trajectories.handle import GroupHandle, summarize
from trajectories.schema import Group, Outcome, PolicyVersion, Trajectory, Turn, TurnTokens
from trajectories.store import StoreWriter

WORDS = ("apple", "lemon", "melon", "berry")
QUESTION = "Write the names of the files in the directory {} that hold the word {}, sorted, one a line, and say why."
PROMPTS = tuple(f"<|im_start|>user\n{QUESTION.format(word, word)}<|im_end|>\n<|im_start|>assistant\n" for word in WORDS)
GROUP_SIZE = 8
REPLY_TOKENS = 128
LR = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What one contender did."""

    completions_per_s: float
    step_s: list[float]
    """Seconds of each timed step."""
    mean_reply_tokens: float
    stages_s: dict[str, float]
    """Mean seconds by stage, where the contender has stages."""


def reward(ids: Sequence[int]) -> float:
    """0 or 1 at random, but the same for the same reply: nearly every Group carries gradient."""
    return float(sum(ids) % 2)


def run_thresher(model: Path, *, num_steps: int, threads: int) -> Measured:
    """Engine and learner in float32, the faster precision here (AVX-512, no AMX); the engine compiles at its start."""
    with tempfile.TemporaryDirectory() as directory:
        return asyncio.run(_run_thresher(model, Path(directory), num_steps, threads))


async def _run_thresher(model: Path, store: Path, num_steps: int, threads: int) -> Measured:
    ranks = LearnerGroupConfig(resources=Resources(threads=threads))
    server = ServerConfig(
        dtype=DType.FLOAT32,
        enforce_eager=False,
        max_num_seqs=64,
        kv_cache_gb=0.5,
        max_model_len=512,
        threads=threads,
    )
    stages: list[dict[str, float]] = []
    lengths: list[int] = []
    async with (
        start_cluster(ClusterConfig()),
        start_learner_group(ranks, LearnerConfig(lr=LR, max_tokens=4096), model=model, store=store) as learner,
        start_inference_pool(InferencePoolConfig(server=server), model=model, version=None) as pool,
    ):
        weights = WeightSync(source=learner, target=pool)
        await weights.publish(PolicyVersion(lineage=0, n=0))
        for step in range(num_steps + 1):
            clock = time.perf_counter()
            groups = await _sample(pool.sampler(), model, store, step)
            sampled = time.perf_counter()
            await _learn(learner, groups)
            learned = time.perf_counter()
            await weights.publish(PolicyVersion(lineage=0, n=step + 1))
            published = time.perf_counter()
            lengths += [branch.num_trained for group in groups for m in group.members for branch in m.branches]
            stages.append({"sample": sampled - clock, "learn": learned - sampled, "publish": published - learned})
        await weights.close()
    timed = stages[1:]
    seconds = [sum(stage.values()) for stage in timed]
    return Measured(
        completions_per_s=len(PROMPTS) * GROUP_SIZE * num_steps / sum(seconds),
        step_s=seconds,
        mean_reply_tokens=sum(lengths) / len(lengths),
        stages_s={name: sum(stage[name] for stage in timed) / num_steps for name in timed[0]},
    )


async def _sample(sampler: Sampler, model: Path, store: Path, step: int) -> list[GroupHandle]:
    """One Group a prompt, sampled all at once and stored."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    prompts = [tokenizer(prompt)["input_ids"] for prompt in PROMPTS]
    params = SamplingParams(temperature=1.0, max_tokens=REPLY_TOKENS)
    replies = await asyncio.gather(
        *(
            sampler.sample(ids, params, stop_ids=[tokenizer.eos_token_id], key=f"{step}-{index}-{member}")
            for index, ids in enumerate(prompts)
            for member in range(GROUP_SIZE)
        )
    )
    with StoreWriter(store, f"step-{step}") as writer:
        groups = [
            _group(f"{step}-{index}", ids, replies[index * GROUP_SIZE : (index + 1) * GROUP_SIZE])
            for index, ids in enumerate(prompts)
        ]
        return [summarize(group, writer.append(group)) for group in groups]


def _group(name: str, prompt: Sequence[int], replies: Sequence[Completion]) -> Group:
    trajectories = []
    for member, reply in enumerate(replies):
        tokens = TurnTokens(
            prefix_len=0, new_ids=tuple(prompt), sampled_ids=reply.ids, logprobs=reply.logprobs, spans=reply.spans
        )
        trajectories.append(
            Trajectory(
                id=f"{name}-{member}",
                task_id=name,
                group_id=name,
                member=member,
                prompt="",
                turns=(Turn(reply="", observation="", finish_reason=reply.finish_reason, tokens=tokens),),
                outcome=Outcome.COMPLETED,
                reward=reward(reply.ids),
            )
        )
    return Group(id=name, task_id=name, trajectories=tuple(trajectories))


async def _learn(learner: LearnerGroup, groups: Sequence[GroupHandle]) -> None:
    plan = plan_batch(groups, num_ranks=learner.num_shares, max_tokens=4096)
    await learner.forward_backward(plan, LossConfig(kind=LossKind.CLIPPED))
    await learner.optim_step()


def run_trl(model: Path, *, num_steps: int, precision: str, micro_batch: int) -> Measured:
    """TRL's RLOOTrainer without KL, its own generation; `precision` fp32 or bf16, `micro_batch` completions at once."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl.trainer.rloo_config import RLOOConfig
    from trl.trainer.rloo_trainer import RLOOTrainer

    ends: list[float] = []
    lengths: list[int] = []

    def judge(completion_ids: list[list[int]], **_: Any) -> list[float | None]:
        lengths.extend(map(len, completion_ids))
        return [reward(ids) for ids in completion_ids]

    class Watching(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            ends.append(time.perf_counter())

    num_completions = len(PROMPTS) * GROUP_SIZE
    with tempfile.TemporaryDirectory() as directory:
        trainer = RLOOTrainer(
            model=AutoModelForCausalLM.from_pretrained(
                model, dtype={"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
            ),
            reward_funcs=judge,
            args=RLOOConfig(
                output_dir=directory,
                per_device_train_batch_size=micro_batch,
                gradient_accumulation_steps=num_completions // micro_batch,
                num_generations=GROUP_SIZE,
                max_completion_length=REPLY_TOKENS,
                max_steps=num_steps + 1,
                learning_rate=LR,
                lr_scheduler_type="constant",
                temperature=1.0,
                beta=0.0,
                gradient_checkpointing=False,
                bf16=False,
                use_cpu=True,
                report_to=[],
                save_strategy="no",
                disable_tqdm=True,
            ),
            train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in PROMPTS] * (num_steps + 1)),
            processing_class=AutoTokenizer.from_pretrained(model),
            callbacks=[Watching()],
        )
        trainer.train()
    seconds = [after - before for before, after in itertools.pairwise(ends)]
    return Measured(
        completions_per_s=num_completions * num_steps / sum(seconds),
        step_s=seconds,
        mean_reply_tokens=sum(lengths) / len(lengths),
        stages_s={},
    )
