"""What selective recompute takes where the recipe names nothing."""

from dataclasses import replace

import pytest

from quintet.models import MlaShape, ModelShape, MoeShape
from quintet.recipe.recompute import recompute_modules
from quintet.recipe.schema import Engine

DENSE = ModelShape("qwen3", 4, 64, 96, 4, 2, 16, 61, 256, False, 1e-6)
MOE = replace(DENSE, moe=MoeShape(experts=8, top_k=2, ffn_hidden_size=48))
MLA = replace(
    DENSE,
    moe=MoeShape(experts=8, top_k=2, ffn_hidden_size=48, shared_ffn_hidden_size=48, dense_layers=(0,)),
    mla=MlaShape(32, 32, 16, 16, 24),
)


@pytest.mark.parametrize(
    ("shape", "modules"),
    [
        (DENSE, ["mlp"]),
        (MOE, ["moe_act"]),
        (MLA, ["mlp", "moe_act", "shared_experts", "mla_up_proj"]),
    ],
    ids=["dense", "experts", "latent attention"],
)
def test_default_is_what_the_model_has(shape, modules) -> None:
    assert recompute_modules(Engine(recompute="selective"), shape) == modules
    assert recompute_modules(Engine(recompute="full"), shape) == []
    named = Engine(recompute="selective", recompute_modules=["layernorm"])
    assert recompute_modules(named, shape) == ["layernorm"]
