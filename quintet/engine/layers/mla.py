"""Multi-head latent attention over packed sequences (DeepSeek-V2, https://arxiv.org/abs/2405.04434, section 2.1).

Queries, and keys with values, come out of low-rank latents; a part of each query and one key for all heads are turned
by the rotary embedding. Under tensor parallelism the heads are cut and the latents are not: the down projections are
replicated, work on a rank's slice of the tokens under sequence parallelism, and have their gradients summed over tp
then. The one rotary key meets the heads of every rank, so its gradient is summed over tp too, on its way back; core's
own module forgets that (0.16.1, local layers).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import MLATransformerConfig
from torch import Tensor

from quintet.engine.layers.attention import attend, rotate
from quintet.engine.layers.mlp import forgotten, recomputes
from quintet.engine.row import PackedRow

LATENT_NORM_EPS = 1e-6
"""Of the latents' norms, whatever the model's norm_eps is: as DeepSeek's code and transformers have it."""


@dataclass
class LatentAttentionSubmodules:
    """What a back end gives latent attention: `linear` is replicated; a norm that is None is part of `up_proj`."""

    linear: Any
    column_parallel_linear: Any
    up_proj: Any
    """The column-parallel linear after a latent's norm, or one that begins with the norm."""
    norm: Any
    core_attention: Any
    linear_proj: Any


class PackedLatentAttention(MegatronModule):
    """Self-attention whose `packed_seq_params` is a `PackedRow`. Hidden states are [T (/tp under SP), 1, hidden].

    Parameters are named as in megatron-core's MLASelfAttention.
    """

    def __init__(
        self,
        config: MLATransformerConfig,
        submodules: LatentAttentionSubmodules,
        layer_number: int,
        pg_collection: Any,
        softmax_scale: float,
        interleaved: bool,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        self.layer_number, self.tp = layer_number, pg_collection.tp
        self.heads = config.num_attention_heads // self.tp.size()
        self.interleaved = interleaved
        self._build(submodules, config)
        self.core_attention = build_module(
            submodules.core_attention,
            config=config,
            layer_number=layer_number,
            softmax_scale=softmax_scale,
            pg_collection=pg_collection,
        )
        self._recompute_core, self._recompute_up = (
            recomputes(config, module) for module in ("core_attn", "mla_up_proj")
        )

    def _build(self, parts: LatentAttentionSubmodules, config: MLATransformerConfig) -> None:
        hidden, heads = config.hidden_size, config.num_attention_heads
        qk = config.qk_head_dim + config.qk_pos_emb_head_dim
        down = {"config": config, "init_method": config.init_method}
        up = down | {"tp_group": self.tp, "gather_output": False, "skip_bias_add": False}
        up |= {"bias": False, "is_expert": False}
        norm = {"config": config, "eps": LATENT_NORM_EPS}
        rank, kv_rank = config.q_lora_rank, config.kv_lora_rank
        if rank is None:
            self.linear_q_proj = build_module(
                parts.column_parallel_linear, hidden, heads * qk, tp_comm_buffer_name="q_proj", **up
            )
        else:
            self.linear_q_down_proj = build_module(parts.linear, hidden, rank, **down)
            self.q_layernorm = build_module(parts.norm, hidden_size=rank, **norm) if parts.norm else None
            self.linear_q_up_proj = build_module(
                parts.up_proj, rank, heads * qk, tp_comm_buffer_name="q_up_proj", **up
            )
        self.linear_kv_down_proj = build_module(
            parts.linear, hidden, kv_rank + config.qk_pos_emb_head_dim, **down
        )
        self.kv_layernorm = build_module(parts.norm, hidden_size=kv_rank, **norm) if parts.norm else None
        self.linear_kv_up_proj = build_module(
            parts.up_proj,
            kv_rank,
            heads * (config.qk_head_dim + config.v_head_dim),
            tp_comm_buffer_name="kv_up_proj",
            **up,
        )
        if parts.norm is None:  # the linear layers have the model's norm_eps
            for fused in ("linear_q_up_proj", "linear_kv_up_proj"):
                if hasattr(self, fused):
                    getattr(self, fused).eps = LATENT_NORM_EPS
        self.linear_proj = build_module(
            parts.linear_proj,
            heads * config.v_head_dim,
            hidden,
            config=config,
            init_method=config.output_layer_init_method,
            bias=False,
            input_is_parallel=True,
            skip_bias_add=True,
            is_expert=False,
            tp_comm_buffer_name="proj",
            tp_group=self.tp,
        )

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Return the projected output like `hidden_states`, and the projection's bias (None)."""
        row: PackedRow = kwargs["packed_seq_params"]
        latents, up = self._down(hidden_states), partial(self._up, row=row)
        again = self._recompute_up and self.training
        (query, key, value), forget = forgotten(again, up, *latents, fp8=self.config.fp8)
        context = attend(self.core_attention, query, key, value, row, self._recompute_core and self.training)
        context = context.flatten(1).unsqueeze(1)
        forget(context)
        out, bias = self.linear_proj(context)
        return out, bias

    def _down(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Latents before their norms, and the rotary key of all heads [T, 1, 1, d].

        Latents are [T (/tp under SP), 1, rank]; without a query latent, the hidden states stand for it.
        """
        query = hidden
        if self.config.q_lora_rank is not None:
            query, _ = self.linear_q_down_proj(hidden)
        both, _ = self.linear_kv_down_proj(hidden)
        latent, key = both.split([self.config.kv_lora_rank, self.config.qk_pos_emb_head_dim], dim=-1)
        if self.config.sequence_parallel:
            key = gather_from_sequence_parallel_region(key, group=self.tp)
        else:
            key = copy_to_tensor_model_parallel_region(key, group=self.tp)
        return query, latent, key.unsqueeze(2)

    def _up(
        self, query_latent: Tensor, latent: Tensor, rotary_key: Tensor, row: PackedRow
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Query and key [T, heads / tp, nope + rope], value [T, heads / tp, v]."""
        config = self.config
        if config.q_lora_rank is None:
            query, _ = self.linear_q_proj(query_latent)
        else:
            query, _ = self.linear_q_up_proj(
                self.q_layernorm(query_latent) if self.q_layernorm else query_latent
            )
        both, _ = self.linear_kv_up_proj(self.kv_layernorm(latent) if self.kv_layernorm else latent)
        query = query.unflatten(-1, (self.heads, -1))
        key, value = both.unflatten(-1, (self.heads, -1)).split([config.qk_head_dim, config.v_head_dim], -1)
        plain, turned = query.split([config.qk_head_dim, config.qk_pos_emb_head_dim], -1)
        query = torch.cat((plain, self._rotate(turned, row)), -1)
        rotary_key = self._rotate(rotary_key, row).expand(-1, -1, self.heads, -1)
        key = torch.cat((key, rotary_key), -1)
        return query.squeeze(1), key.squeeze(1), value.squeeze(1).contiguous()

    def _rotate(self, x: Tensor, row: PackedRow) -> Tensor:
        """x: [T, 1, heads, d]. Interleaved pairs come out as halves: in queries and keys alike, so scores are the same."""
        assert row.cos is not None
        assert row.sin is not None
        if self.interleaved:
            x = torch.cat((x[..., 0::2], x[..., 1::2]), -1)
        return rotate(x, row.cos, row.sin)


class ReplicatedLinear(torch.nn.Linear):
    """A linear layer that every tp rank holds whole. Under SP each sees a slice of the tokens, so the weight's gradient
    is summed over tp: the attribute asks `finalize_model_grads` for it."""

    def __init__(
        self, input_size: int, output_size: int, *, config: MLATransformerConfig, init_method: Any
    ) -> None:
        device = None if config.use_cpu_initialization else torch.cuda.current_device()
        super().__init__(input_size, output_size, bias=False, dtype=config.params_dtype, device=device)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return super().forward(x), None
