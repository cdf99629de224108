"""How weights travel to the servers, and how hard their arrival is proven.

Invariant: a config that was built is valid. Built by recipes, read by actors/weight_sync.py,
actors/transfer_sync.py and actors/version_proof.py.
"""

from dataclasses import dataclass
from pathlib import Path

from actors.inference_config import Transport, UpdateMode


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncConfig:
    """Numbers of a WeightSync."""

    directory: Path | None = None
    """Where stages lie; None takes shared memory. For servers on other nodes: a file system that they share, or
    another `transport`."""
    transport: Transport = Transport.FILES
    """How weights reach the servers. nccl, ipc and sharded_rdt need GPUs, and have every server wait for the others."""
    mode: UpdateMode = UpdateMode.KEEP
    barrier: bool = True
    """True: `publish` returns when every server has the version. False: when it is staged; servers follow, and what
    fails there raises at the next publish."""
    canary: bool = True
    """Before a server's first use, disturb each group of tensors and see its log-probabilities move."""
    probe_tokens: int = 48
    """Length of the probe sequence."""
    probe_tolerance: float = 1e-5
    """Largest gap of a probe's log-probability to the learner's, relative to its size where that is over 1, if both
    compute in float32."""
    probe_is_exact: bool = True
    """False where the learner computes in bfloat16: the gap is then an alarm, as it is for bfloat16 servers."""
    alarm_factor: float = 3.0
    """Alarm when the mean gap exceeds this many times that of the first publish."""
    read_back_columns: int = 16
    """Columns of each prepacked weight that are read back at a sync, different ones at each version."""
    stage_timeout_s: float = 300.0
    load_timeout_s: float = 120.0
    """For one server's load, for each push of the canary, and for a whole transfer between GPUs."""
    probe_timeout_s: float = 120.0

    def __post_init__(self) -> None:
        for name, least in (("probe_tokens", 2), ("read_back_columns", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be >= {least}, got {getattr(self, name)}")
        for name in ("probe_tolerance", "alarm_factor", "stage_timeout_s", "load_timeout_s", "probe_timeout_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be > 0, got {getattr(self, name)}")
