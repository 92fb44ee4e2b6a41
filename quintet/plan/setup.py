"""What the memory of a rank depends on: the model, the layout, the recipe's engine and optimizer, the device."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from quintet.models import ModelShape
from quintet.models.lora import LoraShape
from quintet.recipe import schema


@dataclass(frozen=True)
class Setup:
    """A model on `ranks` ranks.

    optimizer: None for a model that is only evaluated. backend: of layers, as it was chosen. trained_tokens: tokens of
    a micro-batch on one rank whose log-prob is wanted; None is all of them. microbatches: of a dp rank in a mini-batch;
    None is as many as the pipeline can have in flight. lora: the adapters that are trained instead of the model. mtp: how
    layers for multi-token prediction are trained, of which the shape says how many there are.
    """

    shape: ModelShape
    layout: schema.Layout
    ranks: int
    engine: schema.Engine = field(default_factory=schema.Engine)
    optimizer: schema.Optimizer | None = field(default_factory=schema.Optimizer)
    dtype: Literal["fp32", "bf16"] = "bf16"
    device: Literal["cuda", "cpu"] = "cuda"
    backend: Literal["portable", "transformer_engine"] = "portable"
    trained_tokens: int | None = None
    microbatches: int | None = None
    lora: LoraShape | None = None
    mtp: schema.Mtp | None = None

    @property
    def depths(self) -> int:
        """Layers for multi-token prediction that are trained."""
        return self.shape.mtp_layers if self.mtp is not None and self.mtp.train else 0

    @property
    def width(self) -> int:
        """Bytes of a parameter, and of an activation."""
        return 2 if self.dtype == "bf16" else 4

    @property
    def etp(self) -> int:
        return self.layout.expert_tp

    @property
    def dp_cp(self) -> int:
        """The number of ranks with the same weights: they share the optimizer's state."""
        return self.ranks // (self.layout.tp * self.layout.pp)

    @property
    def edp(self) -> int:
        """The number of ranks with the same experts."""
        return self.ranks // (self.etp * self.layout.ep * self.layout.pp)

    @property
    def own_expert_groups(self) -> bool:
        """Whether experts are spread over other ranks than the rest of the weights."""
        return self.layout.ep > 1 or self.etp != self.layout.tp

    @property
    def tokens(self) -> int:
        """Tokens of a full micro-batch on one rank."""
        return self.engine.tokens_per_microbatch_per_rank

    @property
    def tokens_between_blocks(self) -> int:
        """Tokens whose hidden states one rank holds: under SP a tp rank has its slice."""
        return -(-self.tokens // self.layout.tp) if self.layout.sp else self.tokens

    @property
    def last(self) -> int:
        """The last pipeline stage."""
        return self.layout.pp - 1


@dataclass(frozen=True)
class Place:
    """A rank's coordinates, as far as memory depends on them (`quintet.engine.mesh.Mesh.coordinates` has them)."""

    pp: int = 0
    dp: int = 0
    cp: int = 0
    edp: int = 0
