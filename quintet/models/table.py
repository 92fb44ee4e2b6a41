"""The table of a decoder's weights: every megatron-core parameter and the Hugging Face tensors it is made of.

One table serves all families so far: their checkpoints name the same parts the same way, and `ModelShape` says
which parts there are.
"""

from __future__ import annotations

from collections.abc import Iterator

from quintet.models.family import Split, Weight
from quintet.models.shape import MlaShape, ModelShape, MoeShape


def decoder_weights(shape: ModelShape) -> Iterator[Weight]:
    """Every weight of a decoder, in layer order."""
    h = shape.hidden_size
    vocabulary = ((shape.vocab_size, h),)
    yield Weight("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), vocabulary, "vocab")
    for i in range(shape.layers):
        ours, theirs = f"decoder.layers.{i}.", f"model.layers.{i}."
        yield _one(ours + "input_layernorm", theirs + "input_layernorm", (h,))
        if shape.mla:
            yield from _latent_attention(shape, shape.mla, ours + "self_attention.", theirs + "self_attn.")
        else:
            yield from _attention(shape, ours + "self_attention.", theirs + "self_attn.")
        yield _one(ours + "pre_mlp_layernorm", theirs + "post_attention_layernorm", (h,))
        if shape.moe and shape.moe.is_moe(i):
            yield from _experts(h, shape.moe, ours + "mlp.", theirs + "mlp.")
        else:
            yield from _feed_forward(h, shape.ffn_hidden_size, ours + "mlp.", theirs + "mlp.")
    yield _one("decoder.final_layernorm", "model.norm", (h,))
    if shape.head == "value":
        yield _one("value_head", "score", (1, h))  # as transformers' ...ForSequenceClassification names it
    elif not shape.tied_embeddings:
        yield Weight("output_layer.weight", ("lm_head.weight",), vocabulary, "vocab")


def _one(ours: str, theirs: str, full: tuple[int, ...], split: Split = "replicated") -> Weight:
    return Weight(ours + ".weight", (theirs + ".weight",), (full,), split)


def _attention(shape: ModelShape, ours: str, theirs: str) -> Iterator[Weight]:
    h, d = shape.hidden_size, shape.head_dim
    q, kv = shape.heads * d, shape.kv_heads * d
    names = tuple(theirs + f"{x}_proj" for x in "qkv")
    shapes = ((q, h), (kv, h), (kv, h))
    yield Weight(ours + "linear_qkv.weight", tuple(n + ".weight" for n in names), shapes, "qkv")
    if shape.qkv_bias:
        biases = ((q,), (kv,), (kv,))
        yield Weight(ours + "linear_qkv.bias", tuple(n + ".bias" for n in names), biases, "qkv")
    if shape.qk_norm:
        for x in "qk":
            yield _one(ours + f"{x}_layernorm", theirs + f"{x}_norm", (d,))
    yield _one(ours + "linear_proj", theirs + "o_proj", (h, q), "columns")


def _latent_attention(shape: ModelShape, mla: MlaShape, ours: str, theirs: str) -> Iterator[Weight]:
    h, rank, kv_rank = shape.hidden_size, mla.q_lora_rank, mla.kv_lora_rank
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
    yield _one(ours + "linear_proj", theirs + "o_proj", (h, shape.heads * mla.v_head_dim), "columns")


def _feed_forward(h: int, f: int, ours: str, theirs: str, *, expert: bool = False) -> Iterator[Weight]:
    gate_up = (theirs + "gate_proj.weight", theirs + "up_proj.weight")
    first: Split = "expert_gate_up" if expert else "gate_up"
    yield Weight(ours + "linear_fc1.weight", gate_up, ((f, h), (f, h)), first)
    yield _one(ours + "linear_fc2", theirs + "down_proj", (h, f), "expert_columns" if expert else "columns")


def _experts(h: int, moe: MoeShape, ours: str, theirs: str) -> Iterator[Weight]:
    yield _one(ours + "router", theirs + "gate", (moe.experts, h))
    if moe.bias:
        bias = (theirs + "gate.e_score_correction_bias",)
        yield Weight(ours + "router.expert_bias", bias, ((moe.experts,),), "replicated", trained=False)
    for e in range(moe.experts):
        yield from _feed_forward(
            h, moe.ffn_hidden_size, ours + f"experts.{e}.", theirs + f"experts.{e}.", expert=True
        )
    if moe.shared_ffn_hidden_size:
        shared = (ours + "shared_experts.", theirs + "shared_experts.")
        yield from _feed_forward(h, moe.shared_ffn_hidden_size, *shared)
