"""Compute threads of actors that share the cores of one machine.

Invariant: a thread that waits for another spins for SPIN_COUNT turns, then sleeps.
Called by actors/cluster.py and actors/inference_config.py.
"""

SPIN_COUNT = 10_000
"""As GOMP_SPINCOUNT counts them; docs/decisions/079 has the measurements."""


def thread_environment(threads: int) -> dict[str, str]:
    """Environment variables of a process with `threads` compute threads; read when it loads OpenMP."""
    return {
        "OMP_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "PASSIVE",  # for runtimes other than GNU's
        "GOMP_SPINCOUNT": str(SPIN_COUNT),
    }
