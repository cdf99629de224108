"""Gauges, at the endpoint that Prometheus would scrape."""

import asyncio
import re
import urllib.request

import pytest
import ray

from actors.cluster import ClusterConfig, start_cluster
from actors.gauges import Gauges


def test_without_a_cluster_nothing_is_set_and_nothing_fails() -> None:
    Gauges().set({"sync/probe_gap": 0.25}, run="a")


@pytest.mark.ray
async def test_what_is_set_is_served_with_its_tags() -> None:
    async with start_cluster(ClusterConfig()):
        Gauges().set({"sync/probe_gap": 0.25, "sync/in_flight/server-0": 3.0}, run="a")
        Gauges().set({"server/kv_usage": 0.5}, server="server-0")
        (node,) = ray.nodes()
        url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
        async with asyncio.timeout(60):  # Ray hands its gauges on every ten seconds
            while (text := await asyncio.to_thread(_scraped, url)).count("ray_thresher_") < 9:  # noqa: ASYNC110
                await asyncio.sleep(0.5)
    assert _values(text) == {
        ("sync_probe_gap", "run", "a"): 0.25,
        ("sync_in_flight_server_0", "run", "a"): 3.0,
        ("server_kv_usage", "server", "server-0"): 0.5,
    }


def _scraped(url: str) -> str:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return answer.read().decode()
    except OSError:  # it is not up yet
        return ""


def _values(text: str) -> dict[tuple[str, str, str], float]:
    found = re.findall(r'^ray_thresher_(\w+)\{.*?\b(run|server)="([^"]*)".*\} (\S+)$', text, re.MULTILINE)
    return {(name, tag, value): float(number) for name, tag, value, number in found}
