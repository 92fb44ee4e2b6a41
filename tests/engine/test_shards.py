"""Tensors come under the table's names, whatever a back end of layers calls them."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from quintet.models import ModelShape, MoeShape

SHAPE = ModelShape(
    family="qwen3_moe",
    layers=2,
    hidden_size=8,
    ffn_hidden_size=12,
    heads=2,
    kv_heads=1,
    head_dim=4,
    vocab_size=10,
    max_positions=32,
    tied_embeddings=True,
    norm_eps=1e-6,
    qk_norm=True,
    moe=MoeShape(experts=4, top_k=2, ffn_hidden_size=6, dense_layers=(0,)),
)


class Stage(SimpleNamespace):
    """What the shard map asks of a model. Like a module, it is equal to itself alone."""

    __eq__, __hash__ = object.__eq__, object.__hash__


def fused_stage() -> Any:
    """The names and shapes that TransformerEngine's layers have on the second of two ep ranks, second pipeline stage:
    layers 0 (dense) and 1 (experts) of the model are its local 0 and 1."""
    sizes = {
        "0.self_attention.linear_qkv.layer_norm_weight": (8,),
        "0.self_attention.linear_qkv.weight": (16, 8),
        "0.self_attention.q_layernorm.weight": (4,),
        "0.self_attention.k_layernorm.weight": (4,),
        "0.self_attention.linear_proj.weight": (8, 8),
        "0.mlp.linear_fc1.layer_norm_weight": (8,),
        "0.mlp.linear_fc1.weight": (24, 8),
        "0.mlp.linear_fc2.weight": (8, 12),
        "1.pre_mlp_layernorm.weight": (8,),
        "1.mlp.router.weight": (4, 8),
        "1.mlp.experts.linear_fc1.weight0": (12, 8),
        "1.mlp.experts.linear_fc1.weight1": (12, 8),
        "1.mlp.experts.linear_fc2.weight0": (8, 6),
        "1.mlp.experts.linear_fc2.weight1": (8, 6),
    }
    named = [("decoder.layers." + name, torch.nn.Parameter(torch.zeros(n))) for name, n in sizes.items()]
    return Stage(
        decoder=SimpleNamespace(layers=[SimpleNamespace(layer_number=i + 1) for i in range(2)]),
        config=SimpleNamespace(num_moe_experts=4),
        named_parameters=lambda: named,
        named_buffers=list,
    )


def mesh() -> Any:
    from quintet.engine.mesh import Mesh, Sizes

    return Mesh(Sizes(dp=2, ep=2), 1, None)


def test_transformer_engines_names():
    from quintet.engine.weights.shards import shard_map

    shards = {s.name: s for s in shard_map([fused_stage()], SHAPE, mesh())}
    layer = "model.layers.0."
    assert shards[layer + "input_layernorm.weight"].box == ((0, 8),)
    assert shards[layer + "post_attention_layernorm.weight"].box == ((0, 8),)
    assert layer + "mlp.up_proj.weight" in shards
    assert "model.layers.1.post_attention_layernorm.weight" in shards
    experts = {name.split(".")[5] for name in shards if ".experts." in name}
    assert experts == {"2", "3"}
    assert shards["model.layers.1.mlp.experts.3.up_proj.weight"].view.shape == (6, 8)
    assert shards["model.layers.1.mlp.experts.2.down_proj.weight"].view.shape == (8, 6)


def test_a_parameter_without_a_place_in_the_table_is_an_error():
    from quintet.engine.weights.shards import shard_map

    stage = fused_stage()
    stray = ("decoder.layers.1.mlp.gate_weight", torch.nn.Parameter(torch.zeros(1)))
    stage.named_parameters = lambda: [stray]
    with pytest.raises(RuntimeError, match=r"decoder\.layers\.1\.mlp\.gate_weight"):
        shard_map([stage], SHAPE, mesh())


def stacked(split: Any, shapes: Any, transposed: bool, interleaved: bool) -> Any:
    from quintet.models import Weight
    from quintet.models.weight import Stack

    stack = Stack(1, 3, transposed, interleaved)
    return Weight("mlp.experts.1.linear", ("all",), shapes, split, stack=stack)


def of_expert(weight: Any, parameter: torch.Tensor) -> torch.Tensor:
    """What a whole parameter of expert 1 is in the Hugging Face tensor."""
    whole = parameter
    if weight.stack.interleaved:
        gate, up = parameter.chunk(2, 0)
        whole = torch.stack((gate, up), 1).flatten(0, 1)
    return whole.t() if weight.stack.transposed and whole.dim() == 2 else whole


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    ("split", "shapes"),
    [
        ("expert_gate_up", ((6, 5), (6, 5))),
        ("expert_gate_up", ((6,), (6,))),
        ("expert_columns", ((5, 6),)),
        ("expert_replicated", ((5,),)),
    ],
)
def test_an_experts_part_of_a_tensor_of_all_experts(split, shapes, transposed, interleaved):
    """Two etp ranks' views of expert 1, read and written, whole and in parts."""
    from quintet.engine.mesh import Mesh, Sizes
    from quintet.engine.weights.shards import _cut

    weight = stacked(split, shapes, transposed, interleaved and len(shapes) == 2)
    whole = torch.randn(sum(s[0] for s in shapes), *shapes[0][1:])
    (name, full) = weight.tensors[0]
    want, covered = torch.zeros(full), torch.zeros(full)
    want[1] = of_expert(weight, whole)
    for rank in range(2):
        if split == "expert_replicated":
            mine = whole.clone()
        elif split == "expert_columns":
            mine = whole.chunk(2, 1)[rank].clone()
        else:
            mine = torch.cat([half.chunk(2, 0)[rank] for half in whole.chunk(2, 0)])
        before = mine.clone()
        for shard in _cut(weight, mine, SHAPE, Mesh(Sizes(dp=2, etp=2), rank, None)):
            at = tuple(slice(a, b) for a, b in shard.box)
            assert (shard.name, shard.shape) == (name, full)
            assert torch.equal(shard.read(), want[at])
            covered[at] = 1
            outputs = len(full) - 1 if weight.stack.transposed else 1
            for dim in range(1, len(full)):
                unit = shard.unit(dim)
                assert unit == (2 if weight.stack.interleaved and dim == outputs else 1)
                (first, last), sub = shard.box[dim], list(shard.box)
                for start in range(first, last, unit):
                    sub[dim] = (start, start + unit)
                    part = want[tuple(slice(a, b) for a, b in sub)]
                    assert torch.equal(shard.part(tuple(sub)).reshape(part.shape), part)
                if unit > 1:
                    sub[dim] = (first + 1, last)
                    with pytest.raises(ValueError, match="cut through"):
                        shard.part(tuple(sub))
            shard.write(shard.read() + 1)
        assert torch.equal(mine, before + 1)
    assert covered.sum() == whole.numel()


@pytest.mark.parametrize("inner", [(), (5,)], ids=["bias", "weight"])
def test_a_part_may_be_some_of_the_heads_that_share_a_kv_head(inner):
    """Where a rollout has more tp ranks than KV heads: 8 heads of 3, 4 to a KV head, in the second of two tp ranks."""
    from quintet.engine.mesh import Mesh, Sizes
    from quintet.engine.weights.shards import _cut
    from quintet.models import Weight

    shape = replace(SHAPE, heads=16, kv_heads=4, head_dim=3)
    full = [(n * 3, *inner) for n in (16, 4, 4)]
    weight = Weight("linear_qkv", ("q", "k", "v"), tuple(full), "qkv")
    q, k, _ = _cut(weight, torch.randn(2 * 6 * 3, *inner), shape, Mesh(Sizes(tp=2), 1, None))
    assert (q.unit(), k.unit()) == (12, 3)
    rest = tuple((0, n) for n in inner)
    for first, last in [(0, 6), (6, 12), (18, 24), (3, 6), (12, 24), (13, 15)]:
        part = q.part(((24 + first, 24 + last), *rest))
        assert torch.equal(part.reshape(-1, *inner), q.read()[first:last])
        assert part._base is not None
    with pytest.raises(ValueError, match="q: 33:42 of dim 0 cut through a group of 12"):
        q.part(((33, 42), *rest))
    with pytest.raises(ValueError, match="q: 25:29 of dim 0 cut through a group of 3"):
        q.part(((25, 29), *rest))


def test_a_unit_is_of_its_dim_alone():
    from quintet.engine.weights.shards import Shard

    shard = Shard("x", (6, 8, 30), ((0, 6), (2, 4), (0, 30)), torch.zeros(2, 3, 2, 3, 5, 2))
    assert [shard.unit(dim) for dim in range(3)] == [3, 1, 10]
    assert shard.part(((3, 6), (3, 4), (10, 20))).shape == (1, 3, 1, 1, 5, 2)
