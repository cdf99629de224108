"""vLLM's nccl receiver on a CPU: its own updates and reloading, but tensors come through a file, not a broadcast."""

import os
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

from actors.weight_extension import WeightExtension

FILE = "THRESHER_TEST_TRANSFER"
"""Environment variable with the path of the file."""


class FileReceiver(NCCLWeightTransferEngine):
    """Joins no group, and reads what the update names."""

    def init_transfer_engine(self, init_info: Any) -> None:
        self.packed = init_info.packed

    def update_weights(self, update_info: dict[str, Any]) -> None:
        names = self.parse_update_info(update_info).names
        tensors = load_file(Path(os.environ[FILE]))
        self.model.load_weights((name, tensors[name]) for name in names)  # pyright: ignore[reportCallIssue]


class FileTransfer(WeightExtension):
    """Importing it puts FileReceiver in nccl's place, in the worker's process alone."""


WeightTransferEngineFactory._registry["nccl"] = lambda: FileReceiver
