"""What runs inside vLLM's worker: loads a stage, and reads back what the kernels hold.

Invariant: `load_stage` leaves no tensor of the old version in any kernel, tied and prepacked copies included.
Mixed into vLLM's worker class (`worker_extension_cls`) and called through collective_rpc by actors/inference_server.py.
"""

import os
import select
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch

from actors.kernel_readback import compare_kernels
from actors.weight_noise import Noise, disturb
from actors.weight_stage import Manifest, manifest_from_message, read_stage
from learners.vector_math import settle_vector_math

settle_vector_math()  # vLLM imports this before it builds the model, whose table of rotations is computed once


class WeightExtension:
    """Methods that vLLM adds to its worker; `self.model_runner` and `self.rank` are the worker's."""

    model_runner: Any
    rank: int

    def end_with(self, server_pid: int) -> None:
        """Kills this worker and the engine process above it when the server's process ends, however it ends.

        vLLM's engine process outlives a parent that was killed, and would keep its memory and cores.
        """
        server = os.pidfd_open(server_pid)
        doomed = [os.pidfd_open(pid) for pid in (os.getppid(), os.getpid()) if pid != server_pid]
        threading.Thread(target=_kill_after, args=(server, doomed), daemon=True).start()

    def load_stage(self, message: dict[str, Any], noise: dict[str, Any] | None) -> dict[str, Any]:
        """Replaces all weights by those of a stage, whose digests the caller has checked; returns seconds.

        `noise` holds the fields of a Noise (the canary); None loads the stage as it is.
        """
        manifest = manifest_from_message(message)
        disturbance = Noise(names=(), scale=0.0) if noise is None else Noise(**noise)
        began = time.perf_counter()
        self.model_runner.reload_weights(weights_iterator=self._tensors(manifest, disturbance))
        repack_tied_heads(self.model_runner.get_model())
        return {"load_s": time.perf_counter() - began}

    def read_back(self, message: dict[str, Any], max_columns: int) -> dict[str, Any]:
        """Compares what the kernels hold with the stage, bit for bit, prepacked weights on `max_columns` columns."""
        manifest = manifest_from_message(message)
        began = time.perf_counter()
        report = compare_kernels(self.model_runner.get_model(), manifest, max_columns=max_columns)
        return {"read_back_s": time.perf_counter() - began, **report}

    def _tensors(self, manifest: Manifest, noise: Noise) -> Iterator[tuple[str, torch.Tensor]]:
        for staged, tensor in read_stage(manifest):
            yield staged.name, disturb(tensor, staged.name, noise) if staged.name in noise.names else tensor


def _kill_after(server: int, doomed: list[int]) -> None:
    """Waits for the process behind a pid descriptor to end, then kills others."""
    select.select([server], [], [])
    for process in doomed:
        signal.pidfd_send_signal(process, signal.SIGKILL)


def repack_tied_heads(model: torch.nn.Module) -> None:
    """Renews the packed copy of every output head that shares its weight with the embedding.

    vLLM 0.32 on CPU repacks a layer when that layer's own weights arrive; a tied head has none, so its kernel would go
    on with the old ones.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    embeddings = [m for m in model.modules() if isinstance(m, VocabParallelEmbedding)]
    for head in embeddings:
        is_tied = any(head is not other and head.weight is other.weight for other in embeddings)
        if isinstance(head, ParallelLMHead) and is_tied and hasattr(head, "cpu_linear"):
            head.quant_method.process_weights_after_loading(head)
