"""What a model cannot recompute, and a back end that is not there, are refused by the recipe's key."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch

from quintet.errors import UserError
from quintet.recipe import schema
from tests.engine.test_shards import SHAPE


@pytest.fixture(autouse=True)
def _megatron():
    from quintet.engine import megatron_compat

    megatron_compat.install()


def config(shape, **recipe):
    from quintet.engine.config import transformer_config
    from quintet.engine.mesh import Mesh, Sizes

    mesh, settings = Mesh(Sizes(), 0, None), schema.Engine(**recipe)
    return transformer_config(shape, schema.Layout(), mesh, settings, dtype=torch.float32)


@pytest.mark.parametrize(
    ("shape", "module"),
    [
        (replace(SHAPE, moe=None), "moe"),
        (replace(SHAPE, moe=None), "moe_act"),
        (SHAPE, "shared_experts"),
        (SHAPE, "mla_up_proj"),
        (replace(SHAPE, moe=replace(SHAPE.moe, dense_layers=())), "mlp"),
    ],
)
def test_a_model_recomputes_only_what_it_holds(shape, module):
    with pytest.raises(UserError, match=f"engine.recompute_modules: {module} is not part"):
        config(shape, recompute="selective", recompute_modules=["core_attn", module])


def test_router_statistics_are_off():
    """Padding and dummy tokens go through routers too: nothing there may count tokens."""
    made = config(SHAPE)
    assert made.moe_router_load_balancing_type == "none"
    assert made.moe_z_loss_coeff is None
    assert made.moe_expert_capacity_factor is None
    assert not made.moe_router_enable_expert_bias


def test_transformer_engine_is_refused_where_it_cannot_be_had(caplog):
    from quintet.engine.layers.specs import choose_backend

    if torch.cuda.is_available():
        pytest.skip("needs a machine without a GPU")
    with pytest.raises(UserError, match=r"engine\.backend=transformer_engine: there is no GPU"):
        choose_backend("transformer_engine")
    assert choose_backend("portable") == "portable"
    with caplog.at_level(logging.INFO):
        choose_backend.__globals__["_tell"].cache_clear()
        assert choose_backend("auto") == choose_backend("auto") == "portable"
    assert caplog.text.count("layers: portable (no TransformerEngine: there is no GPU)") == 1
