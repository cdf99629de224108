"""What a learner rank needs on its GPU, by component, from the model's shape alone.

Invariant: arithmetic on what learners/model.py and learners/logprobs.py allocate; nothing is loaded or measured. The
plan is of the peak, when the backward begins. Called by recipes/doctor.py and recipes/openthoughts.
"""

from dataclasses import dataclass

from learners.shape import ModelShape

GIB = 2**30
RESERVED_GB = 2.0
"""CUDA context, kernels and NCCL's buffers."""
FRAGMENTATION = 0.05
"""Share of what torch allocates that it cannot use."""
BF16, FP32 = 2, 4


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRequest:
    """How a model is trained; weights are computed with in bf16, kept and stepped in float32."""

    shape: ModelShape
    num_gpus: int
    micro_batch_tokens: int
    """Tokens of a micro-batch: at least the context."""
    chunk_tokens: int = 512
    sequence_parallel: int = 1
    activation_checkpointing: bool = True
    cpu_offload: bool = False
    lora_rank: int = 0

    def __post_init__(self) -> None:
        if self.num_gpus < 1 or self.micro_batch_tokens < 2:
            raise ValueError(f"gpus must be >= 1 and context >= 2, got {self.num_gpus} and {self.micro_batch_tokens}")
        if self.sequence_parallel < 1 or self.num_gpus % self.sequence_parallel:
            raise ValueError(f"sequence_parallel={self.sequence_parallel} must divide the {self.num_gpus} GPUs")


def plan_memory(request: MemoryRequest) -> dict[str, float]:
    """GiB on each GPU by component, in the order in which they are explained below.

    weights, gradients, optimizer: the float32 shards (4 + 4 + 8 bytes a weight over all GPUs; with LoRA the last two of
    adapters only; all three in host memory with offload). gathered weights: bf16 of two layers, one used and one on its
    way, and of embedding and head. gathered gradients: of the larger of one layer and embedding with head, in bf16 and,
    to be reduced, in float32. activations: see `_activation_bytes`. logits: a chunk in float32 twice and in bf16, and
    the head's gradient in float32.
    """
    shape, gpus = request.shape, request.num_gpus
    trained = _lora_parameters(shape, request.lora_rank) if request.lora_rank else shape.num_parameters
    is_head_trained = not request.lora_rank
    on_gpu = 0 if request.cpu_offload else 1
    gathered = 2 * shape.layer_parameters + shape.head_parameters
    largest = max(shape.layer_parameters, shape.head_parameters) if is_head_trained else trained // shape.num_layers
    head = FP32 * shape.vocabulary * shape.hidden if is_head_trained else 0
    num_bytes = {
        "weights": on_gpu * FP32 * shape.num_parameters / gpus,
        "gradients": on_gpu * FP32 * trained / gpus,
        "optimizer": on_gpu * 2 * FP32 * trained / gpus,
        "gathered weights": BF16 * gathered,
        "gathered gradients": (BF16 + FP32) * largest,
        "activations": _activation_bytes(request),
        "logits": request.chunk_tokens * shape.vocabulary * (2 * FP32 + BF16) + head,
    }
    allocated = sum(num_bytes.values())
    components = {name: value / GIB for name, value in num_bytes.items()}
    return components | {"fragmentation": FRAGMENTATION * allocated / GIB, "reserved": RESERVED_GB}


def host_memory_gb(request: MemoryRequest) -> float:
    """GiB of host memory a GPU's rank holds: the float32 shards with offload, nothing without."""
    if not request.cpu_offload:
        return 0.0
    trained = _lora_parameters(request.shape, request.lora_rank) or request.shape.num_parameters
    return FP32 * (request.shape.num_parameters + 3 * trained) / request.num_gpus / GIB


def _activation_bytes(request: MemoryRequest) -> float:
    """What the layers keep for the backward.

    A layer keeps, a token: two norms (input and normalised in float32, output in bf16), queries and keys before and
    after norm and rotation, values, what attention gave, and four widths of the MLP. With checkpointing every layer
    keeps its bf16 input, and one, being recomputed, all of it and as much again in gradients.
    """
    shape = request.shape
    tokens = request.micro_batch_tokens / request.sequence_parallel
    norms = 2 * shape.hidden * (2 * FP32 + BF16)
    heads = shape.num_heads + shape.num_kv_heads
    attention = shape.head_dim * (heads * (FP32 + 3 * BF16) + (shape.num_kv_heads + shape.num_heads) * BF16)
    layer = tokens * (norms + attention + 4 * shape.intermediate * BF16)
    if not request.activation_checkpointing:
        return shape.num_layers * layer
    return shape.num_layers * tokens * shape.hidden * BF16 + 2 * layer


def _lora_parameters(shape: ModelShape, rank: int) -> int:
    """Weights of adapters on all seven maps of each layer: rank * (inputs + outputs) each."""
    query, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    widths = 2 * (shape.hidden + query) + 2 * (shape.hidden + kv) + 3 * (shape.hidden + shape.intermediate)
    return shape.num_layers * rank * widths
