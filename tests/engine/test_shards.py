"""Tensors come under the table's names, whatever a back end of layers calls them."""

from __future__ import annotations

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
    return SimpleNamespace(
        decoder=SimpleNamespace(layers=[SimpleNamespace(layer_number=i + 1) for i in range(2)]),
        config=SimpleNamespace(num_moe_experts=4),
        named_parameters=lambda: named,
        named_buffers=list,
    )


def mesh() -> Any:
    from quintet.engine.mesh import Mesh, Sizes

    return Mesh(Sizes(dp=2, ep=2), 1, None)


def test_transformer_engines_names():
    from quintet.engine.shards import shard_map

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
    from quintet.engine.shards import shard_map

    stage = fused_stage()
    stray = ("decoder.layers.1.mlp.gate_weight", torch.nn.Parameter(torch.zeros(1)))
    stage.named_parameters = lambda: [stray]
    with pytest.raises(RuntimeError, match=r"decoder\.layers\.1\.mlp\.gate_weight"):
        shard_map([stage], SHAPE, mesh())
