"""A LoRA adapter as a server takes it: a directory in peft's form, and the version that it makes of the policy.

Invariant: the files of an adapter that was read are there. Made where a learner exported one;
loaded by actors/inference_engine.py.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from actors.inference_errors import WeightSyncError
from trajectories.schema import PolicyVersion

NAME = "policy"
"""The one adapter of a server; a new version replaces it in place, for requests in flight too."""
FILES = ("adapter_config.json", "adapter_model.safetensors")


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """One version of an adapter on the model that the servers loaded."""

    version: PolicyVersion
    directory: Path
    rank: int

    @classmethod
    def read(cls, directory: Path, version: PolicyVersion) -> "Adapter":
        """The adapter in `directory`; WeightSyncError where it is not whole."""
        missing = [name for name in FILES if not (directory / name).is_file()]
        if missing:
            raise WeightSyncError(f"adapter {directory} lacks {', '.join(missing)}: export it in peft's form")
        rank = json.loads((directory / FILES[0]).read_text())["r"]
        return cls(version=version, directory=directory, rank=rank)

    def require_rank(self, largest: int, server: str) -> None:
        """WeightSyncError where a server cannot hold it."""
        if self.rank > largest:
            raise WeightSyncError(
                f"{server} takes adapters up to rank {largest}, got rank {self.rank}: set the server's lora_rank"
            )
