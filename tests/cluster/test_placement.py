"""Placement, as far as it can be decided without Ray."""

from __future__ import annotations

import pytest

from quintet.cluster import placement
from quintet.cluster.process_probe import Location
from quintet.errors import UserError
from quintet.recipe.schema import Layout


def test_bundles() -> None:
    assert placement.bundles(3, None, {"GPU": 1.0}) == ([{"GPU": 1.0}] * 3, "PACK")
    assert placement.bundles(8, 4, {"GPU": 1.0}) == ([{"GPU": 4.0}] * 2, "STRICT_SPREAD")
    with pytest.raises(UserError, match="ranks_per_node=3 does not divide the 8 ranks"):
        placement.bundles(8, 3, {"GPU": 1.0})


def test_more_ranks_than_cores_fit_a_laptop_and_not_a_shared_cluster() -> None:
    nodes = [{"CPU": 2.0}]
    placement.check_fits(nodes, 64, None, placement.rank_resources("cpu", is_local=True))
    with pytest.raises(UserError, match=r"4 ranks need 4 free CPUs, and the cluster has 2 on 1 node"):
        placement.check_fits(nodes, 4, None, placement.rank_resources("cpu", is_local=False))
    with pytest.raises(UserError, match=r"^rollout-1: 4 ranks need .* 1 node\(s\)\. Free or add nodes\.$"):
        placement.check_fits(nodes, 4, None, {"CPU": 1.0}, "rollout-1")


def test_ranks_per_node_needs_enough_nodes() -> None:
    nodes = [{"GPU": 8.0, "CPU": 9.0}, {"GPU": 3.0}]
    placement.check_fits(nodes, 8, 8, {"GPU": 1.0})
    with pytest.raises(UserError, match="need 2 nodes with 4 free GPUs each, and the cluster has 1 such"):
        placement.check_fits(nodes, 8, 4, {"GPU": 1.0})


def test_ranks_are_numbered_node_by_node_and_gpu_by_gpu() -> None:
    where = [("b", 1), ("a", 0), ("b", 0), ("a", 1)]
    locations = [
        Location(node, node, (gpu,), cores=8, pid=1, created=0.0, oom_kills=None) for node, gpu in where
    ]
    order = placement.rank_order(locations)
    assert [where[index] for index in order] == [("b", 0), ("b", 1), ("a", 0), ("a", 1)]
    assert placement.local_ranks([locations[i] for i in order]) == [(0, 2), (1, 2), (0, 2), (1, 2)]


def test_single_cuda_connection_only_where_the_layout_needs_it() -> None:
    needs = placement.needs_single_cuda_connection
    assert needs("cuda", Layout(tp=2))
    assert needs("cuda", Layout(cp=2))
    assert not needs("cuda", Layout(pp=2))
    assert not needs("cuda", None)
    assert not needs("cpu", Layout(tp=2))
