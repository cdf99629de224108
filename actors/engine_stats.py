"""Counters of one engine: tokens, prefix cache, time to first token, pauses.

Invariant: counters only grow, so a rate is a difference of two snapshots. Filled by actors/inference_engine.py; read by
health checks.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True, kw_only=True)
class EngineStats:
    """What an engine counted since it started."""

    num_sampled_tokens: int = 0
    num_requests: int = 0
    """Requests whose first token came."""
    num_prompt_tokens: int = 0
    """Of these requests."""
    num_cached_tokens: int = 0
    """Prompt tokens taken from the prefix cache."""
    first_token_s: float = 0.0
    """Seconds from arrival to first token, queue included, summed over requests."""
    pause_s: float = 0.0
    """Seconds in which nothing was sampled, for weight updates."""
    on_step: Callable[[float, int], None] = lambda kv_usage, num_preempted: None
    """Told of each engine step: the share of the KV cache in use, and how many requests were preempted."""

    def began(self, output: Any, waited_s: float) -> None:
        """Counts a request at its first output (vLLM's RequestOutput)."""
        self.num_requests += 1
        self.num_prompt_tokens += len(output.prompt_token_ids)
        self.num_cached_tokens += output.num_cached_tokens or 0
        self.first_token_s += waited_s


def step_logger(stats: EngineStats) -> type:
    """A stat logger for vLLM that passes on the two numbers that admission needs.

    It passes for vLLM's Prometheus logger, which would otherwise be added, and observes histograms for each token.
    """
    from vllm.v1.metrics.loggers import PrometheusStatLogger

    class StepLogger(PrometheusStatLogger):
        def __init__(self, vllm_config: Any, engine_indexes: Any = None) -> None:
            pass

        def record(
            self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
        ) -> None:
            if scheduler_stats is not None:
                preempted = iteration_stats.num_preempted_reqs if iteration_stats is not None else 0
                stats.on_step(scheduler_stats.kv_cache_usage, preempted)

        def log_engine_initialized(self) -> None:
            pass

        def record_sleep_state(self, sleep: int = 0, level: int = 0) -> None:
            pass

        def record_admission_rejection(self, reason: str) -> None:
            pass

    return StepLogger
