"""Numbers at the cluster's Prometheus endpoint: Ray's gauges, which it serves as `ray_thresher_NAME`.

Invariant: one name has the same tags wherever it is set; without a cluster nothing is set and nothing fails.
Called by actors/inference_pool.py for what each server is doing, and by recipes/run.py for the metrics of each step.
"""

import re
import sys
from collections.abc import Mapping
from typing import Any


class Gauges:
    """Each is made when it is first set."""

    def __init__(self) -> None:
        self._gauges: dict[str, Any] = {}

    def set(self, metrics: Mapping[str, float], **tags: str) -> None:
        """Sets `thresher_NAME` for every metric; what is no letter or digit in a name becomes "_"."""
        # A process that has not imported Ray is in no cluster, and a recipe that needs none should not wait for it.
        if "ray" not in sys.modules or not sys.modules["ray"].is_initialized():
            return
        from ray.util.metrics import Gauge

        for metric, value in metrics.items():
            name = "thresher_" + re.sub(r"\W", "_", metric)
            if name not in self._gauges:
                self._gauges[name] = Gauge(name, tag_keys=tuple(tags))
            self._gauges[name].set(value, tags=tags)
