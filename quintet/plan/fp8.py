"""What FP8 may gain, counted from a model's dims: products take half as long, and rounding to 8 bits costs passes over memory.

A matrix of n outputs and m inputs takes 6 n m multiply-adds' operations a token in training. In 8 bits each of its three
products rounds one activation in both orders: 4 bytes of traffic a number of input and of output gradient. Experts besides
pad each one's tokens to a multiple and take the padding off, forward and backward: 16 bytes a number of the hidden states. What
that leaves of the products' gain is the most a step can win; attention, head, optimizer and what the host takes stay as they are.
"""

from __future__ import annotations

from quintet.models import ModelShape
from quintet.plan.cards import CARDS
from quintet.recipe.fp8 import Matrix, matrices, unquantized
from quintet.recipe.schema import Recipe

(BF16, BYTES), FP8 = CARDS["H100"], 1979e12
"""Of an H100: operations and bytes a second, and operations in 8 bits, by its data sheet."""
LITTLE = 1.10
"""A gain below this is warned of. Measured elsewhere: 1.34 to 1.42 with 8B dense on 8 H100, 1.01 with 30B-A3B."""
OF_EXPERTS = (
    "Warning: each expert is rounded and multiplied by launches of its own, which is not counted: with 128 of 768 units a rank a step on an H200 "
    "was 0.38× as fast, by blockwise (docs/fp8.md)."
)
"""What `benchmarks.fp8 --shape 30b-a3b` came to."""
_SAVED = 6 * (1 / BF16 - 1 / FP8)
_PADDED = 16


def saved_seconds(one: Matrix) -> float:
    """Return the seconds that one token saves in a matrix; below 0 where it loses."""
    padding = _PADDED * one.inputs / BYTES if one.padded else 0.0
    return _SAVED * one.numel - 4 * (one.outputs + one.inputs) / BYTES - padding


def most_gain(recipe: Recipe, shape: ModelShape) -> float:
    """Return the most that a step gains by engine.fp8: seconds a token without over those with it, products and rounding alone."""
    length = recipe.data.max_prompt_tokens + recipe.rollout.max_response_tokens
    whole, layout = shape.flops_per_token(length / 2) / BF16, recipe.layout
    of_rank = (saved_seconds(one) * one.layers * one.copies * one.share for one in matrices(shape, layout))
    saved = layout.tp * sum(of_rank)
    return whole / max(whole - saved, 1e-12)


def break_even(hidden: int) -> int:
    """Return the width of experts from which 8 bits gain, at this hidden size: 3 · width · hidden weights against passes over
    their inputs, gate and up, and outputs."""
    gain, loss = 3 * _SAVED * hidden - 12 / BYTES, (_PADDED + 8) * hidden / BYTES
    return round(loss / gain) if gain > 0 else 0


def in_8_bits(recipe: Recipe, shape: ModelShape) -> str:
    """Return what is multiplied in 8 bits and what is not, and warnings: of experts, and where little is gained."""
    gain = most_gain(recipe, shape)
    bound = (
        f"Products in 8 bits, {recipe.engine.fp8}; in bf16 stay {', '.join(unquantized(shape))}. At most {gain:.2f}× as fast, counted "
        "from dims for an H100; docs/fp8.md tells what was measured."
    )
    told = [bound]
    if gain < LITTLE:
        told.append("Warning: hardly worth it; engine.fp8=null computes more exactly.")
    if shape.moe is not None:
        if shape.moe.ffn_hidden_size < (width := break_even(shape.hidden_size)):
            told.append(f"Experts gain from {width} units on, and these have {shape.moe.ffn_hidden_size}.")
        told.append(OF_EXPERTS)
    return " ".join(told)
