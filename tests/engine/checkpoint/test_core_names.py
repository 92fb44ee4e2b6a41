"""Names, shapes and boxes of a checkpoint's tensors are those that megatron-core gives its own model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engine.checkpoint.core_model import core_model, sharded
from tests.oracle.models import save

Found = dict[str, tuple[tuple[int, ...], Any]]


def described(
    path: Path, layouts: list[tuple[str, dict[str, Any]]], stack: bool
) -> list[tuple[Found, Found]]:
    """On one rank: core's boxes and ours of each model in its layout, by key."""
    from quintet.models import read_shape
    from quintet.recipe import schema

    found = []
    for name, layout in layouts:
        shape = read_shape(path / name)
        model, mesh = core_model(shape, schema.Layout(**layout))
        metadata = {} if stack else {"singleton_local_shards": True}
        found.append((core_boxes(sharded(model, mesh, metadata)), our_boxes(model, mesh, shape, stack)))
    return found


def core_boxes(state: dict[str, Any]) -> Found:
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import apply_factories

    apply_factories(state)
    found: dict[str, tuple[tuple[int, ...], Any]] = {}
    for one in nested_values(state):
        local = (1,) * one.prepend_axis_num + tuple(one.local_shape)
        box = tuple((first, first + n) for first, n in zip(one.global_offset, local, strict=True))
        found.setdefault(one.key, (tuple(one.global_shape), []))[1].append(box)
    return {key: (shape, sorted(boxes)) for key, (shape, boxes) in found.items()}


def our_boxes(model: Any, mesh: Any, shape: Any, stack: bool) -> Found:
    from quintet.models import table_of
    from quintet.models.mcore import CheckpointMap, stacked

    table = CheckpointMap(table_of(shape))
    sizes, at = mesh.sizes, mesh.coordinates
    layers, experts = shape.layers // sizes.pp, (shape.moe.experts if shape.moe else 0) // sizes.ep
    found: dict[str, tuple[tuple[int, ...], Any]] = {}
    for name in table.weights:
        parts = name.split(".")
        first, last = parts[0] == "embedding", parts[0] == "output_layer" or parts[1] == "final_layernorm"
        if (first and not mesh.first_stage) or (last and not mesh.last_stage):
            continue
        if parts[1] == "layers" and int(parts[2]) // layers != at["pp"]:
            continue
        if "experts" in parts and int(parts[parts.index("experts") + 1]) // experts != at["ep"]:
            continue
        for block in table.blocks(name, tp=(at["tp"], sizes.tp), etp=(at["etp"], sizes.etp)):
            if stack:
                alike = shape.moe is None
                block = stacked(block, experts=experts * sizes.ep, layers=shape.layers if alike else None)
            found.setdefault(block.key, (block.shape, []))[1].append(block.box)
    return {key: (full, sorted(boxes)) for key, (full, boxes) in found.items()}


def assert_same(results: list[list[tuple[Found, Found]]]) -> None:
    for rank in results:
        for core, ours in rank:
            for found in (core, ours):  # core has the padding of a vocabulary that does not divide
                for key in ("embedding.word_embeddings.weight", "output_layer.weight"):
                    found.pop(key, None)
            assert ours == core


@pytest.mark.parametrize("stack", [False, True], ids=["apart", "stacked"])
def test_one_rank(pool, tmp_path, stack):
    names = ["qwen2-tied", "qwen3_moe", "deepseek_v3"]
    for name in names:
        save(name, tmp_path / name)
    assert_same(pool.run(described, 1, tmp_path, [(name, {}) for name in names], stack))


def test_four_ranks(pool, tmp_path):
    layouts = [
        ("qwen3", {"tp": 2, "pp": 2}),
        ("qwen3_moe", {"tp": 2, "ep": 2, "etp": 2}),
        ("deepseek_v3", {"pp": 2, "ep": 2}),
    ]
    for name, _ in layouts:
        save(name, tmp_path / name)
    assert_same(pool.run(described, 4, tmp_path, layouts, False))
