"""Where a run's GPUs go, and what a server's GPU can cache: arithmetic on a config, for a dry run without a GPU.

Invariant: pure; nothing is loaded, started or measured. What a learner's GPU holds: learners/memory_plan.py.
Called by recipes/openthoughts/rloo_8b.py.
"""

from learners.memory_plan import BF16, GIB
from learners.shape import ModelShape

SERVER_RESERVED_GB = 4.0
"""CUDA context, graphs and activations of a server's GPU."""


def place(num_learners: int, num_servers: int, *, gpus_per_node: int) -> list[str]:
    """One line a node: which ranks and servers its GPUs hold. Ranks come first, on as few nodes as can be.

    8 ranks and 16 servers at 8 a node -> "node 0: rank 0-7", "node 1: server 0-7", "node 2: server 8-15".
    """
    if gpus_per_node < 1:
        raise ValueError(f"gpus_per_node must be >= 1, got {gpus_per_node}")
    tenants = [("rank", k) for k in range(num_learners)] + [("server", k) for k in range(num_servers)]
    lines: list[str] = []
    for node, begin in enumerate(range(0, len(tenants), gpus_per_node)):
        here = tenants[begin : begin + gpus_per_node]
        parts: list[str] = []
        for kind in ("rank", "server"):
            numbers = [number for each, number in here if each == kind]
            if numbers:
                parts.append(f"{kind} {numbers[0]}-{numbers[-1]}")
        lines.append(f"node {node}: {', '.join(parts)}")
    return lines


def cache_tokens(shape: ModelShape, *, gpu_memory_gb: float, utilization: float) -> int:
    """Tokens whose bf16 keys and values fit on one server's GPU beside its weights; 0 when the weights do not fit."""
    free = gpu_memory_gb * utilization - SERVER_RESERVED_GB - BF16 * shape.num_parameters / GIB
    return max(0, int(free * GIB / shape.cache_bytes_per_token))
