"""Worker groups on a local Ray: environment, calls, object references, cost of a call."""

from __future__ import annotations

import time

import pytest
import ray

from quintet.cluster.cluster import Cluster
from quintet.cluster.dispatch import megatron_compute, megatron_pp_as_dp
from quintet.cluster.group import WorkerGroup
from quintet.cluster.rank_actor import resolve
from quintet.errors import UserError
from quintet.recipe.schema import Cluster as ClusterSettings
from tests.cluster.workers import Collective, Light
from tests.patience import BUSY


def test_environment_of_more_ranks_than_cores(quartet: WorkerGroup) -> None:
    names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS"]
    told = quartet.all(Light.environment)(*names)
    assert [env["RANK"] for env in told] == ["0", "1", "2", "3"]
    assert [env["LOCAL_RANK"] for env in told] == ["0", "1", "2", "3"]
    assert {env["WORLD_SIZE"] for env in told} == {"4"}
    assert len({(env["MASTER_ADDR"], env["MASTER_PORT"]) for env in told}) == 1
    assert all(int(env["OMP_NUM_THREADS"]) >= 1 for env in told)


def test_methods_run_in_the_main_thread_and_torch_is_not_imported_before_them(quartet: WorkerGroup) -> None:
    facts = quartet.all(Light.facts)()
    assert all(fact["main"] and not fact["torch"] for fact in facts)
    assert len({fact["pid"] for fact in facts}) == 4


def test_ranks_share_a_process_group(pair: WorkerGroup) -> None:
    assert pair.all(Collective.total)(1.5) == [3.0, 3.0]


def test_dispatch_by_the_workers_own_coordinates(quartet: WorkerGroup) -> None:
    # pp 2, tp 2: ranks 0, 1 are the first stage.
    told = quartet.each(Light.tell, megatron_compute)(["only part"], "shared", k=1)
    assert told == [(2, ("only part", "shared"), {"k": 1})]
    assert quartet.each(Light.tell, megatron_pp_as_dp)(["a", "b"]) == [(0, ("a",), {}), (2, ("b",), {})]
    assert quartet.each(Light.tell)([*"abcd"]) == [(n, (part,), {}) for n, part in enumerate("abcd")]
    assert quartet.all(Light.tell, told_by=megatron_compute)(["x"]) == [(2, (["x"],), {})]
    assert quartet.one(Light.tell)("x") == (0, ("x",), {})


def test_references_are_resolved_at_any_depth(quartet: WorkerGroup) -> None:
    ref = ray.put("big")
    told = quartet.one(Light.tell)({"a": [1, (ref, "b")]}, [ref], c=ref)
    assert told == (0, ({"a": [1, ("big", "b")]}, ["big"]), {"c": "big"})
    assert quartet.one(Light.tell)([1, (ref, "b")]) == (0, ([1, ("big", "b")],), {})


def test_resolve_without_references_copies_nothing() -> None:
    value = {"a": [1, 2, 3]}
    assert resolve(value) is value


def test_large_results_stay_with_the_workers(quartet: WorkerGroup) -> None:
    made = quartet.all(Light.make, num_returns=2)(200_000)
    assert [size for size, _ in made] == [200_000] * 4
    refs = [ref for _, ref in made]
    assert all(isinstance(ref, ray.ObjectRef) for ref in refs)
    (_, (first, last), _) = quartet.one(Light.tell)(refs[0], refs[3])
    assert (first[:2], last[-2:]) == (b"\x00\x00", b"\x03\x03")


def test_calls_can_overlap(quartet: WorkerGroup, pair: WorkerGroup) -> None:
    calls = [
        quartet.all(Light.tell).submit(),
        pair.all(Collective.total).submit(1.0),
        quartet.all(Light.tell).submit(2),
    ]
    assert [len(call.result()) for call in calls] == [4, 2, 4]


def test_a_call_costs_milliseconds(pair: WorkerGroup) -> None:
    fastest, patience = 1.0, time.monotonic() + 20  # a busy machine may take a while to show it
    while fastest >= 0.003 * BUSY and time.monotonic() < patience:
        began = time.perf_counter()
        pair.all(Collective.ping)()
        fastest = min(fastest, time.perf_counter() - began)
    assert fastest < 0.003 * BUSY


def test_ranks_log_to_files(quartet: WorkerGroup, ray_cluster: Cluster) -> None:
    assert {path.name for path in ray_cluster.log_dir.glob("quartet-rank-*.log")} == {
        f"quartet-rank-{rank}.log" for rank in range(4)
    }


def test_too_many_nodes_asked_for(ray_cluster: Cluster) -> None:
    settings = ClusterSettings(ranks=2, ranks_per_node=1, device="cpu")
    with Cluster(settings) as cluster, pytest.raises(UserError, match="need 2 nodes"):
        WorkerGroup(cluster, Light, 2)
