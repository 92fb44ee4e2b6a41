"""Fingerprints of what is brought in 8 bits are those of the quantized tensors, however a layout cuts their blocks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.compare import compare
from quintet.engine.weights import fp8
from quintet.engine.weights.fingerprint import fingerprints
from quintet.models import ModelShape, MoeShape
from quintet.models.mcore import whole_box

MOE = MoeShape(4, 2, 136, dense_layers=(0,))
SHAPE = ModelShape("qwen3_moe", 2, 192, 320, 4, 2, 40, 61, 64, False, 1e-6, qk_norm=True, moe=MOE)


def drawn(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor's content follows from its name; some blocks are zeros, some elements far larger than others."""
    generator = torch.Generator().manual_seed(sum(map(ord, name)))
    out = torch.randn(shape, generator=generator) * torch.randn(shape[-1:], generator=generator).exp()
    out[: len(out) // 2] *= 1e-3
    if len(shape) == 2:
        out[:128, 128:] = 0
    return out.bfloat16()


def told(layout: dict[str, Any]) -> Any:
    """On one rank."""
    import torch.distributed as dist

    from quintet.engine import build
    from quintet.engine.engine import DTYPES
    from quintet.engine.weights.fp8_fingerprint import quantized_fingerprints
    from quintet.engine.weights.shards import shard_map
    from quintet.recipe import schema

    wanted = schema.Layout(**layout)
    mesh = build.mesh_of(wanted, dist.get_world_size())
    chunks = build.build_chunks(SHAPE, wanted, mesh, DTYPES["bf16"], schema.Engine())
    shards = shard_map(chunks, SHAPE, mesh)
    for shard in shards:
        shard.write(drawn(shard.name, shard.shape)[tuple(slice(*ends) for ends in shard.box)])
    return *quantized_fingerprints(shards, SHAPE, build.device()), {s.name: s.shape for s in shards}


LAYOUTS = {
    "one": (1, {}),
    "tp2-sp": (2, {"tp": 2, "sp": True}),
    "ep2-etp1-tp2": (2, {"tp": 2, "sp": True, "ep": 2, "etp": 1}),
    "pp2": (2, {"pp": 2}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_tells_the_same(pool, layout):
    world, sizes = LAYOUTS[layout]
    ranks = pool.run(told, world, sizes)
    names = fp8.quantized_names(SHAPE)
    shapes = {name: shape for rank in ranks for name, shape in rank[1].items()}
    assert all(set(rank[1]) == {name for name, _ in rank[0]} for rank in ranks)
    items = []
    for name, shape in {n: s for rank in ranks for n, s in rank[2].items()}.items():
        whole = drawn(name, shape)
        tensors = {name: whole}
        if name in names:
            scales = torch.empty(fp8.scales_shape(shape))
            tensors = {name: torch.empty(shape, dtype=fp8.DTYPE), name + fp8.SCALE: scales}
            fp8.quantize(whole, tensors[name], scales)
        items += [(n, tuple(t.shape), whole_box(t.shape), t) for n, t in tensors.items()]
    assert {name for name, *_ in items} == set(shapes)
    assert len(names) == 2 * 4 + 3 + 3 * 4
    assert compare([rank[0] for rank in ranks], [fingerprints(items)], shapes) == []
