r"""The 8B RLOO run of OpenThoughts-Agent (arXiv 2606.24855, appendix D), on 8 learner and 16 inference GPUs.

    python -m recipes.openthoughts.rloo_8b --dry-run
    python -m recipes.openthoughts.rloo_8b --policy /shared/sft-8b --tasks /shared/tasks --run /shared/runs/rloo-8b \
        --sync.directory /shared/weights

`--dry-run` prints placement, memory and batch arithmetic and ends; it needs no GPU, no model and no tasks, and fails
when something does not fit. Every number below can be changed by its flag.

Where sources differ (paper; the 24-GPU configs of two clusters published with it), and what is taken:

* learning rate 5e-6 (paper, one config; the other 8e-6): 5e-6. Gradient clipping 1.0 (paper; configs none and 10): 1.0.
* advantages: RLOO with division by the Group's deviation and normalisation over the batch (paper), RLOO over valid
  members without either (configs): the latter, which is this project's definition.
* reply limit 4,096 tokens (paper, one config; the other 8,192): 4,096.
* rollouts at once 280 (paper, one config; the other 300): 280.
* an agent that ran out of time: reward 0 (paper), masked (one config), its verifier's reward (the other): the last.
* staleness 16: taken as a bound that the learner waits for (`wait`); the published trainer discards what is older.
* sampling: temperature 0.7 with top-p 0.95 and top-k 20 in all of them. Top-p and top-k are left out here: the
  log-probability of a token under a truncated distribution is not the one that the learner computes.
* 48 steps (paper), at most 80 (configs): 48. Its run peaked near step 35 and collapsed, hence `best/` and the alarms.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import tyro

from actors.cluster import Resources
from actors.inference_config import DType, InferencePoolConfig, ServerConfig, Transport
from actors.learner_group import LearnerGroupConfig
from actors.rollout_pool import RolloutPoolConfig
from envs.build import EpisodeConfig, PromptStyle
from envs.sampler import SamplingParams
from learners.config import LearnerConfig, LossConfig, LossKind, Precision
from learners.memory_plan import MemoryRequest, plan_memory
from learners.shape import ModelShape, load_shape
from recipes import rloo
from recipes.launch import launch
from recipes.openthoughts.placement import cache_tokens, place
from recipes.policies import PolicyConfig

CONTEXT_TOKENS = 32_768
GPU_UTILIZATION = 0.9


@dataclass(frozen=True, kw_only=True)
class Config(rloo.Config):
    """The paper's 8B run."""

    run: Path = Path("runs/rloo-8b")
    tasks: str = "tasks/rl"
    steps: int = 48
    groups_per_step: int = 64
    group_size: int = 8
    max_staleness: int = 16
    take_deadline_s: float = 14_400.0
    checkpoint_every: int = 5
    policy: PolicyConfig = field(
        default_factory=lambda: PolicyConfig(
            model="models/sft-8b",
            pool=InferencePoolConfig(
                num_servers=16,
                request_timeout_s=1_800.0,
                start_timeout_s=1_200.0,
                server=ServerConfig(
                    dtype=DType.BFLOAT16,
                    max_model_len=CONTEXT_TOKENS,
                    max_num_seqs=32,
                    num_gpus=1,
                    enforce_eager=False,
                    engine_args={"gpu_memory_utilization": GPU_UTILIZATION},
                ),
            ),
        )
    )
    episode: EpisodeConfig = field(
        default_factory=lambda: EpisodeConfig(
            prompts=PromptStyle.FULL,
            max_turns=10_000,  # turns are unlimited: time and context end a rollout
            context_tokens=CONTEXT_TOKENS,
            sampling=SamplingParams(temperature=0.7, max_tokens=4_096),
            agent_timeout_s=1_800.0,
            max_verifier_timeout_s=120.0,
            group_deadline_s=3_600.0,
        )
    )
    rollouts: RolloutPoolConfig = field(
        default_factory=lambda: RolloutPoolConfig(num_workers=4, max_rollouts=280, start_deadline_s=600.0)
    )
    learner: LearnerConfig = field(
        default_factory=lambda: LearnerConfig(
            lr=5e-6,
            weight_decay=0.0,
            max_grad_norm=1.0,
            precision=Precision.BF16,
            max_tokens=CONTEXT_TOKENS,
            activation_checkpointing=True,
        )
    )
    learners: Annotated[LearnerGroupConfig, tyro.conf.arg(name="learner")] = field(
        default_factory=lambda: LearnerGroupConfig(num_ranks=8, resources=Resources(num_gpus=1, threads=8))
    )
    loss: LossConfig = field(
        default_factory=lambda: LossConfig(kind=LossKind.CLIPPED, clip_low=0.2, clip_high=0.2, dual_clip=3.0)
    )
    dry_run: bool = False
    """Print placement, memory and batch arithmetic, and end."""
    gpus_per_node: int = 8
    gpu_memory_gb: float = 80.0
    """In GiB."""


async def main(config: Config) -> dict[str, Any]:
    """Trains as recipes.rloo does, or with `dry_run` says what the run needs; ValueError when that does not fit."""
    directory = Path(config.policy.model)
    shape = load_shape(str(directory) if (directory / "config.json").is_file() else "qwen3-8b")
    lines, problems = describe(config, shape)
    print("\n".join(lines))
    if problems:
        raise ValueError("; ".join(problems))
    if config.dry_run:
        return {}
    if config.sync.transport is Transport.FILES and config.sync.directory is None:
        raise ValueError(
            "servers lie on other nodes than ranks: give --sync.directory on a disk that every node shares, or "
            "--sync.transport object_store"
        )
    return await rloo.main(config)


def describe(config: Config, shape: ModelShape) -> tuple[Sequence[str], Sequence[str]]:
    """(the plan, one line each; what does not fit and its remedy)."""
    sections = (_placement(config), _learner(config, shape), _servers(config, shape), _batch(config))
    return [line for lines, _ in sections for line in lines], [each for _, found in sections for each in found]


def _placement(config: Config) -> tuple[list[str], list[str]]:
    ranks, servers = config.learners.num_ranks, config.policy.pool.num_servers
    nodes = place(ranks, servers, gpus_per_node=config.gpus_per_node)
    heading = f"placement: {ranks} learner + {servers} inference GPUs on {len(nodes)} nodes of {config.gpus_per_node}"
    return [heading, *(f"  {node}" for node in nodes)], []


def _learner(config: Config, shape: ModelShape) -> tuple[list[str], list[str]]:
    learner, ranks = config.learner, config.learners.num_ranks
    memory = plan_memory(
        MemoryRequest(
            shape=shape,
            num_gpus=ranks,
            micro_batch_tokens=learner.max_tokens,
            chunk_tokens=learner.chunk_tokens,
            sequence_parallel=learner.sequence_parallel,
            activation_checkpointing=learner.activation_checkpointing,
            cpu_offload=learner.cpu_offload,
            lora_rank=learner.lora.rank,
        )
    )
    total = sum(memory.values())
    lines = [
        f"learner GPU: {total:.1f} of {config.gpu_memory_gb:g} GiB for {shape.num_parameters / 1e9:.2f}B weights "
        f"over {ranks} ranks, micro-batches of {learner.max_tokens:,} tokens",
        *(f"  {name}: {value:.1f}" for name, value in memory.items()),
    ]
    problems = []
    if total > config.gpu_memory_gb:
        problems.append(
            f"a learner GPU needs {total:.1f} GiB and has {config.gpu_memory_gb:g}: raise learner.num_ranks"
        )
    if learner.max_tokens < config.episode.context_tokens:
        problems.append(
            f"learner.max_tokens={learner.max_tokens} is less than episode.context_tokens="
            f"{config.episode.context_tokens}: a whole rollout must fit into a micro-batch"
        )
    return lines, problems


def _servers(config: Config, shape: ModelShape) -> tuple[list[str], list[str]]:
    num_servers = config.policy.pool.num_servers
    tokens = cache_tokens(shape, gpu_memory_gb=config.gpu_memory_gb, utilization=GPU_UTILIZATION)
    context = config.episode.context_tokens
    per_server = math.ceil(config.rollouts.max_rollouts / num_servers)
    lines = [
        f"inference GPU: cache for {tokens:,} tokens = {tokens / context:.1f} rollouts of {context:,}; "
        f"{per_server} rollouts share one, so {min(tokens // per_server, context):,} tokens each"
    ]
    problems = []
    if tokens < context:
        problems.append(f"an inference GPU caches {tokens:,} tokens, fewer than one context of {context:,}")
    if config.policy.pool.server.max_model_len < context:
        problems.append(
            f"policy.server.max_model_len={config.policy.pool.server.max_model_len} is less than "
            f"episode.context_tokens={context}"
        )
    return lines, problems


def _batch(config: Config) -> tuple[list[str], list[str]]:
    samples = config.groups_per_step * config.group_size
    most_tokens = samples * config.episode.context_tokens
    micro_batches = math.ceil(most_tokens / config.learner.max_tokens / config.learners.num_ranks)
    ahead = (config.max_staleness + 1) * config.groups_per_step
    at_once = config.rollouts.max_rollouts
    lines = [
        f"step: {config.groups_per_step} Groups x {config.group_size} = {samples} rollouts, "
        f"at most {most_tokens:,} tokens, {micro_batches} micro-batches a rank",
        f"rollouts: {at_once} at once = {samples / at_once:.2f} waves a step; "
        f"up to {ahead:,} Groups ahead of the learner at staleness {config.max_staleness}",
        f"run: {config.steps} steps, {config.steps * samples:,} rollouts, a checkpoint every {config.checkpoint_every}",
    ]
    if at_once < config.group_size:
        return lines, [f"rollouts.max_rollouts must hold a Group of {config.group_size}"]
    return lines, []


if __name__ == "__main__":
    launch(Config, main)
