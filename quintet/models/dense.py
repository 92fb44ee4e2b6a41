"""What the decoder families share in reading their config.json."""

from __future__ import annotations

from typing import Any

from quintet.models.fp8_blocks import BLOCK
from quintet.models.hf_config import HfConfig
from quintet.models.shape import MOST_LAYERS, ModelShape, Rope

_ROPE_FACTORS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}
"""Supported kinds of rotary embedding, and the numbers each is computed from."""

_YARN_OPTIONS = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor")
"""Further numbers of YaRN. Null and 0 count as absent, as in transformers."""


def read_rope(config: HfConfig, share: float | None = None) -> Rope:
    """Return the rotary parameters of a config in either spelling: `rope_parameters` (transformers 5) or `rope_theta` +
    `rope_scaling`.

    share: of a head's dims that are turned where the config does not say; None for a family whose heads are turned whole.
    """
    parameters, legacy = config.section("rope_parameters"), config.section("rope_scaling")
    theta = parameters.number("rope_theta", config.number("rope_theta", 10000.0))
    share = _share(config, (parameters, config, legacy), share)
    kinds = [_kind(one.data) for one in (legacy, parameters)]
    if all(kinds) and kinds[0] != kinds[1]:
        # transformers 5 takes this one, which older tools write, and others read rope_parameters.
        raise config.wrong("rope_scaling", "none beside rope_parameters, which says otherwise")
    merged = {**_kind(legacy.data), **_kind(parameters.data)}
    where = parameters if set(parameters.data) - {"rope_theta", "partial_rotary_factor"} else legacy
    scaling = HfConfig(merged, config.where, where.prefix)
    kind = scaling.text("rope_type", scaling.text("type", "default"))
    if kind not in _ROPE_FACTORS:
        key = "rope_type" if scaling.has("rope_type") else "type"
        raise scaling.wrong(key, f"one of {', '.join(_ROPE_FACTORS)}: other kinds are not supported")
    if kind == "default":
        return Rope(theta=theta, share=share)
    numbers = {key: scaling.number(key) for key in _ROPE_FACTORS[kind]}
    if kind == "llama3" and numbers["high_freq_factor"] <= numbers["low_freq_factor"]:
        raise scaling.wrong("high_freq_factor", "more than low_freq_factor")
    if kind == "yarn":
        numbers |= {key: scaling.number(key) for key in _YARN_OPTIONS if merged.get(key)}
        scaling.flag("truncate", True)
    return Rope(theta=theta, scaling={**merged, **numbers, "rope_type": kind}, share=share)


def _kind(data: dict[str, Any]) -> dict[str, Any]:
    """What a section says of the kind of embedding."""
    return {key: value for key, value in data.items() if key not in ("rope_theta", "partial_rotary_factor")}


def _share(config: HfConfig, places: tuple[HfConfig, ...], default: float | None) -> float:
    """partial_rotary_factor, in the first of its places that has it."""
    found = next((one for one in places if one.has("partial_rotary_factor")), config)
    share = found.number("partial_rotary_factor", default or 1.0)
    if default is None and share != 1.0:
        raise found.wrong("partial_rotary_factor", "1: partial rotary embedding is not part of this family")
    if share > 1.0:
        raise found.wrong("partial_rotary_factor", "a number up to 1")
    return share


def dense_shape(
    config: HfConfig,
    family: str,
    *,
    qk_norm: bool = False,
    qkv_bias: bool = False,
    tied_by_default: bool = False,
    head_dim: int | None = None,
    rotary_share: float | None = None,
    windows: bool = False,
) -> ModelShape:
    """Return the shape of a Llama-like decoder from its Hugging Face config; unless told otherwise, of one like Llama.

    qk_norm: q and k have norms. qkv_bias: q, k and v have biases. tied_by_default: embeddings are tied where the config does not say.
    head_dim: given where the config's own is not it. rotary_share: of a head's dims that rotary embedding turns where the config does
    not say, for a family in which it may turn a part. windows: layers may have sliding windows, which the family reads itself.

    Raises UserError for keys missing or of wrong type, and for everything that changes what the model computes
    and is not supported here.
    """
    _refuse_other_layers(config, {"full_attention", "sliding_attention"} if windows else {"full_attention"})
    heads, hidden = config.whole("num_attention_heads"), config.whole("hidden_size")
    kv_heads = config.whole("num_key_value_heads", heads)
    if heads % kv_heads:
        raise config.wrong("num_key_value_heads", f"a divisor of num_attention_heads={heads}")
    if head_dim is None:
        if not config.has("head_dim") and hidden % heads:
            raise config.wrong("hidden_size", f"a multiple of num_attention_heads={heads}, or head_dim given")
        head_dim = config.whole("head_dim", max(hidden // heads, 1))
        if head_dim % 2:
            raise config.wrong("head_dim", f"an even number, not {head_dim}: rotary embedding turns pairs")
    shape = ModelShape(
        family=family,
        layers=config.whole("num_hidden_layers", most=MOST_LAYERS),
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
        rope=read_rope(config, rotary_share),
    )
    if rotary_share is not None and (shape.rotary_dim % 2 or not shape.rotary_dim):
        raise config.wrong("partial_rotary_factor", f"an even share of head_dim={head_dim}: pairs are turned")
    return shape


MTP_KEYS = ("num_nextn_predict_layers", "num_mtp_layers")
"""The number of layers for multi-token prediction in a config.json: the first is DeepSeek's spelling."""


def read_mtp_layers(config: HfConfig) -> int:
    """Return the number of layers for multi-token prediction; 0 where the config does not speak of them."""
    return next((config.count(key, most=MOST_LAYERS) for key in MTP_KEYS if config.has(key)), 0)


def refuse_biases(config: HfConfig, *keys: str) -> None:
    """Raise UserError when one of the keys is true: the family's table has no such biases."""
    for key in keys:
        if config.flag(key, False):
            raise config.wrong(key, "false: these biases are not supported")


def _refuse_other_layers(config: HfConfig, kinds: set[str]) -> None:
    if config.flag("use_sliding_window", False):
        raise config.wrong("use_sliding_window", "false: sliding-window attention is not supported")
    if set(config.texts("layer_types")) - kinds:
        raise config.wrong(
            "layer_types", f"{' or '.join(sorted(kinds))} in every layer: no other kind is supported"
        )
    if config.text("hidden_act", "silu") != "silu":
        raise config.wrong("hidden_act", '"silu": no other activation is supported')
    quantized = config.section("quantization_config").data
    kind = [quantized.get(key) for key in ("quant_method", "weight_block_size")]
    if quantized and (kind != ["fp8", [BLOCK, BLOCK]] or quantized.get("fmt", "e4m3") != "e4m3"):
        raise config.wrong(
            "quantization_config",
            f"none, or fp8 (e4m3) with weight_block_size [{BLOCK}, {BLOCK}]: otherwise quantized weights cannot be trained; convert "
            "them to bf16",
        )
