"""One entry of a family's table: a megatron-core parameter and the Hugging Face tensors it is made of."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

Split = Literal[
    "replicated",
    "rows",
    "rows_halves_swapped",
    "columns",
    "vocab",
    "qkv",
    "gate_up",
    "expert_gate_up",
    "expert_columns",
    "expert_replicated",
    "expert_rows",
]
"""How tensor parallelism cuts a megatron-core parameter.

replicated: every rank holds all of it.
rows: dim 0 is cut (a column-parallel linear's weight, in megatron's words).
rows_halves_swapped: the same, and the two halves of dim 1 lie in the other order than in the Hugging Face tensor.
columns: dim 1 is cut (a row-parallel linear's weight).
vocab: dim 0 is cut after padding it to a multiple of tp.
qkv: q, k and v interleaved by KV group along dim 0, cut between groups.
gate_up: gate and up stacked along dim 0, each cut by rows.
expert_…: the same of one expert, cut over etp; only the ep rank of that expert holds it.
"""


@dataclass(frozen=True)
class Stack:
    """Where a parameter of one expert lies in a Hugging Face tensor [experts, …] that holds it of all experts of a layer.

    expert: which of them this is. transposed: inputs come before outputs. interleaved: gate and up take turns, gate first,
    where otherwise all of gate comes before up.
    """

    expert: int
    experts: int
    transposed: bool = False
    interleaved: bool = False


@dataclass(frozen=True)
class Weight:
    """One megatron-core parameter and the Hugging Face tensors it is made of.

    `name` holds the global layer number: `decoder.layers.7.…`, and an expert's number among all:
    `…mlp.experts.42.linear_fc1.weight`. `hf` lists the tensors in their order inside the parameter (q, k, v;
    gate, up); `shapes` are their full shapes. With a `stack`, `hf` is the one tensor that holds all experts, and `shapes`
    are those of one expert's part as megatron-core has it, gate and up apart. What is not `trained` is a buffer in fp32,
    whatever the others are. `copies`: names under which a checkpoint may hold the same tensor again; they are written
    where they were read.
    """

    name: str
    hf: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    split: Split
    trained: bool = True
    copies: tuple[str, ...] = ()
    stack: Stack | None = None

    @property
    def tensors(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """The Hugging Face tensors and their full shapes."""
        if self.stack is None:
            return tuple(zip(self.hf, self.shapes, strict=True))
        matrix = (sum(one[0] for one in self.shapes), *self.shapes[0][1:])
        return ((self.hf[0], (self.stack.experts, *(matrix[::-1] if self.stack.transposed else matrix))),)

    @property
    def elements(self) -> int:
        """Elements of the whole parameter."""
        return sum(math.prod(one) for one in self.shapes)
