"""Resharding: every element arrives, from any layout to any other."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from quintet.engine.weights.reshard import Holdings, Owners, all_units, plan_transfers
from quintet.engine.weights.rounds import Parts, Round, Transfer, Turns
from tests.engine import moe_models
from tests.oracle.reference import save

LAYOUTS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "tp2-to-dp2": (2, {"tp": 2}, {}),
    "dp2-to-tp2": (2, {}, {"tp": 2}),
    "pp2-to-tp2": (2, {"pp": 2}, {"tp": 2}),
    "uneven-pp2-to-tp2": (2, {"pp": 2, "stage_layers": [3, 1]}, {"tp": 2}),
    "uneven-pp2-vpp2-to-pp2": (2, {"pp": 2, "vpp": 2, "stage_layers": [0, 1, 2, 1]}, {"pp": 2}),
    "tp2-pp2-to-dp4": (4, {"tp": 2, "pp": 2}, {}),
    "tp2-sp-to-pp2": (2, {"tp": 2, "sp": True}, {"pp": 2}),
}
OF_EXPERTS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "ep2-to-etp2": (2, {"ep": 2}, {"etp": 2}),
    "etp2-to-dp2": (2, {"etp": 2}, {}),
    "ep4-to-tp2-sp-pp2": (4, {"ep": 4}, {"tp": 2, "sp": True, "pp": 2}),
    "uneven-pp2-ep2-to-tp2-sp-ep2": (
        4,
        {"pp": 2, "ep": 2, "stage_layers": [1, 3]},
        {"tp": 2, "sp": True, "ep": 2},
    ),
    "pp2-ep2-to-tp2-sp-ep2": (4, {"pp": 2, "ep": 2}, {"tp": 2, "sp": True, "ep": 2}),
}


def reshard(path: Path, source: dict[str, Any], target: dict[str, Any]) -> list[tuple[str, bool]]:
    """On one rank: load into the source layout, move to the target, compare with a load into the target, shard by shard. What nobody
    has is an error on every rank."""
    import torch.distributed as dist

    from quintet.engine import build
    from quintet.engine.engine import Engine
    from quintet.engine.weights.hf import check_hf, fill_hf
    from quintet.engine.weights.reshard import Resharder
    from quintet.engine.weights.shards import Shard, shard_map
    from quintet.models import read_shape
    from quintet.recipe import schema

    shape, settings = read_shape(path), schema.Engine()
    engine = Engine(shape, schema.Layout(**source), engine=settings, optimizer=None, dtype="fp32")
    engine.load_hf(path)
    layout = schema.Layout(**target)
    mesh = build.mesh_of(layout, dist.get_world_size())
    models = [build.build_chunks(shape, layout, mesh, torch.float32, settings) for _ in range(2)]
    moved, loaded = (shard_map(model, shape, mesh) for model in models)
    fill_hf(loaded, check_hf(shape, path))
    where = {"dtype": torch.float32, "device": build.device()}
    for shard in moved:
        shard.view.fill_(float("nan"))
    Resharder(engine.shard_map(), moved, bucket_mib=1, **where).run()
    lost = [Shard("lost", (1,), ((0, 1),), torch.empty(1))] if dist.get_rank() == 0 else []
    with pytest.raises(RuntimeError if dist.get_rank() else ValueError, match="lost"):
        Resharder(engine.shard_map(), lost, **where)
    return [(a.name, torch.equal(a.read(), b.read())) for a, b in zip(moved, loaded, strict=True)]


@pytest.mark.parametrize("family", ["qwen3", "qwen3-tied", "qwen2"])
@pytest.mark.parametrize("layouts", LAYOUTS)
def test_weights_arrive_bit_for_bit(pool, tmp_path_factory, family, layouts):
    path = save(family, tmp_path_factory.getbasetemp() / f"reshard-{family}")
    world, source, target = LAYOUTS[layouts]
    for result in pool.run(reshard, world, path, source, target):
        assert result
        assert [name for name, same in result if not same] == []


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
@pytest.mark.parametrize("layouts", OF_EXPERTS)
def test_experts_arrive_bit_for_bit(pool, tmp_path_factory, family, layouts):
    path = moe_models.save(family, tmp_path_factory.getbasetemp() / f"reshard-{family}")
    world, source, target = OF_EXPERTS[layouts]
    names = set()
    for result in pool.run(reshard, world, path, source, target):
        assert [name for name, same in result if not same] == []
        names |= {name for name, _ in result}
    assert names == set(load_file(path / "model.safetensors"))


def chop(size: int, parts: int) -> list[tuple[int, int]]:
    return [(size * i // parts, size * (i + 1) // parts) for i in range(parts)]


@given(st.integers(1, 40), st.integers(1, 5), st.integers(1, 5), st.integers(1, 3))
def test_every_element_is_sent_once(size, source_parts, target_parts, replicas):
    rows, columns = chop(size, source_parts), chop(7, target_parts)
    sources = [[("w", (r, (0, 7)))] for _ in range(replicas) for r in rows if r[0] < r[1]]
    targets = [[("w", ((0, size), c))] for c in columns if c[0] < c[1]]
    world = max(len(sources), len(targets))
    sources += [[] for _ in range(world - len(sources))]
    targets += [[] for _ in range(world - len(targets))]
    filled = [torch.zeros(size, 7, dtype=torch.int64) for _ in targets]
    owners = Owners(sources)
    for t in (t for rank, wanted in enumerate(targets) for t in plan_transfers(owners, rank, wanted)):
        (a, b), (c, d) = t.box
        filled[t.target][a:b, c:d] += 1
        (first, last), _ = sources[t.source][t.source_index][1]
        assert first <= a <= b <= last
    for holdings, count in zip(targets, filled, strict=True):
        expected = torch.zeros_like(count)
        for _, ((a, b), (c, d)) in holdings:
            expected[a:b, c:d] = 1
        assert torch.equal(count, expected)


def test_a_box_without_a_source_is_named():
    for name, box, missing in (("lost", (0, 2), 2), ("w", (0, 3), 1)):
        with pytest.raises(ValueError, match=f"{name}: {missing} elements of"):
            plan_transfers(Owners([[("w", ((0, 1),)), ("w", ((1, 2),))]]), 0, [(name, (box,))])


def in_many_rounds() -> tuple[int, int]:
    """On each of two ranks: three groups of three heads come to rank 1, in rounds of less than a group and a half; rounds, and right elements."""
    import torch.distributed as dist

    from quintet.engine.weights import reshard as room
    from quintet.engine.weights.shards import Shard

    rank = dist.get_rank()
    groups = torch.arange(3.0 * 5 * 3 * 4).view(3, 5, 3, 4)
    q = Shard("q", (27, 4), ((0, 27), (0, 4)), (groups if rank == 0 else groups * 0)[:, :3])
    where = {"dtype": torch.float32, "device": torch.device("cpu")}
    with mock.patch.object(room, "Turns", lambda *how: Turns(*how[:-1], 200)):
        resharder = room.Resharder(*([q], []) if rank == 0 else ([], [q]), **where)
    resharder.run()
    return len(resharder.rounds), int((q.view == groups[:, :3]).sum())


def test_no_group_is_cut_through(pool):
    for rounds, right in pool.run(in_many_rounds, 2):
        assert rounds >= 3
        assert right == 108


def test_a_part_has_whole_groups_of_every_rank():
    held = [Holdings([], set(), units) for units in ({"w": (4, 1)}, {"w": (6, 1), "v": (2,)}, {})]
    assert all_units([*held, held[0]]) == {"w": (12, 1), "v": (2,)}


@pytest.mark.parametrize("standing", [True, False])
def test_what_is_computed_when_it_is_read_is_read_each_time(standing):
    held, found = torch.zeros(2), torch.empty(2)

    def part(box: Any) -> torch.Tensor:
        return held if standing else held + 0

    shard: Any = SimpleNamespace(standing=standing, part=part)
    box = ((0, 2),)
    one = Round([Transfer("w", box, 0, 0, 0, 0)], {}, {}, lambda name: torch.float32, 1, crosses=False)
    sources = Parts([shard])
    for value in (1.0, 2.0):
        held.fill_(value)
        one.run(sources, lambda transfer: found, torch.device("cpu"))
        assert found.tolist() == [value, value]
