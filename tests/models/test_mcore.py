"""Blocks cover every tensor of a checkpoint once, in every layout, and flat slices become boxes that say the same."""

from __future__ import annotations

from collections import defaultdict
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quintet.models import MlaShape, ModelShape, MoeShape, table_of
from quintet.models.mcore import Block, CheckpointMap, flat_boxes, stacked, volume, whole_box

DENSE = ModelShape(
    family="qwen3",
    layers=2,
    hidden_size=8,
    ffn_hidden_size=12,
    heads=4,
    kv_heads=2,
    head_dim=4,
    vocab_size=9,
    max_positions=32,
    tied_embeddings=False,
    norm_eps=1e-6,
    qk_norm=True,
    qkv_bias=True,
)
EXPERTS = ModelShape(
    **{
        **vars(DENSE),
        "family": "deepseek_v3",
        "kv_heads": 4,
        "mla": MlaShape(4, 4, 2, 2, 4),
        "moe": MoeShape(4, 2, 6, shared_ffn_hidden_size=8, dense_layers=(0,), bias=True),
    }
)


def table(shape: ModelShape) -> CheckpointMap:
    return CheckpointMap(table_of(shape))


def inside(box: tuple[tuple[int, int], ...]) -> list[tuple[int, ...]]:
    return list(product(*(range(a, b) for a, b in box)))


@pytest.mark.parametrize("shape", [DENSE, EXPERTS], ids=["dense", "experts"])
@pytest.mark.parametrize(("tp", "etp"), [(1, 1), (2, 1), (2, 2), (4, 2)])
def test_blocks_cover_every_tensor_once(shape, tp, etp):
    made = table(shape)
    if not shape.mla and tp > shape.kv_heads:
        pytest.skip("more ranks than KV groups")
    for name, weight in made.weights.items():
        expert = weight.split.startswith("expert_")
        ranks = range(etp if expert else tp) if weight.split != "replicated" else range(1)
        seen: dict[str, list[tuple[int, ...]]] = defaultdict(list)
        shapes = {}
        for rank in ranks:
            at = 0
            for block in made.blocks(name, tp=(rank, tp), etp=(rank, etp)):
                assert block.start == at  # they follow one another in the parameter
                at = block.stop
                seen[block.key] += inside(block.box)
                shapes[block.key] = block.shape
        for key, elements in seen.items():
            assert sorted(elements) == inside(whole_box(shapes[key])), key


def test_a_rank_of_padding_alone_has_no_blocks():
    made = table(ModelShape(**{**vars(DENSE), "vocab_size": 3}))
    assert made.blocks("output_layer.weight", tp=(3, 4)) == []
    (block,) = made.blocks("output_layer.weight", tp=(2, 4))
    assert block.box == ((2, 3), (0, 8))


def test_keys_are_those_of_transformer_engines_layers():
    layer = "decoder.layers.0."
    assert (
        table(DENSE).key(layer + "input_layernorm.weight")
        == layer + "self_attention.linear_qkv.layer_norm_weight"
    )
    assert table(DENSE).key(layer + "pre_mlp_layernorm.weight") == layer + "mlp.linear_fc1.layer_norm_weight"
    assert (
        table(DENSE).key(layer + "self_attention.q_layernorm.weight")
        == layer + "self_attention.q_layernorm.weight"
    )
    made = table(EXPERTS)
    assert made.key(layer + "input_layernorm.weight") == layer + "input_layernorm.weight"
    assert (
        made.key("decoder.layers.1.pre_mlp_layernorm.weight") == "decoder.layers.1.pre_mlp_layernorm.weight"
    )
    fused = "decoder.layers.1.self_attention.linear_{}_up_proj.layer_norm_weight"
    assert made.key("decoder.layers.1.self_attention.kv_layernorm.weight") == fused.format("kv")
    assert made.key("decoder.layers.1.self_attention.q_layernorm.weight") == fused.format("q")
    expert = made.blocks("decoder.layers.1.mlp.experts.3.linear_fc1.weight")
    assert [b.key.removeprefix("decoder.layers.1.mlp.") for b in expert] == [
        "experts.experts.3.linear_fc1.weight_w",
        "experts.experts.3.linear_fc1.weight_v",
    ]
    with pytest.raises(KeyError):
        made.key("decoder.layers.2.input_layernorm.weight")


def test_stacked_as_core_does_by_default():
    gate, up = table(DENSE).blocks("decoder.layers.1.mlp.linear_fc1.weight", tp=(1, 2))
    key = "decoder.layers.mlp.linear_fc1.weight"
    assert stacked(gate, experts=0, layers=2) == Block(key, (2, 24, 8), ((1, 2), (6, 12), (0, 8)), 0)
    assert stacked(up, experts=0, layers=2) == Block(key, (2, 24, 8), ((1, 2), (18, 24), (0, 8)), 48)
    _, up = table(EXPERTS).blocks("decoder.layers.1.mlp.experts.3.linear_fc1.weight")
    key = "decoder.layers.1.mlp.experts.experts.linear_fc1.weight"
    assert stacked(up, experts=4, layers=None) == Block(key, (4, 12, 8), ((3, 4), (6, 12), (0, 8)), 48)
    (norm,) = table(DENSE).blocks("decoder.final_layernorm.weight")
    assert stacked(norm, experts=0, layers=2) == norm


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 5)), min_size=1, max_size=3),
    st.data(),
)
def test_flat_slices_as_boxes(dims, data):
    box = tuple((first, first + n) for first, n in dims)
    start = data.draw(st.integers(0, volume(box)))
    stop = data.draw(st.integers(start, volume(box)))
    found = list(flat_boxes(box, start, stop))
    assert [e for part in found for e in inside(part)] == inside(box)[start:stop]
    assert len(found) <= 2 * len(box) - 1
