"""The router: megatron-core's, with DeepSeek-V3's expert bias as what it is here, a stored value.

Core's own bias comes with a count of tokens a rank and an update from it over process-global groups; the count
includes padding, and the update has no place in fine-tuning. This router loads the bias, adds it where experts are
chosen, and leaves it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from quintet.engine.row import PackedRow


class Router(TopKRouter):
    """Scores of all experts in fp32, the top-k of them, their weights. No auxiliary loss, no statistics."""

    def __init__(self, config: TransformerConfig, pg_collection: Any = None, *, bias: bool = False) -> None:
        super().__init__(config=config, pg_collection=pg_collection)
        if bias:
            del self.expert_bias  # core's attribute, None
            zeros = torch.zeros(config.num_moe_experts, device=torch.cuda.current_device())
            self.register_buffer("expert_bias", zeros)

    def forward(self, input: Tensor, row: PackedRow | None = None) -> tuple[Tensor, Tensor]:
        """Return the weights and choices [T, experts] of the tokens that this rank has of the row."""
        weights, chosen = super().forward(input)
        return weights, chosen


@contextmanager
def record_routes(chunks: Iterable[torch.nn.Module], hear: Callable[[int, Tensor], None]) -> Iterator[None]:
    """Tell `hear`, within the context, what each router of a model chooses: the layer's number (from 0, dense ones
    counted) and the experts [T, top-k] of the tokens that the router sees, those of the largest weight first."""

    def listen(router: Any, inputs: Any, output: tuple[Tensor, Tensor]) -> None:
        weights, chosen = output
        ranked = weights.masked_fill(~chosen, -1.0)  # a chosen expert may weigh 0
        hear(router.layer_number - 1, ranked.topk(router.topk).indices)

    routers = [module for chunk in chunks for module in chunk.modules() if isinstance(module, Router)]
    handles = [router.register_forward_hook(listen) for router in routers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
