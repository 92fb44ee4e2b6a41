"""What a recipe may pass through to megatron-core does not change what is computed."""

from __future__ import annotations

import pytest

from quintet.recipe.megatron import FREE
from tests.engine.test_moe import check, directory, run_rank  # noqa: F401  (a fixture)

FREE_VALUES = {
    "clone_scatter_output_in_embedding": False,
    "deterministic_mode": True,
    "disable_bf16_reduced_precision_matmul": True,
}
"""Values other than megatron-core's defaults."""
NEEDS_TRANSFORMER_ENGINE = {"moe_permute_fusion"}


def test_every_free_field_is_tried():
    assert FREE_VALUES.keys() | NEEDS_TRANSFORMER_ENGINE == FREE


@pytest.mark.parametrize("field", FREE_VALUES)
def test_free_fields_change_nothing(pool, directory, field):  # noqa: F811
    layout = {"tp": 2, "sp": True, "ep": 2, "etp": 1}
    megatron = {field: FREE_VALUES[field]}
    check("qwen3_moe", pool.run(run_rank, 2, directory("qwen3_moe"), layout, megatron=megatron))
