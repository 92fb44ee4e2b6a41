"""Worker groups that several tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from quintet.cluster.cluster import Cluster
from quintet.cluster.group import WorkerGroup
from tests.cluster.workers import Collective, Light


@pytest.fixture(scope="session")
def pair(ray_cluster: Cluster) -> Iterator[WorkerGroup]:
    """Two ranks in a gloo group."""
    with WorkerGroup(ray_cluster, Collective, 2, name="pair") as group:
        yield group


@pytest.fixture(scope="session")
def quartet(ray_cluster: Cluster) -> Iterator[WorkerGroup]:
    """Four ranks without torch, as pp 2, dp 1, cp 1, tp 2, on however few cores."""
    with WorkerGroup(ray_cluster, Light, 4, name="quartet", mesh=(2, 1, 1)) as group:
        yield group
