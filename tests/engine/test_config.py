"""What a model cannot recompute, and a back end that is not there, are refused by the recipe's key."""

from __future__ import annotations

import logging
import sys
from dataclasses import replace
from functools import partial
from itertools import product
from types import SimpleNamespace

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


@pytest.mark.parametrize(
    ("pp", "vpp", "counts"),
    [
        *((pp, vpp, None) for pp, vpp in ((1, 1), (2, 1), (4, 1), (2, 2), (2, 4), (4, 2))),
        *((1, 1, [16]), (2, 1, [9, 7]), (3, 1, [6, 5, 5]), (4, 1, [0, 7, 9, 0]), (2, 2, [3, 5, 7, 1])),
        (3, 2, [0, 4, 1, 5, 6, 0]),
    ],
)
def test_layers_of_a_stage_are_those_megatron_builds(pp, vpp, counts):
    """Numbers that others rely on: what a rank's routers are called, and what is planned for it."""
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    from quintet.engine.config import transformer_config
    from quintet.engine.mesh import Mesh, Sizes

    layout, shape = schema.Layout(pp=pp, vpp=vpp, stage_layers=counts), replace(SHAPE, layers=16)
    assert layout.holds(16)
    found = {}
    for stage, chunk in product(range(pp), range(vpp)):
        mesh = Mesh(Sizes(pp=pp), stage, None)
        made = transformer_config(shape, layout, mesh, schema.Engine(), dtype=torch.float32)
        part = chunk if vpp > 1 else None
        first = get_transformer_layer_offset(made, vp_stage=part, pp_rank=stage)
        layers = range(first, first + get_num_layers_to_build(made, vp_stage=part, pp_rank=stage))
        assert layout.layers_of(16, stage)[chunk] == layers
        found[chunk, stage] = layers
    in_order = [found[key] for key in sorted(found)]
    assert [layer for one in in_order for layer in one] == list(range(16))
    assert counts is None or [len(one) for one in in_order] == counts


def test_experts_are_those_that_the_recipe_says(monkeypatch):
    """Beside TransformerEngine's layers, whose own providers are pretended."""
    from quintet.engine.layers.specs import PortableProvider, provider_of

    names = ("TransformerEngineProvider", "WithTorchExperts")
    named = {name: partial(lambda name, apart: (name, apart), name) for name in names}
    monkeypatch.setitem(sys.modules, "quintet.engine.layers.te", SimpleNamespace(**named))
    for experts in ("auto", "transformer_engine"):
        assert provider_of("transformer_engine", experts, norms_apart=True) == (names[0], True)
    assert provider_of("transformer_engine", "torch", norms_apart=False) == (names[1], False)
    assert isinstance(provider_of("portable", "auto", norms_apart=False), PortableProvider)
    with pytest.raises(UserError, match=r"engine\.experts=transformer_engine: the layers are portable here"):
        provider_of("portable", "transformer_engine", norms_apart=False)


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
