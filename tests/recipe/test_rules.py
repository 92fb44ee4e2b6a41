"""Each rule across fields: a recipe that breaks it, and what the user is told."""

import ast
import json
from pathlib import Path

import pytest

from quintet.recipe.features import NOT_AVAILABLE
from quintet.recipe.keys import all_keys
from quintet.recipe.megatron import REFUSED, SET_BY_ENGINE, transformer_config_fields
from quintet.recipe.rules import RULES
from tests.models.directory import QWEN3, write_model


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A Hugging Face directory as far as the rules look."""
    directory = write_model(tmp_path / "model")
    (directory / "tokenizer.json").touch()
    return directory


# rule → overrides of a valid recipe that break it → parts of the message
BROKEN = [
    (
        "only_available_features",
        ["layout.cp=2", "cluster.ranks=2"],
        ["context parallelism is not available", "layout.cp=1"],
    ),
    ("only_available_features", ["layout.ep=2"], ["expert parallelism is not available"]),
    ("only_available_features", ["layout.etp=1"], ["expert tensor parallelism is not available"]),
    ("only_available_features", ["layout.vpp=2", "layout.pp=2", "cluster.ranks=2"], ["interleaved pipeline"]),
    ("only_available_features", ["rollout.layout.ep=2"], ["expert parallelism in the rollout"]),
    (
        "only_available_features",
        ["rollout.backend=vllm"],
        ["vLLM rollout is not available", "rollout.backend=native"],
    ),
    ("only_available_features", ["rollout.backend=sglang"], ["SGLang rollout is not available"]),
    (
        "only_available_features",
        ["engine.megatron.fp8=hybrid"],
        ["FP8 training is not available", "model.dtype=bf16"],
    ),
    ("megatron_options_are_free", ["engine.megatron.sequence_parallel=true"], ["decided by layout.sp"]),
    ("megatron_options_are_free", ["engine.megatron.attention_dropout=0.1"], ["trains without dropout"]),
    ("megatron_options_are_free", ["engine.megatron.num_moe_experts=8"], ["experts cannot be trained yet"]),
    (
        "megatron_options_are_free",
        ["engine.megatron.recompute_granularty=full"],
        ["has no such field; did you mean recompute_granularity?"],
    ),
    (
        "megatron_options_are_free",
        ["engine.megatron.recompute_granularity=full", "cluster.device=cpu"],
        ["recomputes activations on GPUs only"],
    ),
    ("backend_options_are_read", ["rollout.vllm.enforce_eager=true"], ["rollout.vllm has options", "native"]),
    ("backend_options_are_read", ["rollout.sglang.x=1"], ["rollout.sglang has options"]),
    ("one_model", ["model.build=null"], ["no model", "model.path", "model.build"]),
    ("one_model", ["model.path={model}"], ["both model.path and model.build"]),
    (
        "built_model_is_sound",
        ["model.build.heads=4", "model.build.kv_heads=3"],
        ["heads=4 is not divisible by"],
    ),
    ("built_model_is_sound", ["model.build.head_dim=7"], ["head_dim=7 is odd"]),
    ("chat_template_exists", ["model.chat_template=chat.jinja"], ["there is no file chat.jinja"]),
    (
        "ranks_divide",
        ["cluster.ranks=3", "layout.tp=2"],
        ["cluster.ranks=3 is not divisible", "2 × 1 × 1 = 2", "2 or 4"],
    ),
    ("ranks_divide", ["cluster.ranks=2", "rollout.layout.tp=4"], ["rollout.layout.tp × pp", "use 4 ranks"]),
    ("nodes_divide", ["cluster.ranks=3", "cluster.ranks_per_node=2"], ["cluster.ranks_per_node=2"]),
    ("sp_needs_tp", ["layout.sp=true"], ["layout.sp=true needs layout.tp > 1"]),
    ("vpp_needs_pp", ["layout.vpp=2"], ["layout.vpp=2 needs layout.pp > 1"]),
    (
        "model_divides",
        ["layout.tp=4", "cluster.ranks=4"],
        ["layout.tp=4 does not divide the model's 2 KV heads"],
    ),
    ("model_divides", ["layout.tp=8", "cluster.ranks=8"], ["does not divide the model's 4 attention heads"]),
    (
        "model_divides",
        ["layout.tp=2", "cluster.ranks=2", "model.build.ffn_hidden_size=33"],
        ["33 units of its MLP"],
    ),
    (
        "model_divides",
        ["layout.pp=3", "cluster.ranks=3"],
        ["layout.pp=3 does not divide the model's 4 layers"],
    ),
    ("model_divides", ["rollout.layout.tp=4", "cluster.ranks=4"], ["rollout.layout.tp=4 does not divide"]),
    (
        "samples_fit_a_microbatch",
        ["engine.tokens_per_microbatch_per_rank=256"],
        ["= 1024 + 512 = 1536", "256", "must fit"],
    ),
    (
        # 1537 fit, 1536 of them in whole multiples of 2; a sample of 1537 is padded to 1538.
        "samples_fit_a_microbatch",
        [
            "engine.tokens_per_microbatch_per_rank=1537",
            "rollout.max_response_tokens=513",
            "layout.tp=2",
            "layout.sp=true",
            "cluster.ranks=2",
        ],
        ["= 1537 is 1538 with padding to a multiple of 2", "=1537 (1536 in whole multiples of 2)"],
    ),
    ("samples_fit_a_microbatch", ["model.build.max_position_embeddings=128"], ["128 positions"]),
    ("groups_have_a_contrast", ["rollout.samples_per_prompt=1"], ["at least 2"]),
    ("groups_have_a_contrast", ["rollout.temperature=0"], ["grpo learns nothing"]),
    (
        "batches_divide",
        ["train.mini_batches_per_step=3"],
        ["prompts_per_step=64 is not divisible by", "=3", "use 63 or 66 prompts"],
    ),
    # 512 samples divide by 512, but a mini-batch takes whole prompts.
    ("batches_divide", ["train.mini_batches_per_step=512"], ["64 is not divisible", "use 512 prompts"]),
    (
        "batches_divide",
        ["cluster.ranks=16", "train.prompts_per_step=1"],
        ["8 samples is smaller than the 16"],
    ),
    ("batches_divide", ["cluster.ranks=2", "sft.samples_per_step=1"], ["sft.samples_per_step=1 is smaller"]),
    ("schedules_are_whole", ["optimizer.decay_steps=5"], ["decay_steps=5 is not read", "constant"]),
    ("schedules_are_whole", ["optimizer.min_lr_ratio=0.1"], ["min_lr_ratio=0.1 is not read"]),
    (
        "schedules_are_whole",
        ["sft.optimizer.schedule=wsd"],
        ["sft.optimizer.schedule=wsd needs sft.optimizer.decay_steps"],
    ),
    (
        "schedules_are_whole",
        ["optimizer.schedule=cosine", "optimizer.warmup_steps=101"],
        ["optimizer.warmup_steps=101 is more than the run's 100 optimizer steps"],
    ),
    (
        "schedules_are_whole",
        ["optimizer.schedule=wsd", "optimizer.warmup_steps=60", "optimizer.decay_steps=50"],
        ["warmup_steps + decay_steps = 60 + 50 = 110 is more than the run's 100"],
    ),
    (
        "schedules_are_whole",
        ["optimizer.warmup_steps=201", "train.mini_batches_per_step=2"],
        ["optimizer.warmup_steps=201 is more than the run's 200"],
    ),
    (
        "kl_is_weighted",
        ["algorithm.kl_estimator=k1"],
        ["kl_estimator=k1 is not read while algorithm.kl_coef=0"],
    ),
    (
        "columns_are_read",
        ["data.prompt_key=question"],
        ["data.prompt_key=question is not read by data.task=addition"],
    ),
    ("columns_are_read", ["data.response_key=solution"], ["data.response_key=solution is not read"]),
    (
        "columns_are_read",
        ["data.task=gsm8k", "data.response_key=solution"],
        ["data.response_key=solution is not read by data.task=gsm8k"],
    ),
    ("data_is_named", ["data.train_path=x.jsonl"], ["data.task=addition makes its own problems"]),
    (
        "data_is_named",
        ["data.task=jsonl"],
        ["data.train_path is not set", "data.eval_path is not set", "train.eval_prompts=0"],
    ),
    (
        "data_is_named",
        ["data.task=gsm8k", "data.train_path=no/x.jsonl"],
        ["there is no file no/x.jsonl (looked in "],
    ),
    (
        "task_options_are_read",
        ["data.task=jsonl", "data.task_options.digits=3"],
        ["data.task=jsonl reads none"],
    ),
    ("system_prompt_needs_chat", ["data.chat=false", "data.system_prompt=Hi"], ["needs data.chat=true"]),
    ("reward_is_there", ["reward.function=mth"], ["reward.function=mth: expected math"]),
    ("reward_is_there", ["reward.function=my/reward.py:score"], ["there is no file my/reward.py"]),
    ("run_name_is_a_name", ["run.name=a/b"], ["run.name='a/b'"]),
    (
        "evaluations_have_prompts",
        ["train.eval_every_steps=5", "train.eval_prompts=0"],
        ["needs train.eval_prompts > 0"],
    ),
]


@pytest.mark.parametrize(
    ("rule", "overrides", "said"), BROKEN, ids=[f"{row[0]}:{row[1][0]}" for row in BROKEN]
)
def test_a_broken_rule_is_told_with_its_keys(
    refuse, model, rule: str, overrides: list[str], said: list[str]
) -> None:
    message = refuse(*(one.format(model=model) for one in overrides))
    for part in said:
        assert part in message
    assert 'override "' in message


@pytest.mark.parametrize(
    "overrides",
    [
        ["cluster.ranks=2"],
        ["cluster.ranks=2", "layout.tp=2", "layout.sp=true", "rollout.layout.tp=1"],
        ["cluster.ranks=4", "layout.tp=2", "layout.pp=2", "rollout.layout.pp=2"],
        ["optimizer.schedule=cosine", "optimizer.warmup_steps=10", "optimizer.min_lr_ratio=0.1"],
        ["optimizer.schedule=wsd", "optimizer.decay_steps=20"],
        ["optimizer.warmup_steps=100"],
        ["train.mini_batches_per_step=4"],
        ["algorithm.kl_estimator=k1", "algorithm.kl_coef=0.1"],
        [
            "algorithm.kl_estimator=k3",
            "data.prompt_key=prompt",
        ],  # the defaults, as a resolved recipe has them
        ["engine.tokens_per_microbatch_per_rank=1537", "rollout.max_response_tokens=513"],
        ["engine.megatron.recompute_granularity=full", "engine.megatron.recompute_num_layers=1"],
        ["reward.function=my_package.rewards:score"],
        ["model.chat_template='{{ messages }}'"],
        ["data.task_options.digits=3"],
        ["data.task=gsm8k", "data.train_path=openai/gsm8k:main:train", "data.eval_path=openai/gsm8k"],
    ],
)
def test_good_recipes_pass(load, overrides: list[str]) -> None:
    load(*overrides)


def test_a_command_is_asked_only_for_what_it_reads(load, refuse) -> None:
    assert "needs an sft section" in refuse(command="sft")
    load("sft={}", "rollout.samples_per_prompt=1", command="sft")
    load("data.task=jsonl", "rollout.temperature=0", command="generate")
    assert "data.eval_path is not set" in refuse("data.task=jsonl", command="eval")


def test_a_model_directory_is_looked_at_before_anything_starts(load, refuse, model: Path) -> None:
    named = ["model.build=null", f"model.path={model}"]
    load(*named, "cluster.ranks=2", "layout.tp=2")
    assert "does not divide the model's 2 KV heads" in refuse(*named, "cluster.ranks=4", "layout.tp=4")
    assert "does not divide the model's 6 layers" in refuse(*named, "cluster.ranks=4", "layout.pp=4")
    assert "2048 positions" in refuse(*named, "rollout.max_response_tokens=2000")
    (model / "tokenizer.json").unlink()
    assert "has no tokenizer" in refuse(*named)
    (model / "tokenizer.json").touch()
    load(*named, "rollout.stop_token_ids=[0, 99]")
    assert "100 is never generated, the model has token ids 0 to 99" in refuse(
        *named, "rollout.stop_token_ids=[99, 100]"
    )
    (model / "config.json").write_text(json.dumps(QWEN3 | {"intermediate_size": 80}))
    assert "has shape (96, 64), config.json implies (80, 64)" in refuse(*named)
    (model / "config.json").write_text(json.dumps(QWEN3))
    (model / "model.safetensors").unlink()
    assert "has no *.safetensors" in refuse(*named)
    (model / "config.json").write_text(json.dumps(QWEN3 | {"architectures": ["MambaForCausalLM"]}))
    assert "MambaForCausalLM is not supported" in refuse(*named)
    (model / "config.json").write_text("{")
    assert "not valid JSON" in refuse(*named)
    (model / "config.json").unlink()
    assert "config.json does not exist" in refuse(*named)


def test_a_missing_tracker_names_the_extra(refuse, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install 'quintet[wandb]'" in refuse("run.trackers=[wandb]")


def test_every_rule_has_a_sentence_and_a_test() -> None:
    tested_below = {"weights_are_there", "stop_tokens_exist", "trackers_are_installed", "sft_has_its_section"}
    assert {one.__name__ for one in RULES} == {row[0] for row in BROKEN} | tested_below
    assert all((one.__doc__ or "").endswith(".") for one in RULES)


def test_features_name_their_keys() -> None:
    named = {missing.feature.key for missing in NOT_AVAILABLE}
    assert {key for key in named if not key.startswith("engine.megatron.")} <= set(all_keys())


def test_engine_megatron_cannot_set_what_the_engine_sets() -> None:
    """Read from the source: the engine's module takes seconds to import."""
    source = Path(__file__).parents[2] / "quintet" / "engine" / "model.py"
    (function,) = [
        node
        for node in ast.parse(source.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name == "transformer_config"
    ]
    (fields,) = [
        node.value
        for node in ast.walk(function)
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "fields"
    ]
    assert isinstance(fields, ast.Dict)
    assert {ast.literal_eval(key) for key in fields.keys if key is not None} == set(SET_BY_ENGINE)
    assert set(REFUSED) <= transformer_config_fields()


@pytest.mark.parametrize("override", ["rollout.stop=['']", "rollout.stop=[a, '']"])
def test_a_stop_text_is_not_empty(refuse, override: str) -> None:
    assert 'is ""; expected a list, each item text of at least 1 character' in refuse(override)


def test_stop_token_ids_are_not_negative(refuse) -> None:
    assert "each item a whole number at least 0" in refuse("rollout.stop_token_ids=[-1]")
