"""Two Ray nodes on this machine, run as a program of its own: see test_two_nodes.py. Prints one JSON object."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from unittest import mock

import ray
import ray._private.node
from ray.cluster_utils import Cluster as SimulatedCluster

from quintet.cluster import ray_compat
from quintet.cluster.cluster import Cluster
from quintet.cluster.group import WorkerGroup
from quintet.errors import UserError, WorkerFailure
from quintet.recipe.schema import Cluster as ClusterSettings
from tests.cluster.workers import Light
from tests.security.ranks import Listening

MODE, TOKEN = os.environ["RAY_AUTH_MODE"], Path(os.environ["RAY_AUTH_TOKEN_PATH"])
NAMES = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def placed(group: WorkerGroup) -> dict[str, object]:
    nodes = [process.at.node_id for _, process in sorted(group._processes.items())]
    return {"nodes": [nodes.index(node) for node in nodes], "env": group.all(Light.environment)(*NAMES)}


def refusals(address: str) -> list[str]:
    """What is said to those who do not hold with the cluster's RAY_AUTH_MODE; with none of it when they may join."""
    said = []
    for auth in ("token", "none"):
        try:
            with Cluster(ClusterSettings(address=address, ray_auth=auth, device="cpu")):
                said.append("joined")
        except UserError as error:
            said.append(str(error))
    return said


def main() -> None:
    found: dict[str, object] = {}
    with mock.patch.object(ray._private.node, "Node", ray_compat._LeanNode):
        simulated = SimulatedCluster(initialize_head=True, head_node_args={"num_cpus": 2})
        simulated.add_node(num_cpus=2)
    try:
        found["auth"] = refusals(simulated.address)
        if MODE == "disabled":
            return
        TOKEN.write_text("1" * 64)
        found["wrong token"] = refusals(simulated.address)[0]
        TOKEN.unlink()
        found["no token"] = refusals(simulated.address)[0]
        TOKEN.write_text("0" * 64)
        os.environ["RAY_AUTH_MODE"] = "disabled"  # which must not win
        settings = ClusterSettings(
            address=simulated.address, ranks=4, ranks_per_node=2, device="cpu", collective_timeout_s=2
        )
        with Cluster(settings) as cluster:
            with WorkerGroup(cluster, Light, 4) as spread:
                found["spread"] = placed(spread)
            packed_cluster = Cluster(settings.model_copy(update={"ranks": 2, "ranks_per_node": None}))
            with packed_cluster as other, WorkerGroup(other, Light, 2) as packed:
                found["packed"] = placed(packed)
            try:
                WorkerGroup(cluster, Light, 6)
            except UserError as error:
                found["too many"] = str(error)
            # One rank on each node, the second on the node that is not the controller's.
            settings.ranks, settings.ranks_per_node = 2, 1
            far = WorkerGroup(cluster, Listening, 2)
            found["total"] = far.all(Listening.total)(2.0)
            found["hosts"] = [node["NodeManagerAddress"] for node in ray.nodes()]
            found["listening"], found["places"] = (
                far.all(Listening.addresses)(),
                far.all(Listening.place_of)(),
            )
            began = time.monotonic()
            try:
                far.all(Listening.meet, phase="train")(["come", "sleep"])
            except WorkerFailure as error:
                found["hang"], found["stacks"] = error.message, error.stacks
            found["hang seconds"] = time.monotonic() - began
        found["still up"] = len(
            [node for node in simulated.list_all_nodes() if node.remaining_processes_alive()]
        )
    finally:
        simulated.shutdown()
        print(json.dumps(found))


if __name__ == "__main__":
    main()
