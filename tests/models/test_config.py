"""config.json and generation_config.json: what is not supported or not sound is refused by file and key."""

import json
from pathlib import Path

import pytest

from quintet.errors import UserError
from quintet.models import read_end_ids, read_shape
from quintet.models.rope import inverse_frequencies
from tests.models.directory import QWEN3

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
        ({"rope_scaling": LLAMA3_ROPE | {"low_freq_factor": 4}}, "expected more than low_freq_factor"),
        # Not sound.
        ({"num_hidden_layers": "two"}, 'num_hidden_layers is "two"; expected a whole number greater than 0'),
        ({"num_hidden_layers": True}, "num_hidden_layers is true"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0; expected a whole number"),
        ({"num_key_value_heads": 0}, "num_key_value_heads is 0"),
        ({"hidden_size": 64.0}, "hidden_size is 64.0"),
        ({"vocab_size": None}, "key vocab_size is missing"),
        ({"head_dim": None, "hidden_size": 60}, "expected a multiple of num_attention_heads=8"),
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


@pytest.mark.parametrize(
    ("content", "said"),
    [(b"\xff\xfe{", "not UTF-8"), (b"[]", "expected a JSON object"), (b"{", "line 1: not valid JSON")],
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
