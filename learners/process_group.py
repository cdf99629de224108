"""The process group that learner ranks meet in.

Invariant: every rank joins within `timeout_s` or raises; nothing later waits longer than that for a collective.
Called by learner actors and tests before a Learner is built.
"""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

DEFAULT_TIMEOUT_S = 600.0


def new_group(ranks: list[int] | None = None, *, backend: str | None = None) -> dist.ProcessGroup | None:
    """A further group of `ranks` (None: all), with the deadline of the first; None on ranks outside it.

    Every rank of the first group must call this, for every group, in the same order.
    """
    group = dist.new_group(ranks, backend=backend, timeout=timedelta(seconds=DEFAULT_TIMEOUT_S))
    return group if isinstance(group, dist.ProcessGroup) else None


def init_process_group(
    address: str | None = None, *, rank: int = 0, world_size: int = 1, timeout_s: float = DEFAULT_TIMEOUT_S
) -> int:
    """The world size, once all ranks have joined at `address` ("tcp://host:port" or "file:///path").

    gloo serves CPU tensors, NCCL those on GPUs. A lone rank needs no address.
    """
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    timeout = timedelta(seconds=timeout_s)
    if world_size > 1 and address is None:
        raise ValueError(f"{world_size} ranks need an address to meet at: tcp://host:port or file:///path")
    if address is None:
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=timeout)
    else:
        dist.init_process_group(backend, init_method=address, rank=rank, world_size=world_size, timeout=timeout)
    return dist.get_world_size()
