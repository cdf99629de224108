"""Metrics of an inference pool: what its servers did between two looks at them.

Invariant: a server that restarted in between counts from its new start. Called by actors/inference_pool.py, for a run's
metrics and, server by server, for the cluster's Prometheus endpoint.
"""

from collections.abc import Mapping
from dataclasses import fields

from actors.inference_server import ServerHealth

COUNTERS = (
    "num_preemptions",
    "num_sampled_tokens",
    "num_requests",
    "num_prompt_tokens",
    "num_cached_tokens",
    "first_token_s",
    "pause_s",
)


def pool_metrics(before: Mapping[str, ServerHealth], after: Mapping[str, ServerHealth]) -> dict[str, float]:
    """Flat metrics under "inference/"; rates and means are those of the time between the two."""
    grown = {name: sum(_grown(before.get(server), now, name) for server, now in after.items()) for name in COUNTERS}
    spans_s = [_grown(before.get(server), now, "at_s") for server, now in after.items() if server in before]
    metrics = {
        "servers": float(len(after)),
        "running": float(sum(health.num_running for health in after.values())),
        "waiting": float(sum(health.num_waiting for health in after.values())),
        "kv_usage_max": max((health.kv_usage for health in after.values()), default=0.0),
        "preemptions": grown["num_preemptions"],
        "sampled_tokens": grown["num_sampled_tokens"],
        "prefilled_tokens": grown["num_prompt_tokens"] - grown["num_cached_tokens"],
    }
    if grown["num_prompt_tokens"]:
        metrics["prefix_hit_rate"] = grown["num_cached_tokens"] / grown["num_prompt_tokens"]
    if grown["num_requests"]:
        metrics["first_token_s_mean"] = grown["first_token_s"] / grown["num_requests"]
    if spans_s and max(spans_s) > 0:
        metrics["tokens_per_s"] = grown["num_sampled_tokens"] / max(spans_s)
        metrics["pause_share"] = grown["pause_s"] / sum(spans_s)
    return {f"inference/{name}": value for name, value in metrics.items()}


def _grown(before: ServerHealth | None, after: ServerHealth, name: str) -> float:
    """How much a counter grew; from 0 when the process is another one."""
    base = getattr(before, name) if before is not None and before.pid == after.pid else 0
    return getattr(after, name) - base


def server_metrics(health: ServerHealth) -> dict[str, float]:
    """Every number of one server's health under "server/"; counters count from its start."""
    numbers = {field.name: getattr(health, field.name) for field in fields(health)}
    return {f"server/{name}": float(value) for name, value in numbers.items() if isinstance(value, int | float)}
