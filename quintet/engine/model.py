"""The policy model: megatron-core's GPTModel, fed packed rows, returning hidden states.

The LM head is applied outside (`quintet.engine.head`), where only the positions that matter become logits.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from torch import Tensor

from quintet.engine.attention import CoreAttention, PackedSelfAttention, uses_varlen
from quintet.engine.mesh import Mesh
from quintet.engine.norm import RMSNorm
from quintet.engine.row import MicroBatch, Row, describe
from quintet.models import ModelShape
from quintet.models.rope import inverse_frequencies


class PolicyModel(GPTModel):
    """One pipeline stage of a decoder. `forward` takes a packed row and returns hidden states [T(/tp under SP), 1, H]."""

    def __init__(self, shape: ModelShape, config: TransformerConfig, mesh: Mesh) -> None:
        super().__init__(
            config,
            block_spec(shape, config, mesh),
            vocab_size=padded_vocab(shape.vocab_size, mesh.sizes.tp),
            max_sequence_length=shape.max_positions,
            pre_process=mesh.first_stage,
            post_process=mesh.last_stage,
            share_embeddings_and_output_weights=shape.tied_embeddings,
            position_embedding_type="none",  # rotary tables travel with the row
            pg_collection=mesh.groups,
        )
        self.shape = shape
        self.mesh = mesh
        self._inverse_frequencies = torch.tensor(inverse_frequencies(shape.rope, shape.head_dim))

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def row(self, micro: MicroBatch) -> Row:
        """Describe a micro-batch to the layers."""
        dtype = self.config.params_dtype
        row = describe(micro, self.device, rectangles=not uses_varlen(self.device, dtype))
        row.cos, row.sin = self.rotary(micro.positions.to(self.device))
        return row

    def rotary(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [T, 1, 1, head_dim / 2] at positions [T], computed in fp32, in the parameters' type."""
        if self._inverse_frequencies.device != positions.device:
            self._inverse_frequencies = self._inverse_frequencies.to(positions.device)
        angle = (positions.float()[:, None] * self._inverse_frequencies)[:, None, None]
        dtype = self.config.params_dtype
        return angle.cos().to(dtype), angle.sin().to(dtype)

    def forward(self, input_ids: Tensor, row: Row) -> Tensor:
        """input_ids: [1, T], read on the first stage only. Other stages take their input by `set_input_tensor`."""
        hidden = self.embedding(input_ids=input_ids, position_ids=None) if self.pre_process else None
        return self.decoder(hidden_states=hidden, attention_mask=None, packed_seq_params=row)

    def head_weight(self) -> Tensor:
        """This rank's rows of the LM head: [padded vocab / tp, H]. Last stage only."""
        if self.share_embeddings_and_output_weights:
            return self.shared_embedding_or_output_weight()
        return self.output_layer.weight

    def for_head(self, hidden: Tensor) -> Tensor:
        """Hidden states [T, H] ready for a vocabulary-parallel head: gathered from SP, gradients summed over tp."""
        if self.config.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, group=self.mesh.groups.tp)
        else:
            hidden = copy_to_tensor_model_parallel_region(hidden, group=self.mesh.groups.tp)
        return hidden.squeeze(1)


def padded_vocab(vocab_size: int, tp: int) -> int:
    """Rows of the embedding once it divides evenly over tp."""
    return -(-vocab_size // tp) * tp


def block_spec(shape: ModelShape, config: TransformerConfig, mesh: Mesh) -> TransformerBlockSubmodules:
    """megatron-core's local layers with our attention and a norm that knows of sequence parallelism."""
    spec = get_gpt_layer_local_spec(qk_layernorm=shape.qk_norm, normalization="RMSNorm")
    layer: Any = spec.submodules
    layer.input_layernorm = layer.pre_mlp_layernorm = RMSNorm
    layer.self_attention.module = PackedSelfAttention
    attention: Any = layer.self_attention.submodules
    attention.core_attention = CoreAttention
    if shape.qk_norm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    count = get_num_layers_to_build(config, vp_stage=None, pp_rank=mesh.at("pp"))
    return TransformerBlockSubmodules(layer_specs=[spec] * count, layer_norm=RMSNorm)


def transformer_config(
    shape: ModelShape, mesh: Mesh, *, sp: bool, dtype: torch.dtype, extra: dict[str, Any]
) -> TransformerConfig:
    """megatron-core's configuration of a model in a layout. `extra` overrides fields by name."""
    on_gpu = torch.cuda.is_available()
    fields: dict[str, Any] = {
        "num_layers": shape.layers,
        "hidden_size": shape.hidden_size,
        "ffn_hidden_size": shape.ffn_hidden_size,
        "num_attention_heads": shape.heads,
        "num_query_groups": shape.kv_heads,
        "kv_channels": shape.head_dim,
        "layernorm_epsilon": shape.norm_eps,
        "qk_layernorm": shape.qk_norm,
        "add_qkv_bias": shape.qkv_bias,
        "add_bias_linear": False,
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "tensor_model_parallel_size": mesh.sizes.tp,
        "pipeline_model_parallel_size": mesh.sizes.pp,
        "context_parallel_size": mesh.sizes.cp,
        "sequence_parallel": sp,
        "variable_seq_lengths": True,
        "moe_token_dispatcher_type": "alltoall",  # the default refuses variable lengths, experts or not
        # Losses are normalised by global counts, so gradients are summed over ranks and never rescaled.
        "calculate_per_token_loss": True,
        "bias_activation_fusion": on_gpu,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "gradient_accumulation_fusion": False,
        "use_cpu_initialization": not on_gpu,
        # Without it core 0.16.1 does not mark weights as tensor parallel, and the gradient norm comes out wrong.
        "perform_initialization": True,
        "deallocate_pipeline_outputs": True,
    }
    unknown = [k for k in extra if k not in TransformerConfig.__dataclass_fields__]
    if unknown:
        from quintet.errors import UserError

        raise UserError(f"engine.megatron.{unknown[0]}: megatron-core's TransformerConfig has no such field")
    return TransformerConfig(**{**fields, **extra})
