"""Counts processes whose first cosine differs from their second: `python -m tests.learners.first_calls plain 20000`.

With `settled` they call `settle_vector_math` first. Each is a fork of one that has imported torch and computed
nothing, and eight of them share the cores, so that a thread is often interrupted while MKL picks a kernel.
"""

import os
import sys

import torch

from learners.vector_math import settle_vector_math

CROWD = 8
NUM_VALUES = 5760


def first_call_is_exact(is_settled: bool) -> bool:
    """Whether this process's first cosine equals its second in every bit."""
    angles = torch.arange(NUM_VALUES) * 0.0156
    if is_settled:
        settle_vector_math()
    return torch.equal(angles.cos(), angles.cos())


def count_inexact(num_processes: int, *, is_settled: bool) -> int:
    """How many of so many processes got another result the first time."""
    num_inexact = 0
    for _ in range(0, num_processes, CROWD):
        crowd = []
        for _ in range(CROWD):
            pid = os.fork()
            if pid == 0:
                os._exit(0 if first_call_is_exact(is_settled) else 1)
            crowd.append(pid)
        for pid in crowd:
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            assert code in (0, 1), f"a process ended with {code}"
            num_inexact += code
    return num_inexact


if __name__ == "__main__":
    print(count_inexact(int(sys.argv[2]), is_settled=sys.argv[1] == "settled"))
