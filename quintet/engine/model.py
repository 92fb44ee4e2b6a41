"""The policy model: megatron-core's GPTModel, fed packed rows, returning hidden states.

The LM head is applied outside (`quintet.engine.head`), where only the positions that matter become logits.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from quintet.engine.device import upload
from quintet.engine.gradients import mark_embedding_copy
from quintet.engine.head import VocabSlice, log_probs_and_entropy
from quintet.engine.layers.attention_backends import reads_offsets
from quintet.engine.layers.mtp import MtpLayer
from quintet.engine.layers.specs import block_spec
from quintet.engine.mesh import Mesh
from quintet.engine.row import MicroBatch, PackedRow, TargetSet, attention_metadata
from quintet.models import ModelShape
from quintet.models.family import mtp_names
from quintet.models.rope import inverse_frequencies, rotary_scale


class States(NamedTuple):
    """The hidden states [T (/tp under SP), 1, H] that the last stage puts out, after the decoder's final norm and before it."""

    normed: Tensor
    plain: Tensor


class PolicyModel(GPTModel):
    """One pipeline stage of a decoder, or one chunk of it where stages are interleaved (`vp_stage`). `forward` takes a
    packed row and returns hidden states [T(/tp under SP), 1, H], T being the row's tokens on this rank."""

    def __init__(
        self,
        shape: ModelShape,
        config: TransformerConfig,
        mesh: Mesh,
        provider: Any,
        vp_stage: int | None = None,
    ) -> None:
        chunks = config.virtual_pipeline_model_parallel_size or 1
        super().__init__(
            config,
            block_spec(shape, config, mesh, provider, vp_stage),
            vocab_size=-(-shape.vocab_size // mesh.sizes.tp) * mesh.sizes.tp,  # divides evenly over tp
            max_sequence_length=shape.max_positions,
            pre_process=mesh.first_stage and not vp_stage,
            post_process=mesh.last_stage and vp_stage in (None, chunks - 1),
            share_embeddings_and_output_weights=shape.tied_embeddings,
            position_embedding_type="none",  # rotary tables travel with the row
            pg_collection=mesh.groups,
            vp_stage=vp_stage,
        )
        self.shape = shape
        self.mesh = mesh
        self.adapters: Any = None
        """What `quintet.engine.lora` attached, if it did."""
        if self.post_process and shape.head == "value":
            del self.output_layer
            self.value_head = ValueHead(shape.hidden_size, config.params_dtype)
        if self.post_process and shape.mtp_layers:
            numbers = range(shape.mtp_layers)
            layers = [MtpLayer(shape, config, mesh, provider, number, vp_stage) for number in numbers]
            self.mtp: Any = torch.nn.Module()  # for core's names
            self.mtp.layers = torch.nn.ModuleList(layers)
            if not self.pre_process:
                self.embedding = self._embedding_of_last_stage()
        ends = self.pre_process or self.post_process
        if shape.mtp_layers and mesh.sizes.pp > 1 and not shape.tied_embeddings and ends:
            mark_embedding_copy(self.embedding.word_embeddings.weight, copy=self.post_process)
        self._inverse_frequencies = torch.tensor(inverse_frequencies(shape.rope, shape.rotary_dim))
        self._rotary_scale = rotary_scale(shape.rope)

    def _embedding_of_last_stage(self) -> LanguageModelEmbedding:
        """What layers for multi-token prediction read: a copy of the first stage's embedding, or the tied head."""
        embedding = LanguageModelEmbedding(
            config=self.config,
            vocab_size=self.vocab_size,
            max_sequence_length=self.max_sequence_length,
            position_embedding_type="none",
            tp_group=self.mesh.groups.tp,
        )
        if self.share_embeddings_and_output_weights:
            embedding.word_embeddings.weight = self.output_layer.weight
        return embedding

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def row(self, micro: MicroBatch, comm: str = "all_gather") -> PackedRow:
        """Describe a micro-batch to the layers. comm: how context-parallel ranks share attention."""
        offsets = reads_offsets(self.device, self.config.params_dtype)
        row = attention_metadata(
            micro, self.device, rectangles=not offsets, group=self.mesh.cp_groups[micro.cp], comm=comm
        )
        row.cos, row.sin = self.rotary(upload(micro.positions, self.device))
        return row

    def rotary(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin [T, 1, 1, rotary_dim / 2] at positions [T], computed in fp32, in the parameters' type."""
        if self._inverse_frequencies.device != positions.device:
            self._inverse_frequencies = self._inverse_frequencies.to(positions.device)
        angle = (positions.float()[:, None] * self._inverse_frequencies)[:, None, None]
        dtype = self.config.params_dtype
        scale = self._rotary_scale
        return (angle.cos() * scale).to(dtype), (angle.sin() * scale).to(dtype)

    def forward(self, input_ids: Tensor, row: PackedRow, ahead: bool = False) -> Tensor | States:
        """Compute what this stage or chunk puts out. input_ids: [1, T], read on the first stage only. Other stages take their
        input by `set_input_tensor`. ahead: the last one returns `States`, which layers for multi-token prediction read."""
        hidden = self.embed(input_ids) if self.pre_process else None
        decode = partial(self.decoder, hidden_states=hidden, attention_mask=None, packed_seq_params=row)
        if not (ahead and self.post_process):
            return decode()
        plain: list[Tensor] = []
        # Core's block returns what its norm gives; the norm is a module of its own with either back end of layers.
        with self.decoder.final_layernorm.register_forward_pre_hook(
            lambda norm, given: plain.append(given[0])
        ):
            return States(decode(), *plain)

    def look_ahead(self, states: States, micro: MicroBatch, row: PackedRow, detach: bool) -> Iterator[Tensor]:
        """Yield the hidden states of each layer for multi-token prediction, shaped like `states`', for `for_head`. Last stage
        only, and all ranks that share the row or a layer's experts, whether or not they predict one of its targets.

        detach: gradients stop at these layers, for the trunk as for the embedding.
        """
        hidden = states.normed if mtp_names(self.shape).reads_normed else states.plain
        if detach:
            hidden = hidden.detach()
        for layer, ids in zip(self.mtp.layers, micro.following, strict=True):
            with torch.set_grad_enabled(torch.is_grad_enabled() and not detach):
                embeddings = self.embed(upload(ids, hidden.device))
            hidden = layer(hidden, embeddings, row)
            yield hidden

    def embed(self, input_ids: Tensor) -> Tensor:
        """Embed tokens [1, T] → [T (/tp under SP), 1, H]. On the first stage, and where layers for multi-token prediction are."""
        return self.embedding(input_ids=input_ids, position_ids=None)

    def head_weight(self) -> Tensor:
        """Return this rank's rows of the LM head: [padded vocab / tp, H]. Last stage only."""
        if self.share_embeddings_and_output_weights:
            return self.shared_embedding_or_output_weight()
        return self.output_layer.weight

    def for_head(self, hidden: Tensor) -> Tensor:
        """Return hidden states [T, H] ready for a vocabulary-parallel head: gathered from SP, gradients summed over tp."""
        if self.config.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, group=self.mesh.groups.tp)
        else:
            hidden = copy_to_tensor_model_parallel_region(hidden, group=self.mesh.groups.tp)
        return hidden.squeeze(1)

    def score(
        self, hidden: Tensor, targets: TargetSet, temperature: float = 1.0, heads: int = 1
    ) -> tuple[Tensor, ...]:
        """Return what the head says of the M targets that are predicted here, fp32 [M] each: log-probs and entropies, or, of a
        value model, values. hidden: as `forward` returns it. heads: see `log_probs_and_entropy`. Last stage only."""
        at = upload(targets.predictors, hidden.device)
        if self.shape.head == "value":
            return (self.values(hidden, at),)
        wanted = self.for_head(hidden).index_select(0, at)
        ids = upload(targets.ids, hidden.device)
        how = (self.vocab_slice(), temperature, heads)
        scores = log_probs_and_entropy(wanted, self.head_weight(), ids, *how)
        return scores.logprobs, scores.entropy

    def vocab_slice(self) -> VocabSlice:
        """Return which rows of the vocabulary this rank's head has."""
        return VocabSlice(len(self.head_weight()), self.shape.vocab_size, self.mesh.groups.tp)

    def values(self, hidden: Tensor, at: Tensor) -> Tensor:
        """Return a value model's fp32 values [N] at row positions `at` [N], the same on every tp rank."""
        if self.config.sequence_parallel:
            # Every rank computes the same loss from all tokens: a rank's own slice of the gradient is the whole truth.
            hidden = gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=False, group=self.mesh.groups.tp
            )
        return self.value_head(hidden.squeeze(1).index_select(0, at))


class ValueHead(torch.nn.Module):
    """The head of a value model: hidden [N, H] → values [N], in fp32. Replicated over tp; starts at zero, so that a fresh value
    model says 0."""

    def __init__(self, hidden_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1, hidden_size, dtype=dtype))

    def forward(self, hidden: Tensor) -> Tensor:
        return (hidden.float() @ self.weight.float().t()).squeeze(1)
