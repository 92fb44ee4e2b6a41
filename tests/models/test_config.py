"""config.json and generation_config.json: what is not supported or not sound is refused by file and key."""

import json
from pathlib import Path

import pytest

from quintet.errors import UserError
from quintet.models import family_of, read_end_ids, read_shape
from quintet.models.rope import inverse_frequencies, rotary_scale, softmax_scale
from tests.models.directory import GPT_OSS, QWEN3

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def without(mapping: dict, key: str) -> dict:
    return {name: value for name, value in mapping.items() if name != key}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        # Not supported: each changes what the model computes.
        ({"hidden_act": "gelu"}, 'hidden_act is "gelu"; expected "silu"'),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5; expected 1"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "rope_parameters.partial_rotary_factor is 0.5"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "expected full_attention in every layer"),
        ({"use_sliding_window": True}, "use_sliding_window is true; expected false"),
        ({"attention_bias": True}, "attention_bias is true; expected false"),
        (
            {"rope_scaling": {"type": "dynamic"}},
            'rope_scaling.type is "dynamic"; expected one of default, linear',
        ),
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3; expected a divisor of num_attention_heads=8"),
        ({"head_dim": 7}, "head_dim is 7; expected an even number"),
        *(
            ({"rope_scaling": without(LLAMA3_ROPE, key)}, f"key rope_scaling.{key} is missing")
            for key in without(LLAMA3_ROPE, "rope_type")
        ),
        (
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}},
            "rope_parameters.factor is missing",
        ),
        (
            {"rope_scaling": {"type": "yarn", "factor": 4.0}, "rope_parameters": {"rope_type": "default"}},
            "expected none beside rope_parameters, which says otherwise",
        ),
        ({"rope_scaling": LLAMA3_ROPE | {"low_freq_factor": 4}}, "expected more than low_freq_factor"),
        # Not sound.
        ({"num_hidden_layers": "two"}, 'num_hidden_layers is "two"; expected a whole number greater than 0'),
        ({"num_hidden_layers": True}, "num_hidden_layers is true"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0; expected a whole number"),
        ({"num_key_value_heads": 0}, "num_key_value_heads is 0"),
        ({"hidden_size": 64.0}, "hidden_size is 64.0"),
        ({"vocab_size": None}, "key vocab_size is missing"),
        (
            {"architectures": ["Qwen2ForCausalLM"], "head_dim": None, "hidden_size": 60},
            "expected a multiple of num_attention_heads=8",
        ),
        ({"rms_norm_eps": "1e-6"}, 'rms_norm_eps is "1e-6"; expected a number greater than 0'),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is NaN"),
        ({"rope_theta": []}, "rope_theta is []"),
        ({"tie_word_embeddings": "no"}, "expected true or false"),
        ({"rope_scaling": "yarn"}, 'rope_scaling is "yarn"; expected an object'),
        ({"rope_scaling": {"rope_type": 3}}, "rope_scaling.rope_type is 3; expected text"),
        ({"architectures": "Qwen3ForCausalLM"}, "expected a list of text"),
        ({"architectures": None}, "(none given) is not supported"),
        ({"layer_types": "full_attention"}, "expected a list of text"),
    ],
)
def test_a_config_that_cannot_be_trained_is_refused_by_file_and_key(
    tmp_path: Path, change: dict, said: str
) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(QWEN3 | change))
    with pytest.raises(UserError) as caught:
        read_shape(tmp_path)
    assert said in str(caught.value)
    assert str(file) in str(caught.value)


EXPERTS = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}
LATENT = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "num_key_value_heads": 8,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "first_k_dense_replace": 1,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 16,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
}

MIXTRAL = {"architectures": ["MixtralForCausalLM"], "num_local_experts": 8, "num_experts_per_tok": 2}
GLM = {
    "architectures": ["Glm4MoeForCausalLM"],
    "first_k_dense_replace": 1,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 16,
    "n_shared_experts": 1,
}


@pytest.mark.parametrize(
    ("base", "change", "said"),
    [
        (MIXTRAL, {"num_local_experts": None}, "key num_local_experts is missing"),
        (MIXTRAL, {"num_experts_per_tok": 9}, "num_experts_per_tok is 9; expected 2 to num_local_experts=8"),
        (MIXTRAL, {"sliding_window": 4096}, "sliding_window is 4096; expected null"),
        (MIXTRAL, {"router_jitter_noise": 0.1}, "router_jitter_noise is 0.1; expected 0"),
        (GLM, {"partial_rotary_factor": 1.5}, "partial_rotary_factor is 1.5; expected a number up to 1"),
        (
            GLM,
            {"partial_rotary_factor": 0.4},
            "partial_rotary_factor is 0.4; expected an even share of head_dim=8",
        ),
        (
            GLM,
            {"rope_parameters": {"partial_rotary_factor": -1}},
            "rope_parameters.partial_rotary_factor is -1",
        ),
        (GLM, {"use_qk_norm": "yes"}, 'use_qk_norm is "yes"; expected true or false'),
        (GLM, {"num_nextn_predict_layers": -1}, "num_nextn_predict_layers is -1; expected a whole number"),
        (EXPERTS, {"num_experts": None}, "key num_experts is missing"),
        (EXPERTS, {"num_experts_per_tok": 1}, "num_experts_per_tok is 1; expected 2 to num_experts=8"),
        (EXPERTS, {"num_experts_per_tok": 9}, "num_experts_per_tok is 9; expected 2 to num_experts=8"),
        (EXPERTS, {"decoder_sparse_step": 7}, "expected a value that leaves a layer with experts"),
        (EXPERTS, {"mlp_only_layers": [-1]}, "mlp_only_layers is [-1]; expected a list of whole numbers"),
        (EXPERTS, {"attention_bias": True}, "attention_bias is true"),
        (LATENT, {"kv_lora_rank": None}, "key kv_lora_rank is missing"),
        (LATENT, {"qk_rope_head_dim": 5}, "qk_rope_head_dim is 5; expected an even number"),
        (LATENT, {"num_key_value_heads": 2}, "num_key_value_heads is 2; expected num_attention_heads=8"),
        (LATENT, {"scoring_func": "softmax"}, 'scoring_func is "softmax"; expected "sigmoid"'),
        (LATENT, {"topk_method": "greedy"}, 'topk_method is "greedy"; expected "noaux_tc"'),
        (LATENT, {"moe_layer_freq": 2}, "moe_layer_freq is 2; expected 1"),
        (LATENT, {"norm_topk_prob": False}, "norm_topk_prob is false; expected true"),
        (LATENT, {"n_group": 3}, "expected groups with room for 4 of 16 experts in n_group=3"),
        (
            LATENT,
            {"topk_group": 1},
            "topk_group is 1; expected num_experts_per_tok=4 divided by 2, or n_group",
        ),
        (
            LATENT,
            {"first_k_dense_replace": -1},
            "first_k_dense_replace is -1; expected a whole number, 0 or more",
        ),
        (LATENT, {"quantization_config": {"quant_method": "fp8"}}, "quantized weights cannot be trained"),
        (
            LATENT,
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 128]}},
            "expected none, or fp8 (e4m3) with weight_block_size [128, 128]",
        ),
    ],
)
def test_experts_and_latents_that_cannot_be_trained_are_refused(
    tmp_path: Path, base: dict, change: dict, said: str
) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(QWEN3 | base))
    assert read_shape(tmp_path).moe is not None
    file.write_text(json.dumps(QWEN3 | base | change))
    with pytest.raises(UserError) as caught:
        read_shape(tmp_path)
    assert said in str(caught.value)
    assert str(file) in str(caught.value)


def test_which_layers_have_experts(tmp_path: Path) -> None:
    file = tmp_path / "config.json"

    def dense(base: dict, **change: object) -> list[int]:
        file.write_text(json.dumps(QWEN3 | base | change))
        shape = read_shape(tmp_path)
        return [i for i in range(shape.layers) if not shape.is_moe(i)]

    assert dense(EXPERTS) == []
    assert dense(EXPERTS, decoder_sparse_step=2, mlp_only_layers=[1]) == [0, 1, 2, 4]
    assert dense(EXPERTS, num_experts=None, num_local_experts=8) == []  # as transformers 5 writes it
    assert dense(LATENT, first_k_dense_replace=2) == [0, 1]
    assert dense(LATENT, first_k_dense_replace=6) == [0, 1, 2, 3, 4, 5]


def test_a_part_of_each_head_is_turned(tmp_path: Path) -> None:
    file = tmp_path / "config.json"

    def turned(**change: object) -> int:
        file.write_text(json.dumps(QWEN3 | GLM | change))
        return read_shape(tmp_path).rotary_dim

    assert turned() == 4  # half, where the config does not say
    assert turned(partial_rotary_factor=0.25) == 2
    assert turned(partial_rotary_factor=0.25, rope_parameters={"partial_rotary_factor": 1.0}) == 8


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64},
        LLAMA3_ROPE,
    ],
    ids=lambda scaling: scaling["rope_type"],
)
def test_scaling_of_a_part_is_that_of_transformers(tmp_path: Path, scaling: dict) -> None:
    from transformers import Glm4MoeConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = {"rope_theta": 5e5, "partial_rotary_factor": 0.5, **scaling}
    data = QWEN3 | GLM | {"rope_theta": None, "rope_parameters": rope, "head_dim": 32}
    (tmp_path / "config.json").write_text(json.dumps(data))
    shape = read_shape(tmp_path)
    frequencies, scale = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](Glm4MoeConfig(**data), "cpu")
    assert inverse_frequencies(shape.rope, shape.rotary_dim) == pytest.approx(frequencies.tolist(), rel=1e-6)
    assert rotary_scale(shape.rope) == pytest.approx(scale)


YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"mscale": 0.7, "mscale_all_dim": 1.2},
        {"mscale": 1.0, "mscale_all_dim": 0},
        {"attention_factor": 1.3},
        {"beta_fast": 4.0, "beta_slow": 2.0, "truncate": False},
    ],
    ids=str,
)
def test_yarn_is_that_of_transformers(tmp_path: Path, options: dict) -> None:
    from transformers import Qwen3Config
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    data = QWEN3 | {
        "rope_theta": None,
        "rope_parameters": YARN | {"rope_theta": 5e5} | options,
        "head_dim": 32,
    }
    (tmp_path / "config.json").write_text(json.dumps(data))
    rope = read_shape(tmp_path).rope
    frequencies, scale = ROPE_INIT_FUNCTIONS["yarn"](Qwen3Config(**data), "cpu")
    assert inverse_frequencies(rope, 32) == pytest.approx(frequencies.tolist(), rel=1e-6)
    assert rotary_scale(rope) == pytest.approx(scale)


@pytest.mark.parametrize("all_dim", [0, 0.707])
def test_softmax_scale_of_latent_attention_is_that_of_transformers(tmp_path: Path, all_dim: float) -> None:
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import yarn_apply_mscale

    rope = YARN | {"mscale": 0.707, "mscale_all_dim": all_dim}
    (tmp_path / "config.json").write_text(json.dumps(QWEN3 | LATENT | {"rope_scaling": rope}))
    assert softmax_scale(read_shape(tmp_path)) == pytest.approx(yarn_apply_mscale(rope, 12**-0.5))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"\xff\xfe{", "not UTF-8"),
        (b"[]", "expected a JSON object"),
        (b"{", r"line 1: not valid JSON .*; copy it anew"),
    ],
)
def test_a_file_that_is_no_json_object_is_named(tmp_path: Path, content: bytes, said: str) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(UserError, match=said):
        read_shape(tmp_path)
    (tmp_path / "generation_config.json").write_bytes(content)
    with pytest.raises(UserError, match=r"generation_config\.json"):
        read_end_ids(tmp_path)


def test_both_spellings_of_rope_are_one(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    written = []
    for change in (
        {"rope_theta": 5e5, "rope_scaling": LLAMA3_ROPE},
        {"rope_theta": None, "rope_parameters": LLAMA3_ROPE | {"rope_theta": 5e5}},
    ):
        file.write_text(json.dumps(QWEN3 | change | {"layer_types": ["full_attention"] * 6}))
        written.append(inverse_frequencies(read_shape(tmp_path).rope, 8))
    assert written[0] == written[1]
    assert written[0][0] == 1.0  # fast waves are kept
    assert written[0][-1] == pytest.approx(5e5**-0.75 / 8)  # slow ones stretched


@pytest.mark.parametrize(("written", "ids"), [(7, [7]), ([7, 9], [7, 9]), (None, [])])
def test_end_ids_are_one_or_many(tmp_path: Path, written: object, ids: list[int]) -> None:
    assert read_end_ids(tmp_path) == []
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": written}))
    assert read_end_ids(tmp_path) == ids
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ["<eos>"]}))
    with pytest.raises(UserError, match=r"eos_token_id is .*expected a token id or a list"):
        read_end_ids(tmp_path)


def test_gpt_oss_takes_transformers_defaults() -> None:
    shape = family_of(GPT_OSS).shape_of(GPT_OSS)
    assert [shape.window_of(i) for i in range(3)] == [128, None, 128]
    assert (shape.head_dim, shape.norm_eps, shape.rope.theta) == (64, 1e-5, 150000.0)
    assert shape.rope.scaling is not None
    assert shape.rope.scaling["truncate"] is False
    assert shape.moe is not None
    assert (shape.moe.glu.alpha, shape.moe.glu.limit) == (1.702, 7.0)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"quantization_config": {"quant_method": "mxfp4"}}, r"Mxfp4Config\(dequantize=True\)"),
        ({"attention_bias": False}, "attention_bias is false; expected true"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings is true"),
        ({"layer_types": ["full_attention"]}, "num_hidden_layers=3"),
        ({"layer_types": ["chunked_attention"] * 3}, "full_attention or sliding_attention"),
        ({"num_experts_per_tok": 1}, "2 to num_local_experts=4"),
    ],
)
def test_gpt_oss_refuses(change, said) -> None:
    with pytest.raises(UserError, match=said):
        family_of(GPT_OSS | change).shape_of(GPT_OSS | change)
