"""What the dense decoder families share: reading their config, and the table of their weights."""

from __future__ import annotations

from collections.abc import Iterator

from quintet.models.family import ModelShape, Rope, Weight
from quintet.models.hf_config import HfConfig

_ROPE_FACTORS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
"""Supported kinds of rotary embedding, and the numbers each is computed from."""


def read_rope(config: HfConfig) -> Rope:
    """Rotary parameters in either spelling: `rope_parameters` (transformers 5) or `rope_theta` + `rope_scaling`."""
    parameters, legacy = config.section("rope_parameters"), config.section("rope_scaling")
    theta = parameters.number("rope_theta", config.number("rope_theta", 10000.0))
    for one in (config, parameters, legacy):
        if one.number("partial_rotary_factor", 1.0) != 1.0:
            raise one.wrong("partial_rotary_factor", "1: partial rotary embedding is not supported")
    merged = {**legacy.data, **parameters.data}
    merged.pop("rope_theta", None)
    where = parameters if set(parameters.data) - {"rope_theta"} else legacy
    scaling = HfConfig(merged, config.where, where.prefix)
    kind = scaling.text("rope_type", scaling.text("type", "default"))
    if kind not in _ROPE_FACTORS:
        key = "rope_type" if scaling.has("rope_type") else "type"
        raise scaling.wrong(key, f"one of {', '.join(_ROPE_FACTORS)}: other kinds are not supported")
    if kind == "default":
        return Rope(theta=theta)
    numbers = {key: scaling.number(key) for key in _ROPE_FACTORS[kind]}
    if kind == "llama3" and numbers["high_freq_factor"] <= numbers["low_freq_factor"]:
        raise scaling.wrong("high_freq_factor", "more than low_freq_factor")
    return Rope(theta=theta, scaling={**merged, **numbers, "rope_type": kind})


def dense_shape(
    config: HfConfig, family: str, *, qk_norm: bool, qkv_bias: bool, tied_by_default: bool
) -> ModelShape:
    """Shape of a Llama-like decoder from its Hugging Face config.

    Raises UserError for keys missing or of wrong type, and for everything that changes what the model computes
    and is not supported here.
    """
    _refuse_other_layers(config)
    heads, hidden = config.whole("num_attention_heads"), config.whole("hidden_size")
    kv_heads = config.whole("num_key_value_heads", heads)
    if heads % kv_heads:
        raise config.wrong("num_key_value_heads", f"a divisor of num_attention_heads={heads}")
    if not config.has("head_dim") and hidden % heads:
        raise config.wrong("hidden_size", f"a multiple of num_attention_heads={heads}, or head_dim given")
    head_dim = config.whole("head_dim", max(hidden // heads, 1))
    if head_dim % 2:
        raise config.wrong("head_dim", f"an even number, not {head_dim}: rotary embedding turns pairs")
    return ModelShape(
        family=family,
        layers=config.whole("num_hidden_layers"),
        hidden_size=hidden,
        ffn_hidden_size=config.whole("intermediate_size"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=config.whole("vocab_size"),
        max_positions=config.whole("max_position_embeddings"),
        tied_embeddings=config.flag("tie_word_embeddings", tied_by_default),
        norm_eps=config.number("rms_norm_eps"),
        qk_norm=qk_norm,
        qkv_bias=qkv_bias,
        rope=read_rope(config),
    )


def refuse_biases(config: HfConfig, *keys: str) -> None:
    """Raise UserError when one of the keys is true: the family's table has no such biases."""
    for key in keys:
        if config.flag(key, False):
            raise config.wrong(key, "false: these biases are not supported")


def _refuse_other_layers(config: HfConfig) -> None:
    if config.flag("use_sliding_window", False):
        raise config.wrong("use_sliding_window", "false: sliding-window attention is not supported")
    if set(config.texts("layer_types")) - {"full_attention"}:
        raise config.wrong("layer_types", "full_attention in every layer: no other kind is supported")
    if config.text("hidden_act", "silu") != "silu":
        raise config.wrong("hidden_act", '"silu": no other activation is supported')


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
