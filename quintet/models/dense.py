"""What the dense decoder families share: reading their config, and the table of their weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from quintet.errors import UserError
from quintet.models.family import ModelShape, Rope, Weight


def read_rope(config: dict[str, Any]) -> Rope:
    """Rotary parameters in either spelling: `rope_parameters` (transformers 5) or `rope_theta` + `rope_scaling`."""
    parameters = dict(config.get("rope_parameters") or {})
    theta = parameters.pop("rope_theta", None) or config.get("rope_theta") or 10000.0
    scaling = {**(config.get("rope_scaling") or {}), **parameters}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind not in ("default", "linear", "llama3"):
        raise UserError(
            f"config.json: rope type {kind!r} is not supported; supported are default, linear, llama3"
        )
    return Rope(theta=float(theta), scaling=None if kind == "default" else {**scaling, "rope_type": kind})


def dense_shape(
    config: dict[str, Any], family: str, *, qk_norm: bool, qkv_bias: bool, tied_by_default: bool
) -> ModelShape:
    """Shape of a Llama-like decoder from its Hugging Face config. Raises KeyError for a missing key."""
    if config.get("use_sliding_window"):
        raise UserError("config.json: use_sliding_window is not supported; set it to false")
    heads = config["num_attention_heads"]
    return ModelShape(
        family=family,
        layers=config["num_hidden_layers"],
        hidden_size=config["hidden_size"],
        ffn_hidden_size=config["intermediate_size"],
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        vocab_size=config["vocab_size"],
        max_positions=config["max_position_embeddings"],
        tied_embeddings=config.get("tie_word_embeddings", tied_by_default),
        norm_eps=config["rms_norm_eps"],
        qk_norm=qk_norm,
        qkv_bias=qkv_bias,
        rope=read_rope(config),
    )


def dense_weights(shape: ModelShape) -> Iterator[Weight]:
    """Every weight of a dense decoder, in layer order."""
    h, f, d = shape.hidden_size, shape.ffn_hidden_size, shape.head_dim
    q, kv = shape.heads * d, shape.kv_heads * d
    yield Weight(
        "embedding.word_embeddings.weight", ("model.embed_tokens.weight",), ((shape.vocab_size, h),), "vocab"
    )
    for i in range(shape.layers):
        ours, theirs = f"decoder.layers.{i}.", f"model.layers.{i}."
        attention, mlp = theirs + "self_attn.", theirs + "mlp."
        yield Weight(
            ours + "input_layernorm.weight", (theirs + "input_layernorm.weight",), ((h,),), "replicated"
        )
        qkv = tuple(attention + f"{x}_proj" for x in "qkv")
        yield Weight(
            ours + "self_attention.linear_qkv.weight",
            tuple(name + ".weight" for name in qkv),
            ((q, h), (kv, h), (kv, h)),
            "qkv",
        )
        if shape.qkv_bias:
            yield Weight(
                ours + "self_attention.linear_qkv.bias",
                tuple(name + ".bias" for name in qkv),
                ((q,), (kv,), (kv,)),
                "qkv",
            )
        if shape.qk_norm:
            for x in "qk":
                yield Weight(
                    ours + f"self_attention.{x}_layernorm.weight",
                    (attention + f"{x}_norm.weight",),
                    ((d,),),
                    "replicated",
                )
        yield Weight(
            ours + "self_attention.linear_proj.weight", (attention + "o_proj.weight",), ((h, q),), "columns"
        )
        yield Weight(
            ours + "pre_mlp_layernorm.weight",
            (theirs + "post_attention_layernorm.weight",),
            ((h,),),
            "replicated",
        )
        yield Weight(
            ours + "mlp.linear_fc1.weight",
            (mlp + "gate_proj.weight", mlp + "up_proj.weight"),
            ((f, h), (f, h)),
            "gate_up",
        )
        yield Weight(ours + "mlp.linear_fc2.weight", (mlp + "down_proj.weight",), ((h, f),), "columns")
    yield Weight("decoder.final_layernorm.weight", ("model.norm.weight",), ((h,),), "replicated")
    if not shape.tied_embeddings:
        yield Weight("output_layer.weight", ("lm_head.weight",), ((shape.vocab_size, h),), "vocab")
