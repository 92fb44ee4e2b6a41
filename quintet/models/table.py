"""The table of a decoder's weights: every megatron-core parameter and the Hugging Face tensors it is made of.

`ModelShape` says which parts there are, `Names` what a family's checkpoints call them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from quintet.models.shape import MlaShape, ModelShape, MoeShape
from quintet.models.weight import Split, Stack, Weight


@dataclass(frozen=True)
class StackNames:
    """What checkpoints call the tensors that hold all experts of a layer, and how these lie in them (`Stack`); biases have
    "_bias" added."""

    gate_up: str = "experts.gate_up_proj"
    down: str = "experts.down_proj"
    transposed: bool = False
    interleaved: bool = False


@dataclass(frozen=True)
class MtpNames:
    """What checkpoints call the parts of a layer for multi-token prediction; the defaults are DeepSeek-V3's."""

    layer: str = "model.layers.{}"
    numbered_on: bool = True
    """Whether its number follows that of the last decoder layer; else it begins at 0."""
    embedding_norm: str = "enorm"
    hidden_norm: str = "hnorm"
    projection: str = "eh_proj"
    hidden_first: bool = False
    """Whether the projection takes the hidden state before the next token's embedding, and not after it as
    megatron-core's does."""
    final_norm: str = "shared_head.norm"
    embedding_copy: str | None = "embed_tokens"
    """Where it may hold the embedding again, which it shares with the model."""
    head_copy: str | None = "shared_head.head"
    reads_normed: bool = True
    """Whether the first layer reads the decoder's output after its final norm, and not before it."""


@dataclass(frozen=True)
class Names:
    """What checkpoints call the parts of a decoder; the defaults are what most families call them. "{}" is a number."""

    embedding: str = "model.embed_tokens"
    layer: str = "model.layers.{}"
    final_norm: str = "model.norm"
    head: str = "lm_head"

    # of a layer
    input_norm: str = "input_layernorm"
    attention: str = "self_attn"
    mlp_norm: str = "post_attention_layernorm"
    mlp: str = "mlp"
    moe: str = "mlp"
    """What stands in a layer with experts where others have the MLP."""

    # of attention
    q: str = "q_proj"
    k: str = "k_proj"
    v: str = "v_proj"
    out: str = "o_proj"
    q_norm: str = "q_norm"
    k_norm: str = "k_norm"
    sinks: str = "sinks"

    # of an MLP
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"

    # of a layer's experts
    router: str = "gate"
    router_bias: str = "gate.e_score_correction_bias"
    expert: str = "experts.{}"
    expert_gate: str = "gate_proj"
    expert_up: str = "up_proj"
    expert_down: str = "down_proj"
    shared_experts: str = "shared_experts"
    stack: StackNames | None = None
    """Where one tensor holds a matrix of all experts, in place of the names of one expert's."""

    mtp: MtpNames | None = None
    """None of a family whose models have no layers for multi-token prediction."""


def decoder_weights(shape: ModelShape, names: Names) -> Iterator[Weight]:
    """Yield every weight of a decoder, in layer order."""
    return _Table(shape, names).weights()


class _Table:
    def __init__(self, shape: ModelShape, names: Names) -> None:
        self.shape, self.names = shape, names
        self.mtp = names.mtp or MtpNames()

    def weights(self) -> Iterator[Weight]:
        shape, names, h = self.shape, self.names, self.shape.hidden_size
        vocabulary = (shape.vocab_size, h)
        tied = shape.tied_embeddings
        copies = self._copies(self.mtp.embedding_copy, self.mtp.head_copy if tied else None)
        yield _one("embedding.word_embeddings", names.embedding, vocabulary, "vocab", copies)
        for i in range(shape.layers):
            yield from self._layer(i, f"decoder.layers.{i}.", names.layer.format(i) + ".")
        yield _one("decoder.final_layernorm", names.final_norm, (h,))
        if shape.head == "value":
            # As transformers' ...ForSequenceClassification names it.
            yield _one("value_head", "score", (1, h))
        elif not tied:
            yield _one("output_layer", names.head, vocabulary, "vocab", self._copies(self.mtp.head_copy))
        for i in range(shape.mtp_layers):
            yield from self._mtp_layer(i, f"mtp.layers.{i}.", self._mtp_prefix(i))

    def _mtp_layer(self, number: int, ours: str, theirs: str) -> Iterator[Weight]:
        """A projection of embedding and hidden state, each after a norm, into a decoder layer, and a norm on top."""
        mtp, h = self.mtp, self.shape.hidden_size
        yield _one(ours + "enorm", theirs + mtp.embedding_norm, (h,))
        yield _one(ours + "hnorm", theirs + mtp.hidden_norm, (h,))
        split: Split = "rows_halves_swapped" if mtp.hidden_first else "rows"
        yield _one(ours + "eh_proj", theirs + mtp.projection, (h, 2 * h), split)
        yield from self._layer(self.shape.layers + number, ours + "transformer_layer.", theirs)
        yield _one(ours + "final_layernorm", theirs + mtp.final_norm, (h,))

    def _mtp_prefix(self, number: int) -> str:
        return self.mtp.layer.format(number + (self.shape.layers if self.mtp.numbered_on else 0)) + "."

    def _copies(self, *names: str | None) -> tuple[str, ...]:
        """Names under which layers for multi-token prediction may hold what they share with the model."""
        layers = range(self.shape.mtp_layers)
        return tuple(f"{self._mtp_prefix(i)}{name}.weight" for i in layers for name in names if name)

    def _layer(self, number: int, ours: str, theirs: str) -> Iterator[Weight]:
        shape, names, h = self.shape, self.names, self.shape.hidden_size
        yield _one(ours + "input_layernorm", theirs + names.input_norm, (h,))
        attention = (ours + "self_attention.", f"{theirs}{names.attention}.")
        if shape.mla:
            yield from self._latent_attention(shape.mla, *attention)
        else:
            yield from self._attention(*attention)
        yield _one(ours + "pre_mlp_layernorm", theirs + names.mlp_norm, (h,))
        if shape.moe and shape.moe.is_moe(number):
            yield from self._experts(shape.moe, ours + "mlp.", f"{theirs}{names.moe}.")
        else:
            yield from self._mlp(shape.ffn_hidden_size, ours + "mlp.", f"{theirs}{names.mlp}.")

    def _attention(self, ours: str, theirs: str) -> Iterator[Weight]:
        shape, names, h, d = self.shape, self.names, self.shape.hidden_size, self.shape.head_dim
        q, kv = shape.heads * d, shape.kv_heads * d
        parts = tuple(theirs + name for name in (names.q, names.k, names.v))
        yield Weight(
            ours + "linear_qkv.weight", tuple(n + ".weight" for n in parts), ((q, h), (kv, h), (kv, h)), "qkv"
        )
        if shape.qkv_bias:
            yield Weight(
                ours + "linear_qkv.bias", tuple(n + ".bias" for n in parts), ((q,), (kv,), (kv,)), "qkv"
            )
        if shape.qk_norm:
            yield _one(ours + "q_layernorm", theirs + names.q_norm, (d,))
            yield _one(ours + "k_layernorm", theirs + names.k_norm, (d,))
        yield _one(ours + "linear_proj", theirs + names.out, (h, q), "columns")
        if shape.proj_bias:
            yield Weight(ours + "linear_proj.bias", (f"{theirs}{names.out}.bias",), ((h,),), "replicated")
        if shape.sinks:
            sinks = (theirs + names.sinks,)
            yield Weight(ours + "core_attention.softmax_offset", sinks, ((shape.heads,),), "rows")

    def _latent_attention(self, mla: MlaShape, ours: str, theirs: str) -> Iterator[Weight]:
        shape, h, rank, kv_rank = self.shape, self.shape.hidden_size, mla.q_lora_rank, mla.kv_lora_rank
        q = shape.heads * mla.qk_head_dim
        if rank is None:
            yield _one(ours + "linear_q_proj", theirs + "q_proj", (q, h), "rows")
        else:
            yield _one(ours + "linear_q_down_proj", theirs + "q_a_proj", (rank, h))
            yield _one(ours + "q_layernorm", theirs + "q_a_layernorm", (rank,))
            yield _one(ours + "linear_q_up_proj", theirs + "q_b_proj", (q, rank), "rows")
        down, up = kv_rank + mla.qk_rope_head_dim, shape.heads * (mla.qk_nope_head_dim + mla.v_head_dim)
        yield _one(ours + "linear_kv_down_proj", theirs + "kv_a_proj_with_mqa", (down, h))
        yield _one(ours + "kv_layernorm", theirs + "kv_a_layernorm", (kv_rank,))
        yield _one(ours + "linear_kv_up_proj", theirs + "kv_b_proj", (up, kv_rank), "rows")
        yield _one(
            ours + "linear_proj", theirs + self.names.out, (h, shape.heads * mla.v_head_dim), "columns"
        )

    def _mlp(self, f: int, ours: str, theirs: str) -> Iterator[Weight]:
        names, h = self.names, self.shape.hidden_size
        gate_up = (f"{theirs}{names.gate}.weight", f"{theirs}{names.up}.weight")
        yield Weight(ours + "linear_fc1.weight", gate_up, ((f, h), (f, h)), "gate_up")
        yield _one(ours + "linear_fc2", theirs + names.down, (h, f), "columns")

    def _experts(self, moe: MoeShape, ours: str, theirs: str) -> Iterator[Weight]:
        names, h, f = self.names, self.shape.hidden_size, moe.ffn_hidden_size
        yield _one(ours + "router", theirs + names.router, (moe.experts, h))
        if moe.bias:
            bias = (theirs + names.router_bias,)
            yield Weight(ours + "router.expert_bias", bias, ((moe.experts,),), "replicated", trained=False)
        if moe.biases:
            logits = (f"{theirs}{names.router}.bias",)
            yield Weight(ours + "router.bias", logits, ((moe.experts,),), "replicated")
        if names.stack:
            yield from self._stacked(moe, names.stack, ours, theirs)
        for e in range(0 if names.stack else moe.experts):
            mine, its = f"{ours}experts.{e}.", f"{theirs}{names.expert.format(e)}."
            gate_up = (f"{its}{names.expert_gate}.weight", f"{its}{names.expert_up}.weight")
            yield Weight(mine + "linear_fc1.weight", gate_up, ((f, h), (f, h)), "expert_gate_up")
            yield _one(mine + "linear_fc2", its + names.expert_down, (h, f), "expert_columns")
        if moe.shared_ffn_hidden_size:
            shared = (ours + "shared_experts.", f"{theirs}{names.shared_experts}.")
            yield from self._mlp(moe.shared_ffn_hidden_size, *shared)

    def _stacked(self, moe: MoeShape, stack: StackNames, ours: str, theirs: str) -> Iterator[Weight]:
        h, f = self.shape.hidden_size, moe.ffn_hidden_size
        gate_up, down = (theirs + stack.gate_up,), (theirs + stack.down,)
        biases = [tuple(name + "_bias" for name in one) for one in (gate_up, down)] if moe.biases else []
        for e in range(moe.experts):
            fc1, fc2 = (f"{ours}experts.{e}.linear_fc{n}" for n in (1, 2))
            first = Stack(e, moe.experts, stack.transposed, stack.interleaved)
            second = replace(first, interleaved=False)
            yield Weight(fc1 + ".weight", gate_up, ((f, h), (f, h)), "expert_gate_up", stack=first)
            yield Weight(fc2 + ".weight", down, ((h, f),), "expert_columns", stack=second)
            if biases:
                yield Weight(fc1 + ".bias", biases[0], ((f,), (f,)), "expert_gate_up", stack=first)
                yield Weight(fc2 + ".bias", biases[1], ((h,),), "expert_replicated", stack=second)


def _one(
    ours: str, theirs: str, full: tuple[int, ...], split: Split = "replicated", copies: tuple[str, ...] = ()
) -> Weight:
    return Weight(ours + ".weight", (theirs + ".weight",), (full,), split, copies=copies)
