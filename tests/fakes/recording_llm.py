"""RecordingLLM: vLLM's AsyncLLM as weight transfers and sleep see it; every call is remembered in order."""

from types import SimpleNamespace
from typing import Any


class RecordingLLM:
    """Answers every coroutine with None."""

    errored = False

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        cache = SimpleNamespace(kv_cache_size_tokens=1000)
        self.vllm_config = SimpleNamespace(cache_config=cache)
        self.model_config = SimpleNamespace(max_model_len=64)

    def __getattr__(self, name: str) -> Any:
        async def call(*args: Any, **kwargs: Any) -> None:
            self.calls.append((name, args, kwargs))

        return call

    @property
    def names(self) -> list[str]:
        return [name for name, _, _ in self.calls]
