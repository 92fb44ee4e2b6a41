"""What FP8 may gain, counted from a model's dims: products take half as long, and rounding to 8 bits costs passes over memory.

A matrix of n outputs and m inputs takes 6 n m multiply-adds' operations a token in training. In 8 bits each of its three
products rounds one activation in both orders: 4 bytes of traffic a number of input and of output gradient. Experts besides
pad each one's tokens to a multiple and take the padding off, forward and backward: 16 bytes a number of the hidden states. What
that leaves of the products' gain is the most a step can win; attention, head, optimizer and what the host takes stay as they are.
"""

from __future__ import annotations

from quintet.models import ModelShape
from quintet.plan.cards import CARDS
from quintet.recipe.fp8 import Matrix, experts_in_8_bits, matrices, unquantized
from quintet.recipe.schema import Recipe

USUAL = "H100"
LITTLE = 1.10
"""A gain below this is warned of. Measured elsewhere: 1.34 to 1.42 with 8B dense on 8 H100, 1.01 with 30B-A3B."""
OF_EXPERTS = (
    "Warning: each expert is rounded and multiplied by launches of its own, which is not counted: with 128 of 768 units a rank a step on an H200 "
    "was 0.38× as fast, by blockwise (docs/fp8.md)"
)
"""What `benchmarks.fp8 --shape 30b-a3b` came to."""
_PADDED = 16


def _saved(card: str) -> float:
    """Seconds that one weight saves a token."""
    return 6 * (1 - 1 / CARDS[card].eight) / CARDS[card].flops


def saved_seconds(one: Matrix, card: str = USUAL) -> float:
    """Return the seconds that one token saves in a matrix; below 0 where it loses. card: one of CARDS that has products in 8 bits."""
    moved = 4 * (one.outputs + one.inputs) + _PADDED * one.inputs * one.padded
    return _saved(card) * one.numel - moved / CARDS[card].bandwidth


def most_gain(recipe: Recipe, shape: ModelShape, card: str = USUAL) -> float:
    """Return the most that a step gains by engine.fp8: seconds a token without over those with it, products and rounding alone."""
    length = recipe.data.max_prompt_tokens + recipe.rollout.max_response_tokens
    whole, layout = shape.flops_per_token(length / 2) / CARDS[card].flops, recipe.layout
    of_rank = (
        saved_seconds(one, card) * one.layers * one.copies * one.share for one in matrices(shape, layout)
    )
    saved = layout.tp * sum(of_rank)
    return whole / max(whole - saved, 1e-12)


def break_even(hidden: int, card: str = USUAL) -> int:
    """Return the width of experts from which 8 bits gain, at this hidden size: 3 · width · hidden weights against passes over
    their inputs, gate and up, and outputs."""
    per_byte = 1 / CARDS[card].bandwidth
    gain, loss = 3 * _saved(card) * hidden - 12 * per_byte, (_PADDED + 8) * hidden * per_byte
    return round(loss / gain) if gain > 0 else 0


def in_8_bits(recipe: Recipe, shape: ModelShape, card: str = USUAL) -> str:
    """Return what is multiplied in 8 bits and what is not, and warnings: of experts, and where little is gained."""
    what = f"Products in 8 bits, {recipe.engine.fp8}; in bf16 stay {', '.join(unquantized(shape))}."
    if not CARDS[card].eight:
        return f"{what} Warning: an {card} has no products in 8 bits; engine.fp8=null is for it."
    if recipe.engine.fp8 == "blockwise" and not CARDS[card].blocks:
        return f"{what} Warning: an {card} has no products with scales of blocks; engine.fp8=tensorwise or null is for it."
    gain, on_this = most_gain(recipe, shape, card), "" if CARDS[card].hopper else ", on Hopper alone"
    told = [
        f"{what} At most {gain:.2f}× as fast, counted from dims for {card}s; docs/fp8.md tells what was measured{on_this}."
    ]
    if gain < LITTLE:
        told.append("Warning: hardly worth it; engine.fp8=null computes more exactly.")
    if shape.moe is not None and experts_in_8_bits(shape):
        units, width = shape.moe.ffn_hidden_size, break_even(shape.hidden_size, card)
        if units < width:
            told.append(f"Experts gain from {width} units on, and these have {units}.")
        other = ["tensorwise"] if recipe.engine.fp8 == "tensorwise" else []
        if units != 768:
            other.append(f"experts of {units:,} units")
        told.append(f"{OF_EXPERTS}; not measured: {', '.join(other)}." if other else f"{OF_EXPERTS}.")
    return " ".join(told)
