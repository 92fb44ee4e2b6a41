"""A controller to be run as a program of its own, and interrupted: see test_cluster.py."""

from __future__ import annotations

import sys
import time

from quintet.cluster import ray_compat
from quintet.cluster.cluster import Cluster
from quintet.cluster.group import WorkerGroup
from quintet.recipe.schema import Cluster as ClusterSettings
from tests.cluster.workers import Light


class SlowToForget(WorkerGroup):
    """Takes longer than the last resort waits."""

    def forget(self) -> None:
        time.sleep(3 * ray_compat.LAST_RESORT_S)
        super().forget()
        print("forgotten", flush=True)


if __name__ == "__main__":
    try:
        auth = "none" if sys.argv[1:] == ["open"] else "token"
        with Cluster(ClusterSettings(ranks=2, device="cpu", ray_auth=auth)) as cluster:
            group = WorkerGroup(cluster, Light, 2)
            if sys.argv[1:] == ["slow end"]:
                ray_compat.LAST_RESORT_S = 1.0
                cluster.adopt(SlowToForget(cluster, Light, 1))
                print("calling", flush=True)
                while ray_compat.death() is None:
                    time.sleep(0.01)
                ray_compat.check()
            if sys.argv[1:] == ["fail"]:
                group.all(Light.fail, phase="train")("kill", 1)
            if sys.argv[1:] == ["stop"]:
                group.all(Light.have_a_child)()
                group.all(Light.stop_yourself).submit()
            pending = group.all(Light.sleep).submit()
            print("calling", flush=True)
            if sys.argv[1:] == ["busy"]:
                time.sleep(1000)
            pending.result()
    finally:
        print("stopped")
