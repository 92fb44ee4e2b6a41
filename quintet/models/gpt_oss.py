"""gpt-oss (https://arxiv.org/abs/2508.10925): attention with sinks and, in some layers, a sliding window, and experts with
biases and a clamped activation, all of a layer in one tensor a matrix."""

from __future__ import annotations

from dataclasses import replace

from quintet.models.dense import dense_shape
from quintet.models.family import Family, register
from quintet.models.hf_config import HfConfig
from quintet.models.shape import Glu, ModelShape, MoeShape
from quintet.models.table import Names, StackNames

_DEFAULT_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
"""What transformers takes where config.json is silent."""


@register
class GptOss(Family):
    name = "gpt_oss"
    architectures = ("GptOssForCausalLM",)
    names = Names(router="router", stack=StackNames(transposed=True, interleaved=True))
    defaults = {
        "num_key_value_heads": 8,
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150000.0,
        "sliding_window": 128,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
    }

    def shape(self, config: HfConfig) -> ModelShape:
        _refuse_quantized(config)
        if not config.flag("attention_bias", True):
            raise config.wrong("attention_bias", "true: gpt-oss without these biases is not supported")
        if config.flag("tie_word_embeddings", False):
            raise config.wrong(
                "tie_word_embeddings", "false: no gpt-oss ties them, and none that does is supported"
            )
        if not (config.has("rope_parameters") or config.has("rope_scaling")):
            config = HfConfig(config.data | {"rope_parameters": _DEFAULT_ROPE}, config.where)
        shape = dense_shape(config, self.name, qkv_bias=True, windows=True)
        experts, top_k = config.whole("num_local_experts"), config.whole("num_experts_per_tok")
        if not 1 < top_k <= experts:
            raise config.wrong("num_experts_per_tok", f"2 to num_local_experts={experts}")
        moe = MoeShape(
            experts=experts,
            top_k=top_k,
            ffn_hidden_size=shape.ffn_hidden_size,
            biases=True,
            glu=Glu(config.number("swiglu_alpha"), offset=1.0, limit=config.number("swiglu_limit")),
        )
        return replace(
            shape,
            moe=moe,
            proj_bias=True,
            sinks=True,
            window=config.whole("sliding_window"),
            window_layers=_window_layers(config, shape.layers),
        )


def _window_layers(config: HfConfig, layers: int) -> tuple[int, ...]:
    kinds = config.texts("layer_types") or [
        ("sliding_attention", "full_attention")[i % 2] for i in range(layers)
    ]
    if len(kinds) != layers:
        raise config.wrong("layer_types", f"a kind for each of the num_hidden_layers={layers}")
    return tuple(i for i, kind in enumerate(kinds) if kind == "sliding_attention")


def _refuse_quantized(config: HfConfig) -> None:
    if config.section("quantization_config").data:
        raise config.wrong(
            "quantization_config",
            "none: quantized weights cannot be trained. Dequantize them once, with transformers' "
            'AutoModelForCausalLM.from_pretrained(path, dtype="bfloat16", quantization_config='
            "Mxfp4Config(dequantize=True)).save_pretrained(new_path), copy the tokenizer's files beside them, and name "
            "the new directory",
        )
