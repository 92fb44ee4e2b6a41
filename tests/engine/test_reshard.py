"""Resharding: every element arrives, from any layout to any other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from quintet.engine.weights.reshard import Owners, plan_transfers
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
    """On one rank: load into the source layout, move to the target, compare with a load into the target, shard by shard."""
    import torch.distributed as dist

    from quintet.engine import build
    from quintet.engine.engine import Engine
    from quintet.engine.weights.hf import check_hf, fill_hf
    from quintet.engine.weights.reshard import Resharder
    from quintet.engine.weights.shards import shard_map
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
    for shard in moved:
        shard.view.fill_(float("nan"))
    where = {"dtype": torch.float32, "device": build.device()}
    Resharder(engine.shard_map(), moved, bucket_mib=1, **where).run()
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
    with pytest.raises(ValueError, match="lost"):
        plan_transfers(Owners([[("w", ((0, 2),))]]), 0, [("lost", ((0, 2),))])
