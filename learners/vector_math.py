"""Makes torch's first results on a CPU as exact as its later ones.

Invariant: after `settle_vector_math` no function of MKL's vector library is called for the first time by two threads
at once. Called by whatever is about to compute with torch: Learners, vLLM's workers, the tests.
"""

from functools import cache

import torch

VECTOR_FUNCTIONS = (
    torch.acos,
    torch.asin,
    torch.atan,
    torch.cos,
    torch.erf,
    torch.erfc,
    torch.erfinv,
    torch.exp,
    torch.log,
    torch.log2,
    torch.log10,
    torch.sin,
    torch.sqrt,
    torch.tan,
    torch.tanh,
    torch.trunc,
)
"""Those that torch hands to MKL (ATen/cpu/vml.h)."""


@cache
def settle_vector_math() -> None:
    """Calls each function once on one value, in one thread; later calls cost nothing.

    MKL 2024.2 picks the kernel of a function when it is first called. If two threads call it first, one of them may
    run a kernel that is right to 11 bits only: of a float32 cosine, half the values were off by up to 1.5e-4, once
    (https://github.com/pytorch/pytorch/issues/188792, docs/decisions/081). An engine would keep them in its table of
    rotations, a learner in its first step.
    """
    for dtype in (torch.float32, torch.float64):
        value = torch.full((1,), 0.5, dtype=dtype)
        for function in VECTOR_FUNCTIONS:
            function(value)
