"""Layers for multi-token prediction (DeepSeek-V3, https://arxiv.org/abs/2412.19437, section 2.2) on the last stage.

Each takes the hidden state of a token and the embedding of the token after it, and makes the hidden state from which the
head predicts the token after that one:

    h' = final_layernorm(layer(eh_proj [enorm(e_next); hnorm(h)]))

Parameters are named as in megatron-core's MultiTokenPredictionBlock. Its own module rolls token ids over process-global
groups and knows no row with an exchange; here the caller gives the embeddings (`PolicyModel.look_ahead`).
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.tensor_parallel.mappings import (
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor

from quintet.engine.layers.specs import layer_spec
from quintet.engine.mesh import Mesh
from quintet.engine.row import PackedRow
from quintet.models import ModelShape


def freeze_ahead(chunks: Iterable[Any]) -> None:
    """Keep the layers for multi-token prediction of a model's chunks from being trained."""
    for chunk in chunks:
        if hasattr(chunk, "mtp"):
            chunk.mtp.requires_grad_(False)


class MtpLayer(torch.nn.Module):
    """One layer for multi-token prediction. number: among those of the model, from 0."""

    def __init__(
        self,
        shape: ModelShape,
        config: TransformerConfig,
        mesh: Mesh,
        provider: Any,
        number: int,
        vp_stage: int | None,
    ) -> None:
        super().__init__()
        groups = mesh.groups
        self.tp, self.sequence_parallel = groups.tp, config.sequence_parallel
        self.recomputed = config.recompute_granularity == "full"
        sizes: Any = {"hidden_size": config.hidden_size, "eps": config.layernorm_epsilon}
        norm = partial(build_module, provider.layer_norm(rms_norm=True), config=config, **sizes)
        self.enorm, self.hnorm = norm(), norm()
        self.eh_proj = build_module(
            provider.column_parallel_linear(),
            2 * config.hidden_size,
            config.hidden_size,
            config=config,
            init_method=config.init_method,
            gather_output=False,
            bias=False,
            skip_bias_add=False,
            is_expert=False,
            tp_group=groups.tp,
        )
        # A layer adds the offset of its stage to its number.
        offset = get_transformer_layer_offset(config, vp_stage, mesh.at("pp"))
        self.transformer_layer = build_module(
            layer_spec(shape, provider, groups, moe=shape.is_moe(shape.layers + number), window=None),
            config=config,
            layer_number=shape.layers + number + 1 - offset,
            pg_collection=groups,
            vp_stage=vp_stage,
        )
        self.final_layernorm = norm()

    def forward(self, hidden: Tensor, embeddings: Tensor, row: PackedRow) -> Tensor:
        """Compute the layer's hidden states. hidden: [T (/tp under SP), 1, H], as the family's trunk or the layer before gives
        them (see the family's file on whether its final norm is applied). embeddings: of each token's next one, like `hidden`.
        Returns the same shape."""
        both = torch.cat((self.enorm(embeddings), self.hnorm(hidden)), -1)
        joined, _ = self.eh_proj(both)
        joined = gather_from_tensor_model_parallel_region(joined, group=self.tp)
        if self.sequence_parallel:
            joined = scatter_to_sequence_parallel_region(joined, group=self.tp)
        compute = partial(self._decode, row=row)
        if self.recomputed and self.training:
            # Core's block, which recomputes its layers, has not got this one. Like there, the input has a gradient: with the
            # trunk detached, the projection's.
            joined = tensor_parallel.checkpoint(compute, False, joined)
        else:
            joined = compute(joined)
        return self.final_layernorm(joined)

    def _decode(self, hidden: Tensor, row: PackedRow) -> Tensor:
        return self.transformer_layer(hidden_states=hidden, attention_mask=None, packed_seq_params=row)[0]
