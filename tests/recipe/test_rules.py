"""Each rule across fields: a recipe that breaks it, and what the user is told."""

import importlib.util
import json
from pathlib import Path

import pytest

from quintet.recipe.rules import RULES
from tests.models.directory import QWEN3, write_model
from tests.recipe.broken_engine import BROKEN_ENGINE, OWN, named
from tests.recipe.broken_fp8 import BROKEN_FP8, ON_GPU, VLLM, WIDE
from tests.recipe.broken_rollout import BROKEN_ROLLOUT, MIMO
from tests.recipe.broken_vllm import BROKEN_VLLM


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A Hugging Face directory as far as the rules look."""
    directory = write_model(tmp_path / "model")
    (directory / "tokenizer.json").touch()
    return directory


# rule → overrides of a valid recipe that break it → parts of the message
BROKEN = [
    ("backend_options_are_read", ["rollout.vllm.enforce_eager=true"], ["rollout.vllm has options", "native"]),
    ("backend_options_are_read", ["rollout.sglang.x=1"], ["rollout.sglang has options"]),
    (
        "vllm_can_do_it",
        ["rollout.backend=vllm", "rollout.temperature=0.7", "rollout.top_p=0.9"],
        ["rollout.top_p=0.9 with rollout.temperature=0.7", "use rollout.temperature=1"],
    ),
    (
        "sglang_can_do_it",
        ["rollout.backend=sglang", "rollout.sglang.tp_size=2"],
        ["rollout.sglang.tp_size: it is rollout.layout.tp; remove it"],
    ),
    (
        "sglang_can_do_it",
        [
            *("@moe", "rollout.backend=sglang", "rollout.return_routes=true"),
            "rollout.sglang.speculative_algorithm=NGRAM",
        ],
        ["speculative_algorithm=NGRAM with rollout.return_routes=true", "use one of them"],
    ),
    (
        "routes_can_be_replayed",
        [
            *("@moe", "rollout.backend=sglang", "cluster.device=cuda", "rollout.return_routes=true"),
            "engine.replay_routes=rollout",
        ],
        ["engine.replay_routes=rollout with rollout.backend=sglang", "or engine.replay_routes=old"],
    ),
    (
        "sglang_can_do_it",
        ["cluster.device=cpu", "rollout.backend=sglang"],
        ["needs NVIDIA GPUs", "use rollout.backend=native"],
    ),
    ("one_model", ["model.build=null"], ["no model", "model.path", "model.build"]),
    ("one_model", ["model.path={model}"], ["both model.path and model.build"]),
    (
        "code_comes_with_a_directory",
        ["model.trust_remote_code=true"],
        ["a model that is built brings no code"],
    ),
    (
        "built_model_is_sound",
        ["model.build.heads=4", "model.build.kv_heads=3"],
        ["heads=4 is not divisible by"],
    ),
    ("built_model_is_sound", ["model.build.head_dim=7"], ["head_dim=7 is odd"]),
    ("chat_template_exists", ["model.chat_template=chat.jinja"], ["there is no file chat.jinja"]),
    *(
        ("keys_are_read", [one], [one.partition("=")[0], of])
        for one, of in (
            ("algorithm.gamma=0.9", "is not read by algorithm.name=grpo, but by ppo"),
            ("algorithm.kl_in=reward", "is not read"),
            ("algorithm.max_refills=9", "is not read by algorithm.name=grpo, but by dapo"),
        )
    ),
    *(
        ("roles_are_there", [one], [one.partition("=")[0], of])
        for one, of in (
            ("critic.warmup_steps=2", "algorithm.name=grpo has no critic"),
            ("critic.layout={tp: 2}", "algorithm.name=grpo has no critic"),
            ("reference.layout={tp: 2}", "not read while algorithm.kl_coef=0"),
        )
    ),
    (
        "keys_are_read",
        ["algorithm.name=ppo", "algorithm.normalize_by_std=false"],
        ["algorithm.normalize_by_std=false is not read by algorithm.name=ppo"],
    ),
    (
        "roles_layouts_are_layouts",
        ["algorithm.name=ppo", "cluster.ranks=2", "critic.layout={tp: 4}"],
        ["cluster.ranks=2 is not divisible by critic.layout.tp × pp × cp = 4 × 1 × 1 = 4"],
    ),
    (
        "roles_layouts_are_layouts",
        ["algorithm.name=ppo", "critic.layout={sp: true}"],
        ["critic.layout.sp=true needs critic.layout.tp > 1"],
    ),
    (
        "roles_layouts_are_layouts",
        ["algorithm.kl_coef=0.1", "lora.rank=4", "cluster.ranks=2", "reference.layout={tp: 2}"],
        ["reference.layout does not go with lora"],
    ),
    (
        "roles_layouts_are_layouts",
        [
            *("algorithm.name=ppo", "cluster.ranks=2", "layout.tp=2", "critic.layout={tp: 1}"),
            *("train.prompts_per_step=1", "rollout.samples_per_prompt=1"),
        ],
        ["a mini-batch of 1 samples is smaller than the 2 data-parallel ranks of critic.layout"],
    ),
    (
        "groups_have_a_contrast",
        ["algorithm.name=ppo", "rollout.temperature=0"],
        ["greedy samples are not drawn from the policy that ppo trains"],
    ),
    (
        "keys_are_read",
        ["algorithm.name=ppo", "algorithm.kl_in=reward"],
        ["algorithm.kl_in=reward is not read while algorithm.kl_coef=0"],
    ),
    (
        "patterns_match",
        ["algorithm.name=ppo", "optimizer.lr_multipliers={lm_head.weight: 2}"],
        ["critic.optimizer.lr_multipliers", "null takes those of optimizer"],
    ),
    ("overlong_fits", ["reward.overlong_penalty=2"], ["not read while reward.overlong_tokens is null"]),
    (
        "overlong_fits",
        ["reward.overlong_tokens=100000"],
        ["reward.overlong_tokens=100000 is more than rollout.max_response_tokens"],
    ),
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
    (
        # Two ranks share a micro-batch of 2 × 766; the sample of 1533 is padded to whole chunks of both.
        "samples_fit_a_microbatch",
        [
            "engine.tokens_per_microbatch_per_rank=766",
            "rollout.max_response_tokens=509",
            "layout.cp=2",
            "cluster.ranks=2",
            OWN,
        ],
        [
            "= 1533 is 1536 with padding to a multiple of 4",
            "=766 × layout.cp=2",
            "set engine.tokens_per_microbatch_per_rank=768, or lower the lengths",
        ],
    ),
    ("samples_fit_a_microbatch", ["model.build.max_position_embeddings=128"], ["128 positions"]),
    ("resume_names_something", ["resume=runs/gone"], ["resume=runs/gone: there is no such directory"]),
    (
        "keys_are_read",
        ["checkpoint.async_save=false"],
        ["checkpoint.async_save=false is not read while checkpoint.every_steps=0"],
    ),
    ("keys_are_read", ["checkpoint.on_error=continue"], ["checkpoint.on_error=continue is not"]),
    ("groups_have_a_contrast", ["rollout.samples_per_prompt=1"], ["at least 2"]),
    ("groups_have_a_contrast", ["rollout.temperature=0"], ["grpo learns nothing"]),
    ("groups_have_a_contrast", ["rollout.top_k=1"], ["rollout.top_k=1 leaves the likeliest token alone"]),
    ("groups_have_a_contrast", ["rollout.min_p=1"], ["rollout.min_p=1 leaves the likeliest token alone"]),
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
        "kl_holds_the_policy",
        ["algorithm.kl_coef=0.1", "algorithm.kl_estimator=k1"],
        ["algorithm.kl_estimator=k1 with algorithm.kl_in=loss", "use k2 or k3"],
    ),
    (
        "kl_holds_the_policy",
        [
            "algorithm.name=ppo",
            "algorithm.kl_coef=0.1",
            "algorithm.kl_in=reward",
            "algorithm.kl_estimator=k3",
        ],
        ["algorithm.kl_estimator=k3 with algorithm.kl_in=reward", "use k1"],
    ),
    (
        "keys_are_read",
        ["algorithm.kl_estimator=k1"],
        ["kl_estimator=k1 is not read while algorithm.kl_coef=0"],
    ),
    (
        "keys_are_read",
        ["data.prompt_key=question"],
        ["data.prompt_key=question is not read by data.task=addition"],
    ),
    ("keys_are_read", ["data.response_key=solution"], ["data.response_key=solution is not read"]),
    (
        "keys_are_read",
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
    (
        "reward_has_its_time",
        ["reward.timeout_s=900"],
        ["reward.timeout_s=900 is never reached", "reward.step_timeout_s=600"],
    ),
    ("reward_is_there", ["reward.function=mth"], ["reward.function=mth: expected math"]),
    ("reward_is_there", ["reward.function=my/reward.py"], ["Write my/reward.py:NAME"]),
    ("reward_is_there", ["reward.function=my/reward.py:score"], ["there is no file my/reward.py"]),
    ("run_name_is_a_name", ["run.name=a/b"], ["run.name='a/b'"]),
    (
        "evaluations_have_prompts",
        ["train.eval_every_steps=5", "train.eval_prompts=0"],
        ["needs train.eval_prompts > 0"],
    ),
    *BROKEN_ENGINE,
    *BROKEN_ROLLOUT,
    *BROKEN_VLLM,
    *BROKEN_FP8,
]


@pytest.mark.parametrize(
    ("rule", "overrides", "said"), BROKEN, ids=[f"{row[0]}:{row[1][0]}" for row in BROKEN]
)
def test_a_broken_rule_is_told_with_its_keys(
    refuse, model, models, rule: str, overrides: list[str], said: list[str]
) -> None:
    message = refuse(*(one.replace("{model}", str(model)) for one in named(overrides, models)))
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
        [
            "optimizer.schedule=wsd",
            "optimizer.warmup_steps=60",
            "optimizer.decay_steps=50",
        ],  # shortened, and told
        [
            "train.steps=2",
            "train.eval_every_steps=50",
            "checkpoint.every_steps=20",
            "checkpoint.hf_every_steps=9",
        ],
        ["algorithm.name=ppo", "critic.warmup_steps=100", "train.steps=1", "algorithm.normalize_by_std=true"],
        ["train.mini_batches_per_step=4"],
        ["algorithm.kl_estimator=k2", "algorithm.kl_coef=0.1"],
        ["algorithm.name=ppo", "algorithm.kl_in=reward", "algorithm.kl_coef=0.1"],
        [
            "algorithm.kl_estimator=k3",
            "data.prompt_key=prompt",
        ],  # the defaults, as a resolved recipe has them
        ["engine.tokens_per_microbatch_per_rank=1537", "rollout.max_response_tokens=513"],
        ["engine.megatron.deterministic_mode=true"],
        ["engine.recompute=full", "cluster.device=cpu"],
        ["engine.recompute=selective"],
        ["@mla", "engine.recompute=selective"],
        ["engine.recompute=selective", "engine.recompute_modules=[core_attn, mlp, layernorm]"],
        ["engine.recompute=selective", "engine.recompute_modules=[mlp_act, layernorm]"],
        ["@moe", "engine.recompute=selective", "engine.recompute_modules=[core_attn, moe_act]"],
        ["@moe", "engine.recompute=selective", "engine.recompute_modules=[core_attn, moe]"],
        ["@mla", "engine.recompute=selective", "engine.recompute_modules=[mlp, shared_experts, mla_up_proj]"],
        ["@moe", "engine.megatron.moe_permute_fusion=true"],
        ["@moe", "engine.experts=torch"],
        ["@moe", "engine.replay_routes=old", "train.mini_batches_per_step=2"],
        ["@mla", "engine.expert_bias_rate=0.001"],
        ["@moe", "optimizer.frozen=['*.gate.weight']"],
        ["@moe", "engine.aux_loss={per: batch, weight: 0.001}", "engine.z_loss=0.001"],
        [
            *("@moe", "engine.replay_routes=rollout", "rollout.return_routes=true"),
            "mismatch.replay_samples_per_step=0",
        ],
        [*MIMO, "rollout.draft_tokens=1"],
        [*MIMO, "rollout.draft_tokens=auto", "mtp.train=false"],
        [*MIMO, "rollout.draft_tokens=8", "rollout.layout.tp=2", "cluster.ranks=2", "layout.tp=2"],
        ["engine.offload_params=0.5", "cluster.ranks=2", "layout.tp=2", "rollout.layout.tp=1"],
        ["engine.offload_grads=1.0", "engine.offload_optimizer=0.5"],
        ["optimizer.name=sgd", "optimizer.momentum=0.8", "engine.distributed_optimizer=false"],
        ["optimizer.name=adam", "optimizer.weight_decay=0.1"],
        ["optimizer.cpu_fraction=0.5"],
        ["optimizer.lr_multipliers={'*.self_attn.*_proj.*': 0.1, 'lm_head.*': 2.0, '*': 0.5}", "@moe"],
        ["reward.function=my_package.rewards:score"],
        ["checkpoint.every_steps=10", "checkpoint.keep_last=3", "checkpoint.on_error=continue"],
        ["checkpoint.hf_every_steps=10", "checkpoint.on_error=continue"],
        ["resume=auto"],
        ["model.chat_template='{{ messages }}'"],
        ["data.task_options.digits=3"],
        ["data.task=gsm8k", "data.train_path=openai/gsm8k:main:train", "data.eval_path=openai/gsm8k"],
    ],
)
def test_good_recipes_pass(load, models, overrides: list[str]) -> None:
    load(*named(overrides, models))


@pytest.mark.parametrize(
    "overrides",
    [
        ["cluster.ranks=4", "layout.cp=2", OWN],
        # Two ranks hold together what one could not.
        ["cluster.ranks=2", "layout.cp=2", OWN, "engine.tokens_per_microbatch_per_rank=768"],
        ["cluster.ranks=2", "layout.cp=2", "engine.cp_comm=all_to_all", OWN],
        ["cluster.ranks=8", "layout.cp=4", "layout.dynamic_cp=true", OWN],
        ["cluster.ranks=2", "layout.cp=2", "layout.dynamic_cp=true", "engine.cp_comm=all_to_all", OWN],
        ["cluster.ranks=2", "layout.pp=2", "layout.vpp=2", OWN],
        ["cluster.ranks=2", "layout.pp=2", "layout.vpp=2", "rollout.layout.pp=2"],
        ["@moe", "cluster.ranks=4", "layout.ep=4", OWN],
        ["@moe", "cluster.ranks=4", "layout.tp=2", "layout.sp=true", "layout.ep=2", OWN],
        ["@moe", "cluster.ranks=4", "layout.tp=2", "layout.sp=true", "layout.ep=4", "layout.etp=1", OWN],
        ["@moe", "cluster.ranks=8", "layout.tp=4", "layout.sp=true", "layout.ep=4", "layout.etp=2", OWN],
        # Every layer has experts: the width of dense MLPs, 96, is not there to be divided.
        ["@moe", "cluster.ranks=8", "layout.tp=4", "layout.sp=true", OWN],
        ["@mla", "cluster.ranks=8", "layout.tp=8", "layout.sp=true", OWN],
        ["@mla", "cluster.ranks=8", "layout.cp=8", "engine.cp_comm=all_to_all", OWN],
        ["@mla", "cluster.ranks=4", "layout.pp=2", "layout.vpp=2", "layout.ep=2", OWN],
    ],
)
def test_good_layouts_pass(load, models, overrides: list[str]) -> None:
    load(*named(overrides, models))


def test_sft_has_no_rollout_to_share_weights_with(load) -> None:
    load("cluster.ranks=2", "layout.cp=2", "sft={}", command="sft")


def test_a_command_is_asked_only_for_what_it_reads(load, refuse) -> None:
    assert "needs an sft section" in refuse(command="sft")
    load("sft={}", "rollout.samples_per_prompt=1", command="sft")
    load("data.task=jsonl", "rollout.temperature=0", command="generate")
    assert "data.eval_path is not set" in refuse("data.task=jsonl", command="eval")
    for command in ("generate", "eval"):
        assert "resume is read by quintet train and sft alone" in refuse("resume=auto", command=command)


@pytest.mark.parametrize(
    ("backend", "file", "cls"),
    [("vllm", "engine/arg_utils.py", "EngineArgs"), ("sglang", "srt/server_args.py", "ServerArgs")],
)
def test_options_are_those_of_what_is_installed(
    load, refuse, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str, file: str, cls: str
) -> None:
    wrong = ["cluster.device=cuda", f"rollout.backend={backend}", f"rollout.{backend}.enforce_eagr=true"]
    monkeypatch.syspath_prepend(tmp_path)
    package = tmp_path / backend
    (package / file).parent.mkdir(parents=True)
    (package / "__init__.py").write_text("raise AssertionError('imported')")
    load(*wrong)  # another version may keep them elsewhere: it is told when it starts
    (package / file).write_text(
        f"class {cls}:\n    known: ClassVar[int] = 1\n    enforce_eager: bool = False\n"
    )
    said = refuse(*wrong)
    assert f'override "rollout.{backend}.enforce_eagr=true"' in said
    assert f"the {cls} of" in said
    assert "did you mean enforce_eager?" in said
    load(*wrong[:2], f"rollout.{backend}.enforce_eager=true")
    assert "no such field" in refuse(*wrong[:2], f"rollout.{backend}.known=1")
    load(*wrong, "cluster.address=10.0.0.1:6379")  # where other machines have their own


def test_a_model_directory_is_looked_at_before_anything_starts(load, refuse, model: Path) -> None:
    named = ["model.build=null", f"model.path={model}"]
    load(*named, "cluster.ranks=2", "layout.tp=2")
    assert "does not divide the model's 2 KV heads" in refuse(*named, "cluster.ranks=4", "layout.tp=4")
    wide = [*named, "cluster.ranks=4", "rollout.layout.tp=4"]
    assert "does not divide the model's 2 KV heads" in refuse(*wide)
    load(*wide, "rollout.backend=vllm")  # whose ranks may hold the same KV head
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


@pytest.mark.parametrize("command", ["train", "sft", "generate", "eval"])
def test_a_value_model_is_no_policy(refuse, tmp_path: Path, command: str) -> None:
    path = write_model(
        tmp_path / "value",
        QWEN3 | {"architectures": ["Qwen3ForSequenceClassification"]} | {"id2label": {"0": "value"}},
    )
    (path / "tokenizer.json").touch()
    said = refuse("model.build=null", f"model.path={path}", "sft={}", command=command)
    assert "holds a value model" in said
    assert "ends with ForCausalLM" in said


def test_a_missing_tracker_names_the_extra(refuse, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install -e '.[wandb]' in quintet's checkout" in refuse("run.trackers=[wandb]")


def test_a_mode_that_wandb_does_not_know_is_refused(load, refuse, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    monkeypatch.setenv("WANDB_MODE", "of")
    assert "WANDB_MODE=of in the environment is no mode of W&B (online, offline, " in refuse(
        "run.trackers=[wandb]"
    )
    load("run.trackers=[tensorboard]")
    for mode in ("offline", ""):
        monkeypatch.setenv("WANDB_MODE", mode)
        load("run.trackers=[wandb]")


def test_a_model_runner_that_vllm_does_not_have_is_refused(load, refuse, monkeypatch) -> None:
    for wrong in ("2", "true"):
        monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", wrong)
        said = refuse("rollout.backend=vllm")
        assert (
            f"VLLM_USE_V2_MODEL_RUNNER={wrong} in the environment is no model runner of vLLM's (0, 1)" in said
        )
        load("rollout.backend=native")
        load("rollout.backend=vllm", "cluster.address=10.0.0.1:6379")  # whose ranks have another
    for good in ("0", "1", ""):
        monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", good)
        load("rollout.backend=vllm")


def test_a_missing_transformer_engine_is_told(load, refuse, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = "engine.backend=transformer_engine"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "TransformerEngine is not installed here" in refuse(asked)
    load(asked, "cluster.address=ray://elsewhere:10001")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    load(asked)


@pytest.mark.parametrize("command", ["generate", "eval"])
def test_adapters_are_given_where_none_are_trained(load, refuse, command: str) -> None:
    said = refuse("lora.rank=4", command=command)
    assert f"quintet {command} trains nothing, and fresh adapters change nothing; set lora.path" in said
    load("lora.rank=4", command="train")


def test_every_rule_has_a_sentence_and_a_test() -> None:
    tested_below = {
        "vllm_knows_its_options",
        "sglang_knows_its_options",
        "weights_are_there",
        "stop_tokens_exist",
        "policies_predict_tokens",
        "trackers_can_start",
        "sft_has_its_section",
        "resume_is_of_training",
        "layers_are_installed",
        "adapters_are_given_where_none_are_trained",
        "own_family_is_used",  # test_user_family.py
    }
    assert {one.__name__ for one in RULES} == {row[0] for row in BROKEN} | tested_below
    assert all((one.__doc__ or "").endswith(".") for one in RULES)


def test_ranks_of_stages_that_are_none_are_not_counted(refuse, models) -> None:
    said = refuse(*named(["@moe", "layout.pp=2", "layout.ep=2", "cluster.ranks=3"], models))
    assert "cluster.ranks=3 is not divisible by layout.tp × pp × cp" in said
    assert "of a pipeline stage" not in said


@pytest.mark.parametrize("override", ["rollout.stop=['']", "rollout.stop=[a, '']"])
def test_a_stop_text_is_not_empty(refuse, override: str) -> None:
    assert 'is ""; expected a list, each item text of at least 1 character' in refuse(override)


def test_stop_token_ids_are_not_negative(refuse) -> None:
    assert "each item a whole number at least 0" in refuse("rollout.stop_token_ids=[-1]")


def test_a_critics_layout_counts_where_it_is_read(load) -> None:
    load("algorithm.name=ppo", "cluster.ranks=2", "critic.layout={cp: 2}", "engine.cp_comm=all_to_all")
    load("algorithm.name=ppo", "critic.optimizer.lr_multipliers={score.weight: 2}")


def test_a_critic_of_a_path_has_what_the_recipe_asks_of_it(refuse, tmp_path: Path) -> None:
    critic = write_model(tmp_path / "critic", QWEN3 | {"max_position_embeddings": 8})
    said = refuse("algorithm.name=ppo", f"critic.path={critic}")
    assert "of critic.path: data.max_prompt_tokens + rollout.max_response_tokens" in said
    assert "more than the 8 positions" in said
    again = ["engine.recompute=selective", "engine.recompute_modules=[moe_act]"]
    said = refuse("model.build.family=qwen3_moe", "algorithm.name=ppo", f"critic.path={critic}", *again)
    assert "of critic.path: engine.recompute_modules: moe_act is of" in said
    frozen = ["model.build.family=qwen3_moe", "optimizer.frozen=['*.mlp.gate.weight']"]
    said = refuse("algorithm.name=ppo", f"critic.path={critic}", *frozen)
    assert "critic.optimizer.frozen: no weight in training matches '*.mlp.gate.weight'" in said
    narrow = write_model(
        tmp_path / "narrow", QWEN3 | {"intermediate_size": 88, "max_position_embeddings": 8192}
    )
    said = refuse("algorithm.name=ppo", f"critic.path={narrow}", "engine.fp8=tensorwise", *ON_GPU, OWN)
    assert (
        "of critic.path: engine.fp8=tensorwise: feed-forward (down) would be 64 × 88 on a rank of critic.layout.tp=1"
        in said
    )
    said = refuse("algorithm.name=ppo", "critic.path=nowhere")
    assert "critic.path: nowhere/config.json does not exist: name a Hugging Face directory" in said


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("delayed", "scales follow the largest numbers of earlier steps"),
        ("mxfp8", "it needs Blackwell GPUs and is untried here; use tensorwise or blockwise"),
        ("hybrid", "expected one of tensorwise, blockwise, or null"),
    ],
)
def test_other_recipes_of_fp8_are_refused_with_the_reason(refuse, value: str, said: str) -> None:
    message = refuse(f"engine.fp8={value}")
    assert f'engine.fp8 is "{value}"; ' in message
    assert said in message


def test_fp8_goes_where_transformer_engine_is(load, models, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here it is not: the rules are asked as if."""
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *a: real("json" if name == "transformer_engine" else name, *a),
    )
    load("engine.fp8=blockwise", *ON_GPU, "rollout.own_processes=true")
    load("engine.fp8=tensorwise", *WIDE, *ON_GPU, "rollout.own_processes=true")
    load("engine.fp8=blockwise", *WIDE, *ON_GPU, "model.build.head_dim=128", *VLLM)


def test_vllm_goes_with_a_directory_in_8_bits(load, models) -> None:
    for others in (
        [],
        ["rollout.quantization=fp8", "cluster.device=cuda"],
        ["lora.rank=4", "rollout.adapter_sync=separate"],
    ):
        load(*models["fp8"], "rollout.backend=vllm", *others)
