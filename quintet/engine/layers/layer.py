"""A layer whose feed-forward part knows the row, as its attention does.

megatron-core's layer tells the part after attention nothing of the micro-batch. What a router does to a token may depend on
it: whether the token is padding, which experts a rollout chose. So the row goes down as an argument. What is recomputed in
backward closes over it: by then the forward passes of other micro-batches have come in between, and an attribute set by the
last of them would be another row's.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from megatron.core.transformer import TransformerConfig, TransformerLayer
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch import Tensor

from quintet.engine import fp8
from quintet.engine.layers.dispatch import Dispatcher
from quintet.engine.row import PackedRow


class PackedLayer(TransformerLayer):
    """A transformer layer whose `packed_seq_params` is a `PackedRow`, for its MLP or experts as well."""

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """Transform hidden states [T (/tp under SP), 1, hidden] → the same, and core's context for cross attention (None)."""
        hidden, context = self._forward_attention(*args, **kwargs)
        normed = self._forward_pre_mlp_layernorm(hidden)
        feed_forward = partial(self.mlp, row=kwargs["packed_seq_params"])
        out = (
            fp8.checkpoint(feed_forward, self.config, self.pg_collection.tp, normed)
            if self.recompute_mlp
            else feed_forward(normed)
        )
        return self._forward_post_mlp(out, hidden), context


class PackedMoELayer(MoELayer):
    """Core's experts layer, whose router is handed the row, and whose tokens go once to a rank."""

    def __init__(self, config: TransformerConfig, *args: Any, pg_collection: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, pg_collection=pg_collection, **kwargs)
        self.token_dispatcher = Dispatcher(config, pg_collection)

    def forward(self, hidden_states: Tensor, row: PackedRow) -> tuple[Tensor, None]:
        """Transform hidden states [T (/tp under SP), 1, hidden] → the same, and no bias."""
        compute = partial(self._compute, row=row)
        if self.moe_layer_recompute:
            return fp8.checkpoint(compute, self.config, self.tp_group, hidden_states)
        return compute(hidden_states)

    def shared_experts_compute(self, hidden_states: Tensor) -> Tensor | None:
        """Return what the shared experts make of the hidden states, where there are some; core's own asks for process-global groups
        in FP8."""
        if not self.use_shared_expert:
            return None
        if self.shared_experts_recompute:
            return fp8.checkpoint(self.shared_experts, self.config, self.tp_group, hidden_states)
        return self.shared_experts(hidden_states)

    def _compute(self, hidden_states: Tensor, row: PackedRow) -> tuple[Tensor, None]:
        shared = self.shared_experts_compute(hidden_states)
        weights, chosen = self.router(hidden_states, row=row)
        tokens = hidden_states.view(-1, hidden_states.shape[-1])
        out = self.token_dispatcher(self.experts, tokens, weights, chosen).view(hidden_states.shape)
        return (out if shared is None else out + shared), None


def in_halves(chunks: Iterable[torch.nn.Module]) -> None:
    """Have all experts compute one half of a row while the other travels (recipe key engine.overlap_dispatch)."""
    for layer in (module for chunk in chunks for module in chunk.modules()):
        if isinstance(layer, PackedMoELayer):
            layer.token_dispatcher.parts = 2
