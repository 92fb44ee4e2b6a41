"""What a recipe may pass through to megatron-core does not change what is computed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from quintet.engine.config import transformer_config
from quintet.engine.mesh import Sizes
from quintet.errors import UserError
from quintet.models import family_of
from quintet.recipe import schema
from quintet.recipe.megatron import FREE, FUSED_EXPERTS
from tests.engine.test_moe import check, directory, run_rank  # noqa: F401  (a fixture)
from tests.plan.test_memory import CONFIGS

FREE_VALUES = {
    "clone_scatter_output_in_embedding": False,
    "deterministic_mode": True,
    "disable_bf16_reduced_precision_matmul": True,
}
"""Values other than megatron-core's defaults."""


def test_every_free_field_is_tried():
    assert FREE_VALUES.keys() | set(FUSED_EXPERTS) == FREE


@pytest.mark.parametrize("field", FREE_VALUES)
def test_free_fields_change_nothing(pool, directory, field):  # noqa: F811
    layout = {"tp": 2, "sp": True, "ep": 2, "etp": 1}
    megatron = {field: FREE_VALUES[field]}
    check("qwen3_moe", pool.run(run_rank, 2, directory("qwen3_moe"), layout, megatron=megatron))


def test_fused_permutation_reaches_the_dispatcher(monkeypatch):
    """Core's constructor wants TransformerEngine's kernels, which are not on CPU machines: that they are there is all that is pretended."""
    from megatron.core.transformer.moe import moe_utils

    sort = "fused_sort_chunks_by_index"
    for kernel in (
        "fused_permute",
        "fused_permute_with_probs",
        "fused_unpermute",
        sort,
        f"{sort}_with_probs",
    ):
        monkeypatch.setattr(moe_utils, kernel, object(), raising=False)
    shape = family_of(CONFIGS["qwen3_moe"]).shape_of(CONFIGS["qwen3_moe"])
    mesh = SimpleNamespace(sizes=Sizes(tp=1, cp=1, dp=1, pp=1, ep=1, etp=1))
    for asked in (False, True):
        recipe = schema.Engine(megatron={"moe_permute_fusion": asked})
        config = transformer_config(shape, schema.Layout(), mesh, recipe, dtype=torch.bfloat16)
        assert config.moe_permute_fusion is asked


def test_a_fused_router_is_refused_where_there_is_none_and_asks_for_no_routes(monkeypatch):
    from megatron.core.transformer.moe import moe_utils

    from quintet.engine.layers.router import Router

    shape = family_of(CONFIGS["qwen3_moe"]).shape_of(CONFIGS["qwen3_moe"])
    mesh = SimpleNamespace(sizes=Sizes(tp=1, cp=1, dp=1, pp=1, ep=1, etp=1))
    recipe = schema.Engine(megatron={"moe_router_fusion": True})
    kernel = "fused_topk_with_score_function"
    monkeypatch.setattr(moe_utils, kernel, None, raising=False)
    with pytest.raises(UserError, match="moe_router_fusion is a kernel of TransformerEngine"):
        transformer_config(shape, schema.Layout(), mesh, recipe, dtype=torch.bfloat16)
    monkeypatch.setattr(moe_utils, kernel, object())
    config = transformer_config(shape, schema.Layout(), mesh, recipe, dtype=torch.bfloat16)
    router = SimpleNamespace(
        config=config, _maintain_float32_expert_bias=lambda: None, gating=lambda given: given
    )
    with pytest.raises(AssertionError, match="asks for no routes"):
        Router.forward(router, torch.zeros(2, 4), SimpleNamespace(routes=object(), load=None))
