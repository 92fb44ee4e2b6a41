"""The TransformerEngine back end of layers. Imported only where `choose_backend` found TransformerEngine usable.

What stays quintet's own: the attention around the kernel, the router, and the replicated down projections of latent
attention. TransformerEngine's linear layer marks a replicated weight as cut over tp, so that the gradient norm would
count it once a tp rank.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import TEGroupedMLP

from quintet.engine.layers.attention import TransformerEngineAttention
from quintet.engine.layers.experts import GroupedExperts, mark_expert
from quintet.engine.layers.mla import ReplicatedLinear


class TransformerEngineProvider(TESpecProvider):
    """megatron-core's TransformerEngine layers. apart: norms are modules of their own, whose output can be computed again; else they are
    part of the linear layers after them."""

    def __init__(self, apart: bool) -> None:
        super().__init__()
        self.apart = apart

    def fuse_layernorm_and_linear(self) -> bool:
        return not self.apart

    def core_attention(self) -> type:
        return TransformerEngineAttention

    def linear(self) -> type:
        """Return the linear layer that is replicated over tp."""
        return ReplicatedLinear

    def experts(self) -> tuple[type, MLPSubmodules | None]:
        """Return the module of experts, and what it is made of."""
        _, submodules = self.grouped_mlp_modules(True, False)
        return FusedExperts, submodules


class WithTorchExperts(TransformerEngineProvider):
    """The same, but for the experts, which are the portable ones: a weight for all, and few launches."""

    def experts(self) -> tuple[type, MLPSubmodules | None]:
        return GroupedExperts, None


class FusedExperts(TEGroupedMLP):
    """Experts on TransformerEngine's grouped products: a weight each, linear_fc1.weight0, …, with the same marks as the
    portable ones."""

    def __init__(
        self, num_local_experts: int, config: Any, submodules: MLPSubmodules, pg_collection: Any = None
    ) -> None:
        super().__init__(num_local_experts, config, submodules, pg_collection)
        for linear, dim in ((self.linear_fc1, 0), (self.linear_fc2, 1)):
            for weight in linear.parameters():
                mark_expert(weight, pg_collection, dim=dim)


def add_gradients_in_place(chunks: Iterable[torch.nn.Module]) -> None:
    """Have TransformerEngine's linear layers add weight gradients to the fp32 gradient buffers within the product.

    Otherwise each is written in bf16 and added in a further pass. Core's field for it (gradient_accumulation_fusion)
    also asks Apex of the LM head's layer, which quintet does not call.

    A layer that takes a micro-batch for the first one writes over its buffer, for it believes that nothing is there yet. Experts that
    compute a row in halves would lose what the other half has added.
    """
    linear: Any
    for linear in (module for chunk in chunks for module in chunk.modules()):
        if hasattr(linear, "fuse_wgrad_accumulation") and any(
            p.requires_grad for p in linear.parameters(False)
        ):
            linear.fuse_wgrad_accumulation, linear.is_first_microbatch = True, False
