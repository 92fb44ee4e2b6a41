"""FP8 by a model's dims: which matrices there are, what their copies take, and whether it is worth it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quintet.models import ModelShape, MoeShape
from quintet.plan.cards import CARDS
from quintet.plan.fp8 import break_even, in_8_bits, most_gain, saved_seconds
from quintet.plan.memory import rank_memory
from quintet.plan.parameters import chunks
from quintet.plan.setup import Setup
from quintet.recipe import schema
from quintet.recipe.fp8 import Matrix, matrices, unquantized
from quintet.recipe.hub import shapes_alone
from quintet.recipe.loader import load_recipe
from quintet.recipe.rules import shape_of
from tests.plan.test_memory import CONFIGS
from tests.plan.test_memory import setup as setup_of

ROOT = Path(__file__).parents[2]
DENSE = ModelShape("qwen3", 36, 4096, 12288, 32, 8, 128, 151936, 32768, False, 1e-6, qk_norm=True)
SPARSE = ModelShape(
    "qwen3_moe",
    *(48, 2048, 6144, 32, 4, 128, 151936, 32768, False, 1e-6),
    qk_norm=True,
    moe=MoeShape(128, 8, 768),
)
LAYOUTS: list[dict[str, Any]] = [
    {},
    {"tp": 2, "sp": True},
    {"tp": 4, "sp": True, "ep": 2, "etp": 1},
    {"tp": 2, "sp": True, "ep": 2, "etp": 2},
]


def recipe(fp8: str | None = "blockwise", **layout: Any) -> schema.Recipe:
    return schema.Recipe(engine=schema.Engine(fp8=fp8), layout=schema.Layout(**layout))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", CONFIGS)
def test_matrices_are_those_a_rank_holds(name: str, layout: dict[str, Any]) -> None:
    """All linear layers of the decoder, but what stays in bf16."""
    shape = setup_of(name).shape
    if shape.moe is None:
        layout = {axis: size for axis, size in layout.items() if axis in ("tp", "sp")}
    made = schema.Layout(**layout)
    (held,) = chunks(Setup(shape, made, 8), 0)
    linear = [
        p
        for p in held
        if p.name.startswith("decoder.") and ".linear_" in p.name and p.name.endswith(".weight")
    ]
    down = [p for p in linear if "_down_proj" in p.name]
    assert (
        bool(down) is (shape.mla is not None) is ("latent attention's down projections" in unquantized(shape))
    )
    if "experts" in unquantized(shape):
        down += [p for p in linear if p.expert]
    whole = sum(p.numel for p in linear) - sum(p.numel for p in down)
    assert sum(one.numel * one.copies * one.layers for one in matrices(shape, made)) == whole
    plain, setup = rank_memory(Setup(shape, made, 8)), Setup(shape, made, 8, schema.Engine(fp8="tensorwise"))
    assert rank_memory(setup) == replace(plain, copies=2 * whole)


def test_blocks_have_scales_too() -> None:
    setup = Setup(DENSE, schema.Layout(), 8, schema.Engine(fp8="blockwise"))
    matrices_of_8b = 36 * (6144 * 4096 + 4096 * 4096 + 3 * 12288 * 4096)
    assert rank_memory(setup).copies == 2 * matrices_of_8b + 2 * matrices_of_8b // 4096
    assert rank_memory(setup).peak - rank_memory(replace(setup, engine=schema.Engine())).peak > 2**33


def test_a_matrix_gains_its_products_and_loses_passes_over_memory() -> None:
    """By hand, of an H100: 6 · 4096 · 8192 operations at 989 or twice as many tera a second, 4 bytes of 4096 + 8192 numbers at 3.35 TB/s."""
    saved = saved_seconds(Matrix("one", 8192, 4096, 8192, 1))
    assert saved == pytest.approx(6 * 4096 * 8192 * (1 / 989e12 - 1 / 1978e12) - 4 * 12288 / 3.35e12)


def test_who_gains_is_who_was_measured_to_gain() -> None:
    """Published: 1.34 to 1.42 with 8B, 1.01 with 30B-A3B, both on Hopper; a bound from dims alone lies above."""
    assert 1.42 < most_gain(recipe(), DENSE) < 1.8
    assert 1.01 <= most_gain(recipe(), SPARSE) < 1.1
    assert "Warning" not in in_8_bits(recipe(), DENSE)
    told = in_8_bits(recipe(), SPARSE)
    assert (
        "Warning: hardly worth it; engine.fp8=null computes more exactly. Experts gain from 975 units on, and these have 768."
        in told
    )
    assert "in bf16 stay embedding, norms, attention's scores, head, routers." in told
    wide = replace(SPARSE, moe=MoeShape(128, 8, 4096))
    assert "hardly worth" not in in_8_bits(recipe(), wide)


def test_of_experts_is_told_what_was_measured_and_what_was_not() -> None:
    """Blockwise, with 768 units."""
    wide, measured = replace(SPARSE, moe=MoeShape(128, 8, 2048)), "0.38× as fast, by blockwise (docs/fp8.md)"
    for fp8, shape, more in (
        ("blockwise", SPARSE, ""),
        ("tensorwise", SPARSE, "; not measured: tensorwise"),
        ("blockwise", wide, "; not measured: experts of 2,048 units"),
        ("tensorwise", wide, "; not measured: tensorwise, experts of 2,048 units"),
        ("blockwise", replace(SPARSE, moe=MoeShape(128, 8, 512)), "; not measured: experts of 512 units"),
    ):
        # Also of a card on which they gain, by what is counted.
        for card in ("H100", "H200"):
            assert in_8_bits(recipe(fp8), shape, card).endswith(f"{measured}{more}.")
    biases = replace(SPARSE, moe=MoeShape(128, 8, 768, biases=True))
    assert "experts. At most" in in_8_bits(recipe(), biases)
    assert "Warning: each expert" not in in_8_bits(recipe(), biases)


@pytest.mark.parametrize(
    ("named", "said"),
    [
        ("Qwen3-8B", "1.63 for Qwen3-8B at the default lengths, 1,024 + 512 tokens"),
        (
            "recipes/qwen3_8b_dapo_8gpu.yaml",
            "1.36 in `recipes/qwen3_8b_dapo_8gpu.yaml`, whose samples have up to 2,048 + 20,480",
        ),
        ("Qwen3-30B-A3B", "1.04 for Qwen3-30B-A3B"),
    ],
)
def test_the_guide_says_what_is_counted(named: str, said: str) -> None:
    with shapes_alone():
        counted = load_recipe(str(ROOT / named) if "/" in named else named)
        shape = shape_of(counted)
    assert shape is not None
    gain = f"{most_gain(counted, shape):.2f} "
    lengths = f"{counted.data.max_prompt_tokens:,} + {counted.rollout.max_response_tokens:,}"
    assert said.startswith(gain)
    assert lengths in said or "+" not in said
    assert said in " ".join((ROOT / "docs" / "fp8.md").read_text().split())


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_gain_of_products_does_not_depend_on_how_many_share_them(layout: dict[str, Any]) -> None:
    """Passes over memory do: every tp rank makes those over what all have."""
    alone, cut = most_gain(recipe(), SPARSE), most_gain(recipe(**layout), SPARSE)
    assert cut <= alone * 1.0001


def test_what_is_gained_is_a_matter_of_the_card() -> None:
    """An H20 computes a seventh of what an H100 does, and moves more."""
    assert most_gain(recipe(), DENSE, "H20") > most_gain(recipe(), DENSE)
    assert "as fast, counted from dims for H20s; " in in_8_bits(recipe(), DENSE, "H20")
    assert break_even(2048, "H20") < break_even(2048) / 4
    assert in_8_bits(recipe(), SPARSE, "A100").endswith(
        "an A100 has no products in 8 bits; engine.fp8=null is for it."
    )


def test_scales_of_blocks_are_of_hopper_and_what_came_after() -> None:
    """TransformerEngine asks for compute capability 9.0; an L40S has 8.9, and products in 8 bits."""
    told = in_8_bits(recipe(), DENSE, "L40S")
    assert told.endswith(
        "Warning: an L40S has no products with scales of blocks; engine.fp8=tensorwise or null is for it."
    )
    assert "as fast" not in told
    assert "as fast, counted from dims for L40Ss; " in in_8_bits(recipe("tensorwise"), DENSE, "L40S")
    untried = {name for name in CARDS if "on Hopper alone." in in_8_bits(recipe("tensorwise"), DENSE, name)}
    assert untried == {"L40S", "B100", "B200"}
    without = {name for name in CARDS if "no products" in in_8_bits(recipe(), DENSE, name)}
    assert without == {"A100", "A800", "L40S"}


def test_the_break_even_is_where_nothing_is_saved() -> None:
    width = break_even(2048)
    for one, sign in ((width - 2, -1), (width + 2, 1)):
        shape = replace(SPARSE, moe=MoeShape(128, 8, one))
        saved = [saved_seconds(m) for m in matrices(shape, schema.Layout()) if "experts" in m.name]
        assert sum(saved) * sign > 0
