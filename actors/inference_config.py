"""How an inference server and its pool are set up.

Invariant: a config that was built is valid, and `check_model` refuses a wrong path before any process starts.
Built by recipes, read by actors/inference_server.py and actors/inference_pool.py; imports neither Ray, vLLM nor torch.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

import tyro

from actors.threads import thread_environment

CPU_BLOCK_TOKENS = 32
"""Granularity of the prefix cache on CPU. vLLM's default there, 128, would never reuse a prompt of 100 tokens."""

LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Sizes in which vLLM 0.32 makes room for an adapter."""

KEPT_BYTES = 4 << 30
"""Blocks up to this size stay with an engine on CPUs that frees them; docs/decisions/080 has the measurements."""


class DType(StrEnum):
    """Number format of weights and activations in the engine."""

    AUTO = "auto"
    """The one that the model's config.json names."""
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    """Quantised checkpoints are often saved so."""


class UpdateMode(StrEnum):
    """What happens to the requests in flight while weights are replaced."""

    KEEP = "keep"
    """They freeze, and go on with the new weights on the tokens and caches they have."""
    WAIT = "wait"
    """They finish with the old weights first; nothing new starts meanwhile."""
    ABORT = "abort"
    """They are dropped; their requests fail over as if the server had gone."""


class Transport(StrEnum):
    """How weights reach the servers."""

    FILES = "files"
    """Servers read a stage where the learner wrote it: shared memory of one node, or a disk that all nodes share."""
    OBJECT_STORE = "object_store"
    """Ray carries the stage to each node once, into shared memory there."""
    NCCL = "nccl"
    """vLLM's broadcast from learner rank 0 to servers on other GPUs."""
    IPC = "ipc"
    """Colocated servers map what the rank on their GPU gathered."""
    SHARDED_RDT = "sharded_rdt"
    """Each server rank pulls from all learner ranks, layer by layer, over NIXL."""

    @property
    def is_direct(self) -> bool:
        """Whether vLLM's own engines carry tensors from GPU to GPU, all servers at once and nothing staged."""
        return self not in (Transport.FILES, Transport.OBJECT_STORE)


class KvReuse(StrEnum):
    """Which requests may read a prefix from the KV cache that others computed."""

    NEVER = "never"
    """None across policy versions: the cache is shared among trajectories, within one version."""
    TRAJECTORY = "trajectory"
    """A trajectory reads what it computed itself, under whichever version; nobody else's. Saves prefill after a sync,
    at the price of keys and values that older weights made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """One inference server: a vLLM engine in one actor."""

    dtype: DType = DType.AUTO
    max_model_len: int = 2048
    """Longest prompt plus reply, in tokens; at most what the model has positions for."""
    max_num_seqs: int = 128
    """Sequences decoded at once; further requests queue in the server, those of older Groups first."""
    stream_tokens: int = 32
    """A reply is handed on every so many tokens; a server that dies takes no more than these with it."""
    kv_cache_gb: float = 0.5
    """KV cache of a CPU engine, in GiB; on GPUs `engine_args["gpu_memory_utilization"]` rules."""
    threads: int = 1
    """OpenMP threads of a CPU engine. 1 is fastest for tiny models, and wherever other processes share the cores."""
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    """Replicas that vLLM runs as one engine. More than 1 is for experts spread over them; else take more servers."""
    expert_parallel: bool = False
    """Spread the experts of a mixture over all tensor- and data-parallel ranks, instead of slicing each."""
    lora_rank: tyro.conf.Suppress[int] = 0
    """Rank of the adapter that is served on the model; 0 serves none. No flag: recipes take it from learner.lora."""
    lora_targets: tyro.conf.Suppress[tuple[str, ...]] = ()
    """Names of the linear maps that the adapter may change; likewise."""
    transport: tyro.conf.Suppress[Transport] = Transport.FILES
    """How weights come. No flag: recipes take it from sync.transport."""
    colocated: bool = False
    """Take turns with the learner: sleep while it trains, wake when its weights come. On GPUs a server and a learner
    rank share one, whose memory the sleeper frees; on CPU they share the cores, and nothing is freed."""
    num_cpus: float = 0.0
    """CPU cores to reserve in Ray's scheduler."""
    num_gpus: int = 0
    """GPUs of the server, over all its ranks; 0 serves on CPU."""
    enforce_eager: bool = True
    """No compilation and no CUDA graphs: quick start."""
    engine_args: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Further vLLM engine arguments, by their vLLM names; they win over the fields above."""
    worker_extension: str = "actors.weight_extension.WeightExtension"
    """Class that loads and reads back weights inside vLLM's worker."""

    def __post_init__(self) -> None:
        sizes = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
        for name in ("max_model_len", "max_num_seqs", "stream_tokens", "threads", *sizes):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, got {getattr(self, name)}")
        if self.kv_cache_gb <= 0:
            raise ValueError(f"kv_cache_gb must be > 0, got {self.kv_cache_gb}")
        if not 0 <= self.lora_rank <= LORA_RANKS[-1]:
            raise ValueError(f"lora_rank must be 0 (no adapter) to {LORA_RANKS[-1]}, got {self.lora_rank}")
        if self.lora_rank and not self.lora_targets:
            raise ValueError("an adapter needs lora_targets, the linear maps that it changes, such as q_proj v_proj")
        if self.num_gpus not in (0, self.num_ranks):
            product = " x ".join(f"{name}={getattr(self, name)}" for name in sizes)
            raise ValueError(f"num_gpus must be 0 (CPU) or {product}, got {self.num_gpus}")
        if self.num_gpus == 0 and self.num_ranks != self.tensor_parallel_size:
            raise ValueError("pipeline and data parallelism need GPUs: set num_gpus to the product of the three sizes")
        if self.colocated and self.num_ranks > 1:
            raise ValueError("a colocated server has one GPU, its learner rank's; set the three parallel sizes to 1")

    @property
    def num_ranks(self) -> int:
        """Ranks of the engine, each with a GPU of its own where there are GPUs."""
        return self.tensor_parallel_size * self.pipeline_parallel_size * self.data_parallel_size

    @property
    def spans_nodes(self) -> bool:
        """Whether vLLM places the ranks by itself, as Ray actors on any nodes, instead of beside the server."""
        # sharded_rdt pulls by Ray, so its ranks must be Ray's.
        return self._has_stages_or_replicas or self.transport is Transport.SHARDED_RDT

    @property
    def _has_stages_or_replicas(self) -> bool:
        return self.pipeline_parallel_size * self.data_parallel_size > 1

    def environment(self) -> dict[str, str]:
        """Environment variables that the server's process needs before vLLM is imported."""
        common = {
            "VLLM_LOGGING_LEVEL": "ERROR",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "PYTHONWARNINGS": "ignore::FutureWarning",
            "TORCH_CPP_LOG_LEVEL": "ERROR",
        }
        if self.transport is Transport.IPC:  # handles of GPU memory are no plain data
            common["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
        if self.num_gpus:
            return common
        return common | {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0" if self.tensor_parallel_size == 1 else "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            **thread_environment(self.threads),
            # What one weight update frees serves the next, instead of going back to the system page by page.
            "MALLOC_MMAP_THRESHOLD_": str(KEPT_BYTES),
            "MALLOC_TRIM_THRESHOLD_": str(KEPT_BYTES),
        }

    def resolved_dtype(self, model: Path) -> DType:
        """`dtype`, or for AUTO the one that the directory `model` was saved in."""
        return saved_dtype(model) if self.dtype is DType.AUTO else self.dtype

    def resolved_engine_args(self, model: Path) -> dict[str, Any]:
        """Keyword arguments of vLLM's AsyncEngineArgs for the weights in directory `model`."""
        args: dict[str, Any] = {
            "model": str(model),
            "skip_tokenizer_init": True,
            "generation_config": "vllm",
            "dtype": self.resolved_dtype(model).value,
            "max_model_len": min(self.max_model_len, num_positions(model)),
            # One slot more than requests are admitted, so that a probe never waits behind them.
            "max_num_seqs": self.max_num_seqs + 1,
            "enforce_eager": self.enforce_eager,
            "tensor_parallel_size": self.tensor_parallel_size,
            "logprobs_mode": "processed_logprobs",
            "worker_extension_cls": self.worker_extension,
            "scheduling_policy": "priority",
            "disable_log_stats": True,
            "use_tqdm_on_load": False,
        }
        if self.num_gpus == 0:
            args["block_size"] = CPU_BLOCK_TOKENS
            args["kv_cache_memory_bytes"] = int(self.kv_cache_gb * 2**30)
            args["distributed_executor_backend"] = "uni" if self.tensor_parallel_size == 1 else "mp"
        return args | self._parallel_args() | self._lora_args() | self._update_args() | dict(self.engine_args)

    def _parallel_args(self) -> dict[str, Any]:
        args: dict[str, Any] = {"distributed_executor_backend": "ray"} if self.spans_nodes else {}
        if self._has_stages_or_replicas:
            args["pipeline_parallel_size"] = self.pipeline_parallel_size
            args["data_parallel_size"] = self.data_parallel_size
            args["data_parallel_backend"] = "ray"
        if self.spans_nodes or self.expert_parallel:
            args["enable_expert_parallel"] = self.expert_parallel
        return args

    def _lora_args(self) -> dict[str, Any]:
        if not self.lora_rank:
            return {}
        room = next(rank for rank in LORA_RANKS if rank >= self.lora_rank)
        # Named, because vLLM else prepares the output head too, whose adapter code on CPU cannot compute the
        # log-probabilities of a prompt: the first probe would end the engine.
        targets = list(self.lora_targets)
        return {"enable_lora": True, "max_loras": 1, "max_lora_rank": room, "lora_target_modules": targets}

    def _update_args(self) -> dict[str, Any]:
        args: dict[str, Any] = {}
        if self.transport.is_direct:
            args["weight_transfer_config"] = {"backend": self.transport.value}
        if self.colocated and self.num_gpus:
            args["enable_sleep_mode"] = True
        return args


@dataclass(frozen=True, slots=True, kw_only=True)
class InferencePoolConfig:
    """A pool of equal inference servers."""

    server: ServerConfig = field(default_factory=ServerConfig)
    num_servers: int = 1
    kv_reuse: KvReuse = KvReuse.NEVER
    start_timeout_s: float = 300.0
    """Deadline for all servers to be placed and up."""
    request_timeout_s: float = 300.0
    """Deadline of one sample, retries included."""
    max_attempts: int = 4
    """How many servers in a row one sample may try without a new token before its rollout gets a sampler_error."""
    health_interval_s: float = 2.0
    """Seconds between health checks."""
    health_timeout_s: float = 60.0
    """A server silent for this long counts as dead."""
    max_restarts: int = 8
    """How often a dead server is restarted."""

    def __post_init__(self) -> None:
        for name in ("num_servers", "max_attempts"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, got {getattr(self, name)}")
        for name in ("start_timeout_s", "request_timeout_s", "health_interval_s", "health_timeout_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be > 0, got {getattr(self, name)}")


def check_model(model: Path) -> Path:
    """`model` as an absolute path; ValueError when it is not a directory that vLLM can load."""
    if not model.is_dir():
        raise ValueError(f"model path {model} does not exist: give a local directory with a saved model")
    for what, pattern in (("config.json", "config.json"), ("weights", "*.safetensors")):
        if not any(model.glob(pattern)):
            raise ValueError(f"model path {model} has no {what} ({pattern}): save the model there with save_pretrained")
    return model.absolute()


def num_positions(model: Path) -> int:
    """Longest sequence that a model directory's config.json allows."""
    config = json.loads((model / "config.json").read_text())
    return config.get("text_config", config)["max_position_embeddings"]


def vocabulary_size(model: Path) -> int:
    """Token ids that a model directory's config.json knows."""
    config = json.loads((model / "config.json").read_text())
    return config.get("text_config", config)["vocab_size"]


def saved_dtype(model: Path) -> DType:
    """The number format that a model directory was saved in."""
    config = json.loads((model / "config.json").read_text())
    name = config.get("dtype") or config.get("torch_dtype")
    if name not in ("float32", "bfloat16", "float16"):
        raise ValueError(f"{model / 'config.json'} names dtype {name!r}: set the server's dtype to float32 or bfloat16")
    return DType(name)
