"""Loading: overrides, messages with their places, and the resolved recipe."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from quintet.data.tokenizer import build_char_tokenizer
from quintet.errors import UserError
from quintet.recipe.elsewhere import DOTTED, INSTEAD, WORDS
from quintet.recipe.keys import all_keys, expected, leaf_keys, nearest_key
from quintet.recipe.loader import dump_resolved, load_recipe
from quintet.recipe.schema import Recipe, Sft
from tests.models.directory import QWEN3, write_model


def test_free_form_options_stand_in_three_places_only() -> None:
    free = [key for key, field in leaf_keys().items() if expected(field) == "a mapping"]
    assert free == ["engine.megatron", "rollout.vllm", "rollout.sglang"]


def test_every_key_says_what_it_expects() -> None:
    assert not [
        key for key, field in all_keys().items() if "<" in expected(field) or "typing" in expected(field)
    ]


def test_overrides_are_typed_nested_and_applied_in_order(load) -> None:
    recipe = load(
        "model.build.layers=2",
        "train.steps=3",
        "train.steps=7",
        "rollout.stop=['\\n', END]",
        "rollout.layout.tp=1",
        "optimizer.lr=3e-4",
        "optimizer.clip_grad_norm=null",
        "run.trackers=[tensorboard]",
        "engine.megatron.deterministic_mode=true",
    )
    assert recipe.model.build is not None
    assert recipe.model.build.layers == 2
    assert recipe.train.steps == 7
    assert recipe.rollout.stop == ["\\n", "END"]
    assert recipe.rollout.layout is not None
    assert recipe.optimizer.lr == 3e-4
    assert recipe.optimizer.clip_grad_norm is None
    assert recipe.run.trackers == ["tensorboard"]
    assert recipe.run.dir == Path("runs")
    assert recipe.engine.megatron == {"deterministic_mode": True}


def test_an_optional_section_can_be_switched_on_and_off(load) -> None:
    assert load().sft is None
    assert load("sft.steps=5").sft.steps == 5
    assert load("sft={}").sft == Sft()
    assert load("sft.steps=5", "sft=null").sft is None
    assert load("model.build=null", "model.build.heads=2").model.build.layers == 4  # its defaults again


def test_naming_one_sft_optimizer_key_keeps_its_default_lr(load) -> None:
    assert load("sft.optimizer.warmup_steps=2").sft.optimizer.lr == Sft().optimizer.lr == 1e-5


def test_an_empty_section_is_its_defaults(load) -> None:
    assert load(text="model: {build: {}}\ndata: {task: addition}\ntrain:\n").train == Recipe().train


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["train.stpes=1"], ['override "train.stpes=1"', "unknown key train.stpes", "train.steps"]),
        (["lr=1"], ["unknown key lr", "optimizer.lr"]),
        (["trian.steps=1"], ['override "trian.steps=1": unknown key trian.steps', "train.steps"]),
        (["no={such: {place: 1}}"], ['override "no={such: {place: 1}}": unknown key no.such.place']),
        (["rollout.n=8"], ["unknown key rollout.n; in quintet it is rollout.samples_per_prompt"]),
        (["actor_rollout_ref.rollout.n=8"], ["rollout.n; in quintet it is rollout.samples_per_prompt"]),
        (["actor.optim.lr=1e-6"], ['override "actor.optim.lr=1e-6"', "in quintet it is optimizer.lr"]),
        (["critic.optim.lr=1e-6"], ["in quintet it is critic.optimizer.lr"]),
        (
            ["actor.optim.override_optimizer_config.optimizer_offload_fraction=1"],
            ["in quintet it is optimizer.cpu_fraction"],
        ),
        (
            ["megatron.override_transformer_config.account_for_loss_in_pipeline_split=true"],
            ["in quintet it is layout.stage_layers"],
        ),
        (["override_transformer_config.recompute_num_layers=1"], ["in quintet it is engine.recompute"]),
        (["num_generations=8"], ["rollout.samples_per_prompt"]),
        (["max_completion_length=8"], ["rollout.max_response_tokens"]),
        (["per_device_train_batch_size=8"], ["train.prompts_per_step"]),
        (["beta=0.1"], ["algorithm.kl_coef"]),
        (["optimizer.learning_rate=1"], ["optimizer.lr"]),
        (["layout.tensor_parallel_size=2"], ["layout.tp"]),
        (["model.build.layer=1"], ["unknown key model.build.layer", "model.build.layers"]),
        (
            ["train.steps=two"],
            ['override "train.steps=two"', 'train.steps is "two"', "a whole number greater than 0"],
        ),
        (["train.steps='3'"], ['train.steps is "3"']),
        (["train.steps=2.0"], ["train.steps is 2.0"]),
        (["train.steps=true"], ["train.steps is true"]),
        (["train.steps=0"], ["train.steps is 0", "greater than 0"]),
        (["optimizer.lr=.inf"], ["optimizer.lr is Infinity", "a number greater than 0"]),
        (["layout.sp=yes"], ["true or false"]),
        (["rollout.top_p=1.5"], ["a number greater than 0 and at most 1"]),
        (
            ["engine.expert_bias_rate=50"],
            ["a number at least 0 and at most 1 (more outweighs a router's scores; DeepSeek-V3 took"],
        ),
        (["optimizer.schedule=linear"], ["one of constant, cosine, wsd"]),
        (["run.trackers=wandb"], ["a list, each item one of tensorboard, wandb"]),
        (["run.trackers=[mlflow]"], ["run.trackers.0", "mlflow"]),
        (["data.task_options={digits: x}"], ["data.task_options.digits", "whole number"]),
        (["layout=3"], ["layout is 3", "a section"]),
        (
            ["router_replay.mode=R3"],
            ["unknown key router_replay.mode; in quintet it is engine.replay_routes=rollout"],
        ),
        (
            ["engine.replay_routes=R2"],
            ['is "R2"; expected one of old, rollout, or null (R2 is old here)'],
        ),
        (["train.steps"], ["expected key=value", "no blanks around ="]),
        (["=3"], ["expected key=value"]),
        (["train..steps=3"], ["expected key=value"]),
        (["train.steps=3", "train.steps.x=3"], ["train.steps is no section", 'override "train.steps=3"']),
        (["rollout.stop=[a"], ['override "rollout.stop=[a": not valid YAML']),
        (["model.build.layers.x=3"], ["model.build.layers is no section", "r.yaml:3"]),
    ],
)
def test_a_bad_override_is_named_with_what_was_expected(
    refuse, overrides: list[str], said: list[str]
) -> None:
    message = refuse(*overrides)
    for part in said:
        assert part in message


@pytest.mark.parametrize(
    ("override", "said"),
    [
        (
            "rollout.draft_tokens=9",
            "rollout.draft_tokens is 9; expected a whole number at least 0 and at most 8 or auto",
        ),
        ("lora.targets=[3]", "lora.targets is [3]; expected all-linear or a list, each item text, or null"),
    ],
)
def test_a_value_of_none_of_its_keys_kinds_is_told_once(refuse, override: str, said: str) -> None:
    assert refuse(override) == f'override "{override}": {said}'


@pytest.mark.parametrize(
    "override",
    [
        *("engine.fp8.recipe=blockwise", "rollout.quantization.enabled=true", "engine.z_loss.weight=0.1"),
        *("layout.stage_layers.0=3", "engine.expert_bias_rate.x=1"),
    ],
)
def test_a_word_below_a_key_is_told_by_the_override_that_wrote_it(refuse, override: str) -> None:
    """Whatever the file says of the key's section, or of the key."""
    key = override.partition("=")[0].rpartition(".")[0]
    section, _, last = key.rpartition(".")
    text = "model: {build: {layers: 4}}\ndata: {task: addition}\n"
    for written in ("", f"{section}:\n", f"{section}:\n  {last}: null\n"):
        assert refuse(override, text=text + written).startswith(f'override "{override}": {key} is {{')
    assert refuse(f"{key}=null", override).startswith(f'override "{override}": {key} is {{')


def test_an_unknown_key_in_the_file_names_file_line_and_nearest_key(refuse) -> None:
    message = refuse(text="model:\n  build:\n    layers: 2\n    hiden_size: 64\ndata:\n  task: addition\n")
    assert "r.yaml:4: unknown key model.build.hiden_size" in message
    assert "the nearest valid key is model.build.hidden_size" in message


def test_a_problem_of_a_roles_layout_is_told_once(refuse) -> None:
    said = refuse("algorithm.kl_coef=0.1", "reference.layout.dynamic_cp=true")
    assert said.count("reference.layout.dynamic_cp=true needs reference.layout.cp > 1") == 1


@pytest.mark.parametrize(
    ("unknown", "nearest"),
    [
        ("engine.dynamic_cp", "layout.dynamic_cp"),
        ("rollout.layout.dynamic_cp", "layout.dynamic_cp"),
        ("critic.lr", "critic.optimizer.lr"),
        ("sft.lr", "sft.optimizer.lr"),
        ("model.frozen", "optimizer.frozen"),
        ("critic.engine.z_loss", "engine.z_loss"),
    ],
)
def test_of_keys_with_the_same_last_word_the_nearest_is_of_its_section_or_the_shortest(
    refuse, unknown: str, nearest: str
) -> None:
    assert f"the nearest valid key is {nearest}" in refuse(f"{unknown}=1")


@pytest.mark.parametrize(
    ("unknown", "nearest"),
    [
        ("optimizer.clip", "the nearest valid key is optimizer.clip_grad_norm"),
        ("engine.aux_loss.coef", "none in docs/recipe.md is like it (keys of engine.aux_loss: per, weight)"),
        ("train.stop_token", "the nearest valid key is rollout.stop_token_ids"),
    ],
)
def test_in_a_section_that_there_is_a_key_of_another_is_near_by_its_word_alone(
    refuse, unknown: str, nearest: str
) -> None:
    assert f"unknown key {unknown}; {nearest}" in refuse(f"{unknown}=1")


@pytest.mark.parametrize("unknown", ["lora.dropout", "foo.bar", "actor_rollout_ref.actor.entropy_coeff"])
def test_no_key_is_near_what_quintet_lacks(refuse, unknown: str) -> None:
    assert f"unknown key {unknown}; none in docs/recipe.md is like it" in refuse(f"{unknown}=1")


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("algorithm.adv_estimator=grpo", "algorithm.name"),
        ("algorithm.adv_estimator=gae", "algorithm.name=ppo"),
        ("lora.r=8", "lora.rank"),
        ("model.name=Qwen3-8B", "model.path"),
    ],
)
def test_anothers_name_goes_before_one_of_ours_that_looks_alike(refuse, theirs: str, ours: str) -> None:
    assert refuse(theirs).endswith(f"in quintet it is {ours}")


@pytest.mark.parametrize("theirs", sorted(WORDS | DOTTED | INSTEAD))
def test_every_key_of_anothers_is_told_by_what_it_is_here(refuse, theirs: str) -> None:
    """By itself, and below the sections that it has there."""
    here = INSTEAD.get(theirs) or f"in quintet it is {(WORDS | DOTTED)[theirs]}"
    names = [theirs, f"actor_rollout_ref.actor.megatron.{theirs}"]
    said = refuse(*(f"{name}=x" for name in names)).splitlines()[1:]
    assert [line.partition(": unknown key ")[2] for line in said] == [f"{name}; {here}" for name in names]


@pytest.mark.parametrize(
    ("theirs", "here"),
    [
        ("override_transformer_config.fp8=e4m3", "in quintet it is engine.fp8=blockwise"),
        ("override_transformer_config.fp8_recipe=blockwise", "in quintet it is engine.fp8"),
        ("override_transformer_config.moe_aux_loss_coeff=0.1", "in quintet it is engine.aux_loss.weight"),
        ("override_transformer_config.moe_z_loss_coeff=0.1", "in quintet it is engine.z_loss"),
        ("override_transformer_config.moe_router_dtype=fp32", "routers score in fp32, whatever model.dtype"),
        ("override_transformer_config.moe_enable_deepep=true", "tokens are sent by quintet's own dispatcher"),
        ("moe_token_dispatcher_type=flex", "tokens are sent by quintet's own dispatcher"),
        ("moe_permute_fusion=true", "in quintet it is engine.megatron.moe_permute_fusion"),
        (
            "optim.override_optimizer_config.use_precision_aware_optimizer=true",
            "the optimizer's state is fp32",
        ),
        ("megatron.use_dist_checkpointing=true", "model.path reads Hugging Face's weights"),
        ("rollout.enforce_eager=true", "rollout.vllm takes it"),
        ("quantization_config.method=fp8", "in quintet it is rollout.quantization"),
    ],
)
def test_what_no_key_says_is_told_by_what_is_done(refuse, theirs: str, here: str) -> None:
    assert f"unknown key {theirs.partition('=')[0]}; {here}" in refuse(theirs)
    section, _, word = theirs.partition("=")[0].rpartition(".")
    text = f"model: {{build: {{}}}}\ndata: {{task: addition}}\ntheirs:\n  {section or 'none'}: {{{word}: {theirs.partition('=')[2]}}}\n"
    assert f"; {here}" in refuse(text=text)


def test_a_section_is_told_with_its_keys(refuse) -> None:
    said = refuse(text="model: {build: {}}\nengine:\n  aux_loss: 0.001\nlayout: 4\n")
    assert (
        "r.yaml:3: engine.aux_loss is 0.001; expected a section (its keys, indented below it: per, weight), or null"
        in said
    )
    assert "(its keys, indented below it: tp, sp, pp, vpp, stage_layers …)" in said


@pytest.mark.parametrize("override", ["engine.aux_loss=0.001", "engine={aux_loss: 0.001}"])
def test_on_the_command_line_a_section_is_told_with_its_keys_as_they_stand_there(
    refuse, override: str
) -> None:
    assert (
        "engine.aux_loss is 0.001; expected a section (its keys: engine.aux_loss.per, engine.aux_loss.weight), or null"
        in refuse(override)
    )


@pytest.mark.parametrize(
    ("override", "here"),
    [
        ("model.dtype=fp8", "(fp8 is bf16 with engine.fp8 here)"),
        ("model.dtype=bfloat16", "(bfloat16 is bf16 here)"),
        ("engine.fp8=e4m3", "(e4m3 is blockwise here)"),
        ("engine.fp8=hybrid", "(hybrid is tensorwise here)"),
        ("engine.aux_loss.per=seq_aux_loss", "(seq_aux_loss is sequence here)"),
        (
            "megatron.moe_router_load_balancing_type=global_aux_loss",
            "in quintet it is engine.aux_loss.per=batch",
        ),
    ],
)
def test_values_of_others_are_told_by_their_names_here(refuse, override: str, here: str) -> None:
    assert here in refuse(override)


def test_a_colon_without_a_space_is_told(refuse) -> None:
    assert "a colon needs a space after it: per: batch" in refuse("engine.aux_loss={per:batch}")


def test_a_recipe_without_its_directory_is_told_with_it() -> None:
    with pytest.raises(UserError, match=r"does not exist .*; recipes/qwen2_7b_8_h20.yaml came with quintet"):
        load_recipe("qwen2_7b_8_h20")


def test_another_trainers_sections_are_told_key_by_key(refuse) -> None:
    """A section that no one knows is told once; one in another trainer's words by what each key is called here."""
    message = refuse(
        text="actor:\n  optim:\n    lr: 1e-6\n  grad_clip: 1.0\ntrian:\n  steps: 2\n  prompts: 3\n"
    )
    for part in (
        "has 3 problems",
        "r.yaml:3: unknown key actor.optim.lr; in quintet it is optimizer.lr",
        "r.yaml:4: unknown key actor.grad_clip; in quintet it is optimizer.clip_grad_norm",
        "r.yaml:5: unknown key trian; the nearest valid key is train (keys at the top",
    ):
        assert part in message


@pytest.mark.parametrize(
    ("written", "template"),
    [
        ("{{ messages[0].content }}", "{{ messages[0].content }}"),
        (
            "{% for m in messages %}{{ m.role }}: {{ m.content }} # {% endfor %}",
            "{% for m in messages %}{{ m.role }}: {{ m.content }} # {% endfor %}",
        ),
        ("[INST] {{ messages[0].content }}", "[INST] {{ messages[0].content }}"),
        ("'{{ 1 }}'", "{{ 1 }}"),
        ('"{{ 1 }}\\n"', "{{ 1 }}\n"),
    ],
)
def test_jinja_on_the_command_line_is_text(load, written: str, template: str) -> None:
    assert load(f"model.chat_template={written}").model.chat_template == template


def test_nothing_behind_the_sign_is_empty_text_where_null_is_none(load, refuse) -> None:
    """The shell takes the quotes off `data.answer_key=""`, as docs/data.md has it."""
    assert "data.answer_key= is not read by data.task=addition" in refuse("data.answer_key=")
    assert "run.name='': use letters" in refuse("run.name=")
    assert load("resume=").resume is None
    assert "optimizer.lr is null; expected a number" in refuse("optimizer.lr=")


@pytest.mark.parametrize("text", ["{{ messages }}", "{% for m in messages %}"])
def test_jinja_that_yaml_cannot_read_is_told_where_to_stand(refuse, text: str) -> None:
    message = refuse(text=f"model:\n  build: {{}}\n  chat_template: {text}\n")
    assert message.startswith(message.split(":")[0])
    assert "r.yaml:3: " in message
    assert "Jinja, stands in quotes or indented below a |" in message


def test_all_problems_are_told_at_once(refuse) -> None:
    message = refuse("run.nme=x", text="model: {build: {}}\ndata: {task: 3}\nlayout:\n  tp: two\n")
    assert "3 problems" in message
    for part in ("r.yaml:2: data.task", "r.yaml:4: layout.tp", 'override "run.nme=x"'):
        assert part in message


@pytest.mark.parametrize(("text", "said"), [("- a\n", "expected sections"), ("a: 1\na: 2\n", "given twice")])
def test_a_file_of_another_shape(refuse, text: str, said: str) -> None:
    assert said in refuse(text=text)


def test_a_missing_file_says_where_it_looked(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nowhere.yaml does not exist \(looked in "):
        load_recipe("nowhere.yaml")
    with pytest.raises(UserError, match="is a directory without a model"):
        load_recipe(tmp_path)


def test_a_runs_directory_is_answered_by_what_is_in_it(tmp_path: Path) -> None:
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "recipe.yaml").touch()
    (tmp_path / "checkpoint" / "config.json").touch()
    with pytest.raises(UserError, match=r"name \S+/checkpoint or \S+/recipe\.yaml$"):
        load_recipe(tmp_path)
    with pytest.raises(UserError, match=r"config\.json does not exist.*that of the run is \S+/checkpoint"):
        load_recipe(None, [f"model.path={tmp_path}"])


def test_a_models_directory_is_a_recipe_of_it_alone(tmp_path: Path) -> None:
    build_char_tokenizer("0123", tmp_path)
    write_model(tmp_path, QWEN3)
    recipe = load_recipe(tmp_path, ["data.chat=false"], command="generate")
    assert recipe == load_recipe(None, [f"model.path={tmp_path}", "data.chat=false"], command="generate")
    with pytest.raises(UserError, match=r"data.train_path"):
        load_recipe(tmp_path)


def test_the_resolved_recipe_reads_back_equal(load, tmp_path: Path) -> None:
    recipe = load(
        "optimizer.lr=1e-7", "rollout.stop=['1e-6', 'off', '~', 'a\nb']", "sft={}", "run.dir=~/runs"
    )
    file = tmp_path / "resolved.yaml"
    file.write_text(dump_resolved(recipe))
    assert load_recipe(file) == recipe
    assert dump_resolved(load_recipe(file)) == dump_resolved(recipe)


def test_the_resolved_recipe_names_gsm8k_columns(load, tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text("{}\n")
    paths = (f"data.train_path={data}", f"data.eval_path={data}", "data.task=gsm8k")
    assert load(*paths).data.prompt_key == "question"
    assert load(*paths, "data.prompt_key=prompt").data.prompt_key == "prompt"
    assert load().data.prompt_key == "prompt"


def test_home_is_expanded(load) -> None:
    assert load("run.dir=~/x").run.dir == Path.home() / "x"


def test_hints_for_other_names_are_keys() -> None:
    for hint in {*WORDS.values(), *DOTTED.values()}:
        key, equals, value = hint.partition("=")
        assert key in all_keys(), hint
        of_section = value == "{}" and key not in leaf_keys()
        assert of_section or (key in leaf_keys() and (not equals or value in expected(leaf_keys()[key]))), (
            hint
        )
    assert not set(WORDS) & {key.rpartition(".")[2] for key in leaf_keys()}
    assert not set(DOTTED) & set(all_keys())


@pytest.mark.parametrize("key", sorted(leaf_keys()))
def test_a_key_with_a_letter_missing_is_recognized(key: str) -> None:
    word = key.rpartition(".")[2]
    if len(word) >= 5:
        assert nearest_key(key[:-3] + key[-2:]) == key


def test_loading_needs_no_torch() -> None:
    code = "import sys, quintet.recipe; sys.exit(any(m in sys.modules for m in ('torch', 'ray', 'transformers')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("written", "now"),
    [
        ("agreement: {stop_above_kl: 0.1}", "agreement is called mismatch now"),
        (
            "rollout: {adapters: alone}",
            "rollout.adapters is called rollout.adapter_sync (and its value alone is called separate) now",
        ),
    ],
)
def test_a_key_that_had_another_name_is_told_the_new_one(tmp_path: Path, written: str, now: str) -> None:
    recipe = tmp_path / "old.yaml"
    recipe.write_text(f"{written}\n")
    with pytest.raises(UserError, match=re.escape(f"old.yaml:1: {now}")):
        load_recipe(recipe)
