"""The router: megatron-core's, with DeepSeek-V3's expert bias as what it is here, a stored value.

Core's own bias comes with a count of tokens a rank and an update from it over process-global groups; the count
includes padding, and the update comes before the optimizer's step. This router loads the bias and adds it where experts are
chosen; `quintet.engine.balance` counts and, if it is asked to, moves it.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from quintet.engine.row import PackedRow


class Router(TopKRouter):
    """Scores of all experts in fp32, the top-k of them, their weights. No auxiliary loss, no statistics but the row's `load`."""

    def __init__(self, config: TransformerConfig, pg_collection: Any = None, *, bias: bool = False) -> None:
        super().__init__(config=config, pg_collection=pg_collection)
        if bias:
            del self.expert_bias  # core's attribute, None
            zeros = torch.zeros(config.num_moe_experts, device=torch.cuda.current_device())
            self.register_buffer("expert_bias", zeros)

    def forward(self, input: Tensor, row: PackedRow | None = None) -> tuple[Tensor, Tensor]:
        """Return the weights and choices [T, experts] of the tokens that this rank has of the row."""
        self._maintain_float32_expert_bias()
        logits = self.gating(input)
        if row is not None and row.routes is not None:
            assert not self.config.moe_router_fusion, "TransformerEngine's router asks for no routes"
            self.router_replay = row.routes.of(self.layer_number - 1)
        try:
            weights, chosen = self.routing(logits)
        finally:
            self.router_replay = None
        if row is not None and row.load is not None:
            logits = logits.view(-1, self.num_experts)
            weights = row.load.count(self.layer_number - 1, self.score_function, logits, weights, chosen)
        return weights, chosen
