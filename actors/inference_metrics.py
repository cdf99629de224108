"""Metrics of an inference pool: what its servers did between two looks at them.

Invariant: a server that restarted in between counts from its new start. Called by actors/inference_pool.py, for a run's
metrics and for Ray's Prometheus endpoint.
"""

from collections.abc import Mapping
from dataclasses import fields

from ray.util.metrics import Gauge

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


class Gauges:
    """Ray's gauges, each made when it is first set; read at the cluster's Prometheus endpoint."""

    def __init__(self) -> None:
        self._gauges: dict[str, Gauge] = {}

    def set_health(self, server: str, health: ServerHealth) -> None:
        """Sets `thresher_inference_NAME` of one server for every number of its health."""
        for field in fields(health):
            value = getattr(health, field.name)
            if isinstance(value, int | float):
                self._set(f"thresher_inference_{field.name}", float(value), server)

    def _set(self, name: str, value: float, server: str) -> None:
        if name not in self._gauges:
            self._gauges[name] = Gauge(name, tag_keys=("server",))
        self._gauges[name].set(value, tags={"server": server})
