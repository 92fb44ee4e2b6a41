"""Which of a model's matrices are multiplied in 8 bits where the recipe asks for it (engine.fp8), and which stay as they are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from quintet.models import ModelShape
from quintet.models.shape import SWIGLU
from quintet.recipe.schema import Layout

MULTIPLE = {"tensorwise": 16, "blockwise": 128}
"""What both dims of a matrix on a rank are multiples of: cuBLAS wants rows of 16 bytes, scales are of whole blocks of 128 × 128."""


@dataclass(frozen=True)
class Matrix:
    """A linear layer as one rank multiplies by it: outputs and inputs. parts: matrices of the model's files that lie in it, one
    over the other, by the rows of their smallest unit. layers: how many layers have it. share: of a row's tokens that each of
    `copies` gets. padded: whether its tokens are, to a multiple, and what it makes is cut again."""

    name: str
    outputs: int
    inputs: int
    unit: int
    layers: int
    copies: int = 1
    share: float = 1.0
    padded: bool = False

    @property
    def numel(self) -> int:
        return self.outputs * self.inputs


def matrices(shape: ModelShape, layout: Layout) -> Iterator[Matrix]:
    """Yield the matrices that are multiplied in 8 bits, one of each kind, as a rank of the layout holds them; dims that tp does not
    divide are another rule's."""
    tp, hidden = layout.tp, shape.hidden_size
    yield from _attention(shape, tp)
    dense = shape.layers - len(shape.moe_layers)
    if dense:
        yield from _gated("feed-forward", shape.ffn_hidden_size // tp, hidden, dense)
    moe = shape.moe
    if moe is None:
        return
    etp, layers = layout.expert_tp, len(shape.moe_layers)
    if experts_in_8_bits(shape):
        share = moe.top_k * layout.ep * etp / (tp * moe.experts)
        yield from _gated(
            "experts", moe.ffn_hidden_size // etp, hidden, layers, moe.experts // layout.ep, share
        )
    if moe.shared_ffn_hidden_size:
        yield from _gated("shared experts", moe.shared_ffn_hidden_size // tp, hidden, layers)


def _attention(shape: ModelShape, tp: int) -> Iterator[Matrix]:
    heads, hidden, layers, mla = shape.heads // tp, shape.hidden_size, shape.layers, shape.mla
    if mla is None:
        rows = (shape.heads + 2 * shape.kv_heads) // tp * shape.head_dim
        yield Matrix("attention's q, k and v", rows, hidden, shape.head_dim, layers)
    else:
        query = heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim)
        yield Matrix("attention's queries", query, mla.q_lora_rank or hidden, query, layers)
        both = heads * (mla.qk_nope_head_dim + mla.v_head_dim)
        yield Matrix("attention's keys and values", both, mla.kv_lora_rank, both, layers)
    yield Matrix("attention's output", hidden, heads * shape.v_head_dim, hidden, layers)


def _gated(
    name: str, width: int, hidden: int, layers: int, copies: int = 1, share: float = 1.0
) -> Iterator[Matrix]:
    yield Matrix(f"{name} (gate and up)", 2 * width, hidden, width, layers, copies, share, padded=copies > 1)
    yield Matrix(f"{name} (down)", hidden, width, hidden, layers, copies, share)


def experts_in_8_bits(shape: ModelShape) -> bool:
    """Return whether routed experts are multiplied in 8 bits: those with biases, or a gate of their own, are quintet's grouped
    products in the parameters' type."""
    return shape.moe is not None and not shape.moe.biases and shape.moe.glu == SWIGLU


def unquantized(shape: ModelShape) -> list[str]:
    """Return what of a model stays in bf16 whatever engine.fp8 says."""
    found = ["embedding", "norms", "attention's scores", "head"]
    if shape.mla is not None:
        found.append("latent attention's down projections")
    if shape.moe is not None:
        found.append("routers")
        if not experts_in_8_bits(shape):
            found.append("experts")
    if shape.mtp_layers:
        found.append("layers for multi-token prediction")
    return found
