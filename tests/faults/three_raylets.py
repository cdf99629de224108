"""A cluster of three raylets on this machine: a head without CPUs and two nodes. Ends when standard input closes.

Invariant: one line of JSON on standard output, {"address", "raylets"}, once all three are up.
Started by tests/faults/bed.py as a process of its own, so that killing a node hurts nothing else.
"""

import json
import sys

from ray.cluster_utils import Cluster  # noqa: TID251 - the bed needs nodes to kill

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "object_store_memory": 100 << 20})
nodes = [cluster.add_node(num_cpus=8, object_store_memory=100 << 20) for _ in range(2)]
cluster.wait_for_nodes()
raylets = [node.all_processes["raylet"][0].process.pid for node in nodes]
print(json.dumps({"address": cluster.address, "raylets": raylets}), flush=True)
sys.stdin.read()
cluster.shutdown()
