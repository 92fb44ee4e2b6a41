"""`quintet plan` answers from a config.json alone."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from quintet.cli import main
from quintet.cli.plan import GIB
from quintet.plan.cards import CARDS
from quintet.plan.phases import plan_stages
from quintet.plan.seconds import mfu, plan_seconds, samples_of
from quintet.recipe.hub import SHAPES, shapes_alone
from quintet.recipe.loader import load_recipe
from quintet.recipe.rules import shape_of

GUIDE = (Path(__file__).parents[2] / "docs" / "layouts.md").read_text()
RECIPES = Path(__file__).parents[2] / "recipes"


@pytest.mark.parametrize("recipe", sorted(RECIPES.glob("*_h20.yaml")), ids=lambda path: path.stem)
def test_the_command_in_a_recipes_head_says_it_fits(capsys, recipe):
    (command,) = re.findall(r"#   quintet (plan .*)", recipe.read_text())
    words = [str(RECIPES.parent / word) if word.startswith("recipes/") else word for word in command.split()]
    assert main(words) == 0
    said = capsys.readouterr().out
    assert "train GiB" in said
    assert "Published of verl on" in said
    assert re.findall(r"^ *(\w+) +[\d,.]+(?: +0\.\d\d)? *$", said, re.MULTILINE) == [
        "generate",
        "logprob",
        "train",
        "sync",
        "step",
    ]


@pytest.mark.parametrize("recipe", sorted(RECIPES.glob("*_h20.yaml")), ids=lambda path: path.stem)
def test_a_recipe_alone_is_planned_for_the_gpus_it_is_for(recipe, capsys):
    def said(*words):
        assert main(["plan", str(recipe), *words]) == 0
        return capsys.readouterr().out

    assumed = "Assumed, as for the shipped recipe of this model: "
    alone, asked = said(), said("--gpu", "H20", "--gpu-gib", "89")
    assert f"{assumed}--gpu H20 --gpu-gib 89.\nOn H20, " in alone
    assert [line for line in alone.splitlines() if not line.startswith(assumed)] == asked.splitlines()
    assert re.search(r"^ +step +[\d,.]+ +0\.\d\d$", alone, re.MULTILINE)
    assert f"{assumed}--gpu H20.\n" in said("--gpu-gib", "95")
    other = said("--gpu", "H100")
    assert assumed not in other  # the size is an H20's
    assert "Without --gpu-gib, " in other
    assert "On H100, " in other


@pytest.mark.parametrize(
    "words",
    [
        ("DeepSeek-V3", "cluster.ranks=96"),
        ("Qwen2-7B", "cluster.ranks=8", "layout.tp=4"),
        ("Qwen2-7B", "cluster.ranks=8", "layout.tp=2", "layout.cp=2", "rollout.layout.tp=2"),
    ],
)
def test_what_is_published_is_of_one_layout(words, capsys):
    assert main(["plan", *words]) == 0
    said = capsys.readouterr().out
    assert "Published" not in said
    assert "Assumed" not in said


@pytest.mark.parametrize("recipe", sorted(RECIPES.glob("*_h20.yaml")), ids=lambda path: path.stem)
def test_a_recipes_head_says_what_a_host_needs(recipe, capsys):
    """And what it comes to where saves go on in the background."""
    head = " ".join(recipe.read_text().partition("\nrun:")[0].replace("#", "").split())

    def host(*words):
        assert main(["plan", str(recipe), "--gpu-gib", "89", *words]) == 0
        (said,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("Host memory"))
        return said

    waits, aside = host("checkpoint.async_save=false"), host("checkpoint.async_save=true")
    own = host()
    assert own in (waits, aside)
    assert own.replace("up to ", "").partition(" checkpoint.async_save=false")[0] in head
    (copies,) = re.findall(r"([\d,]+) from the first save on, whose copies stay", aside)
    assert own == aside or f"keep a copy: {copies} then." in head
    assert "while a checkpoint is saved" in waits


def test_the_guide_says_what_comes_out(capsys, monkeypatch):
    monkeypatch.chdir(RECIPES.parent)
    (command, said) = re.findall(r"\$ quintet (plan [^\n]*)\n(.*?)```", GUIDE, re.DOTALL)[0]
    assert main(command.split()) == 0
    assert capsys.readouterr().out.split() == said.split()
    rows = re.findall(r"\| `(\w+_h20)`" + 6 * r" \| ([\d,.]+)" + r" \| [^|]* GB \|$", GUIDE, re.MULTILINE)
    assert len(rows) == 3
    for name, *shown in rows:
        with shapes_alone():
            recipe = load_recipe(f"recipes/{name}.yaml")
            stages = plan_stages(recipe, shape_of(recipe), 89 << 30)
        most = [max(one.device[phase] for one in stages) / GIB for phase in ("train", "generate", "sync")]
        host = [max(one.host[moment] for one in stages) / GIB for moment in ("steps", "save", "load")]
        assert shown == [*(f"{one:.1f}" for one in most), *(f"{one:,.0f}" for one in host)], name


def test_the_guide_says_what_is_predicted():
    rows = re.findall(r"\| `(\w+_h20)`" + 5 * r" \| ([\d,.]+)" + r" \| [^|]* MFU", GUIDE)
    assert len(rows) == 3
    for name, *shown in rows:
        with shapes_alone():
            recipe = load_recipe(str(RECIPES / f"{name}.yaml"))
            shape = shape_of(recipe)
        card = CARDS["H20"]
        times = plan_seconds(recipe, shape, card, samples_of(recipe, (200, 1960)), 89 << 30)
        seconds = [times[phase].seconds for phase in ("generate", "logprob", "train")]
        seconds.append(sum(one.seconds for one in times.values()))
        share = mfu([times["train"]], card, recipe.cluster.ranks)
        assert shown == [*(f"{one:,.0f}" for one in seconds), f"{share:.2f}"], name


def test_a_model_that_predicts_ahead_is_planned(capsys):
    assert main(["plan", str(RECIPES / "mimo_7b_mtp_8gpu.yaml"), "--gpu-gib", "75", "--gpu", "H100"]) == 0
    ahead = capsys.readouterr().out
    assert main(["plan", str(RECIPES / "mimo_7b_mtp_8gpu.yaml"), "mtp=null", "rollout.draft_tokens=0"]) == 0
    alone = capsys.readouterr().out
    held = [float(re.search(r" 36 +([\d.]+)B", said)[1]) for said in (ahead, alone)]
    # Half of its layer: attention, its MLP, the projection of two hidden states, on two tensor-parallel ranks.
    assert held[0] - held[1] == pytest.approx((42e6 + 135e6 + 34e6) / 2 / 1e9, abs=0.02)


def test_means_beyond_the_recipe_are_refused(capsys):
    words = ["plan", str(RECIPES / "qwen2_7b_8_h20.yaml"), "--gpu", "H20", "--mean-tokens", "200", "9000"]
    assert main(words) == 2
    told = capsys.readouterr()
    assert "--mean-tokens 200 9000" in told.err
    assert not told.out  # before anything is planned
    assert main(["plan", "Qwen3-8B", "--mean-tokens", "200", "90"]) == 2
    assert "name a GPU (--gpu)" in capsys.readouterr().err


def test_what_does_not_fit_is_said_with_what_to_change(capsys):
    words = ["plan", str(RECIPES / "qwen2_7b_8_h20.yaml"), "--gpu-gib"]
    assert main([*words, "34"]) == 2
    said = capsys.readouterr().out
    assert re.search(r"train: [\d.]+ GiB on stage 0 are more than 34; take a smaller engine\.tokens", said)
    assert not re.search("load:|generate:", said)  # vLLM takes its share of what there is
    assert main([*words, "30"]) == 2
    told = re.findall(
        r"(load|train|save): [\d.]+ GiB on stage 0 are more than 30; take more ranks", capsys.readouterr().out
    )
    assert told == ["load", "train", "save"]  # whatever is computed, too much rests there


def test_a_rollout_whose_weights_are_more_than_its_share_is_told(capsys):
    words = ["plan", str(RECIPES / "qwen2_7b_8_h20.yaml"), "--gpu-gib", "89"]
    assert main([*words, "rollout.layout.tp=1", "rollout.memory_fraction=0.08"]) == 2
    said = capsys.readouterr().out
    assert re.search(
        r"generate: weights of 14\.\d GiB and 0\.\d of cache .* are more than rollout.memory_fraction=0\.08 .*, 7\.1; take a",
        said,
    )
    assert main([*words, "rollout.layout.tp=1", "rollout.memory_fraction=0.5"]) == 0
    assert "generate:" not in capsys.readouterr().out


def test_a_directory_with_a_config_is_enough(tmp_path, capsys):
    shutil.copy(SHAPES / "Qwen2-7B" / "config.json", tmp_path / "config.json")
    for named in (tmp_path, tmp_path / "config.json"):
        assert main(["plan", str(named), "cluster.ranks=4", "layout.tp=4"]) == 0
        assert "7.6B parameters" in (said := capsys.readouterr().out)
        assert " for each token, on 4 ranks\n" in said
    assert main(["plan", str(tmp_path)]) == 0
    assert " for each token, on 1 rank\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"architectures": ["Qwen2ForCausalLM"', "line 1: not valid JSON"),
        ('{"model_type": "qwen2", "hidden_size": 64}', "architecture (none given) is not supported"),
        ('{"architectures": ["Qwen2ForCausalLM"], "hidden_size": 64}', "key num_attention_heads is missing"),
    ],
)
def test_a_config_that_is_not_sound_is_told_as_a_models(tmp_path, capsys, text, said):
    (tmp_path / "config.json").write_text(text)
    assert main(["plan", str(tmp_path / "config.json")]) == 2
    assert f"model.path: {tmp_path / 'config.json'}" in (told := capsys.readouterr().err)
    assert said in told


def test_what_a_config_alone_says_of_8_bits_is_refused(tmp_path, capsys):
    """As `quintet check` refuses it, which has the weights."""
    config = json.loads((SHAPES / "Qwen3-8B" / "config.json").read_text())
    quantized = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    (tmp_path / "config.json").write_text(json.dumps(config | quantized))
    words = ["plan", str(tmp_path), "cluster.device=cuda"]
    assert main([*words, "rollout.backend=vllm"]) == 0
    assert main([*words, "rollout.backend=sglang"]) == 2
    assert (
        "its weights are in 8 bits, are trained in model.dtype, and SGLang would be started for 8 bits"
        in (capsys.readouterr().err)
    )


@pytest.mark.parametrize("recipe", sorted(RECIPES.glob("*.yaml")), ids=lambda path: path.stem)
def test_each_recipe_is_planned_without_weights_or_data(recipe, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["plan", str(recipe)]) == 0
    assert "\nFullest: " in capsys.readouterr().out


def test_a_shape_is_planned_by_its_name(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["plan", "Qwen2-7B", "cluster.ranks=4", "layout.tp=4"]) == 0
    assert "7.6B parameters" in capsys.readouterr().out
    assert main(["plan", "Qwen2-9B"]) == 2
    assert (
        f"recipe Qwen2-9B does not exist (looked in {tmp_path}); shapes that came with quintet are DeepSeek-V3, MiMo-7B-SFT, "
        in capsys.readouterr().err
    )
    assert main(["plan", "model.path=Qwen2-7B"]) == 2
    assert "does not exist (looked in " in (said := capsys.readouterr().err)
    assert said.endswith("; overrides come after a recipe\n")
    assert main(["check", "Qwen2-7B"]) == 2  # needs weights


@pytest.mark.parametrize(("fp8", "each"), [("tensorwise", 2), ("blockwise", 2 + 8 / 128**2)])
def test_eight_bits_are_planned_where_transformer_engine_is_not_installed(capsys, fp8, each):
    """And count: two copies of the matrices of 28 layers, cut over two ranks."""

    def train(*words):
        assert main(["plan", str(RECIPES / "qwen2_7b_8_h20.yaml"), *words]) == 0
        said = capsys.readouterr().out.splitlines()
        return dict(zip(said[1].replace(" GiB", "").split()[-7:], said[2].split()[-7:], strict=True))["train"]

    layer = 3584 * 128 * (2 * 28 + 2 * 4) + 3 * 3584 * 18944
    more = float(train(f"engine.fp8={fp8}")) - float(train("engine.backend=transformer_engine"))
    assert more == pytest.approx(28 * layer / 2 * each / GIB, abs=0.11)


def test_a_plan_does_not_depend_on_what_is_installed_here(capsys, monkeypatch):
    """The layers of GPUs are planned on a laptop, too; others are asked for."""
    real, said = importlib.util.find_spec, []
    for more, spec in (
        ([], None),
        ([], ModuleSpec("transformer_engine", None)),
        (["engine.backend=transformer_engine"], None),
        (["engine.backend=portable"], None),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(
                importlib.util,
                "find_spec",
                lambda name, *of, spec=spec: spec if name == "transformer_engine" else real(name, *of),
            )
            main(["plan", str(RECIPES / "qwen3_8b_dapo_8gpu.yaml"), *more])
        said.append(capsys.readouterr().out)
    assert said[0] == said[1] == said[2] != said[3]


def test_what_eight_bits_do_not_change_is_told(capsys):
    """Seconds are those of bf16, and the line of `quintet check` stands beside them."""
    words = ["plan", str(RECIPES / "qwen2_7b_8_h20.yaml"), "--gpu", "H100"]
    assert main(words) == 0
    plain = capsys.readouterr().out
    assert "8 bits" not in plain
    assert main([*words, "engine.fp8=blockwise"]) == 0
    said = capsys.readouterr().out
    assert (
        "Products in 8 bits, blockwise; in bf16 stay embedding, norms, attention's scores, head. At most 1."
        in said
    )
    assert "Products in 8 bits are taken to last as long as in bf16." in said

    def seconds(text: str) -> list[str]:
        return [line for line in text.splitlines() if line.strip().startswith(("logprob ", "train "))]

    assert seconds(said) == seconds(plain)


def test_an_unknown_name_is_told_with_those_that_are_known(capsys):
    assert main(["plan", str(RECIPES / "qwen2_7b_8_h20.yaml"), "model.path=someone/Qwen9-1T"]) == 2
    assert (
        f"no shape of this name came with quintet ({', '.join(sorted(one.name for one in SHAPES.iterdir()))})"
        in capsys.readouterr().err
    )


def test_layers_that_do_not_divide_are_told_with_balanced_stages(capsys):
    one = str(RECIPES / "deepseek_v3_96_h20.yaml")
    assert main(["plan", one, "layout.stage_layers=null"]) == 2
    assert "balanced is layout.stage_layers=[6, 5, 5, 5, 5, 5, 5, 5, 5, 5, 6, 4]" in capsys.readouterr().err


def test_weights_are_wanted_again_afterwards(capsys):
    """What plan does without counts for no other command."""
    one = str(RECIPES / "qwen2_7b_8_h20.yaml")
    assert main(["plan", one]) == 0
    assert main(["check", one]) == 2
    assert "model.path" in capsys.readouterr().err


@pytest.mark.parametrize("rank", ["first", "-1", "1.0"])
def test_a_rank_is_a_number_or_all(rank, capsys):
    with pytest.raises(SystemExit):
        main(["plan", "Qwen2-7B", f"--build={rank}"])
    assert f"argument --build: {rank} is neither a rank, 0 or more, nor all" in capsys.readouterr().err


@pytest.mark.parametrize("option", [["--gpu", "H20"], ["--gpu-gib", "89"], ["--mean-tokens", "200", "1960"]])
def test_what_building_does_not_read_is_refused(option, capsys):
    assert main(["plan", "Qwen2-7B", "--build", "0", *option]) == 2
    assert "leave --gpu, --gpu-gib and --mean-tokens out" in capsys.readouterr().err


@pytest.mark.parametrize("size", ["0", "-1", "nan", "89GB"])
def test_a_device_has_a_size(size, capsys):
    with pytest.raises(SystemExit):
        main(["plan", str(RECIPES / "qwen2_7b_8_h20.yaml"), f"--gpu-gib={size}"])
    said = f"argument --gpu-gib: {size} is no number above 0 and at most 1,000,000; write no unit"
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "ranks"),
    [
        ([], "all ranks in generate"),
        (["engine.offload_params=0", "engine.offload_grads=0"], "ranks 80 to 87 (stage 10) in "),
    ],
)
def test_ranks_of_all_stages_that_are_as_full_are_told(capsys, words, ranks):
    main(["plan", str(RECIPES / "deepseek_v3_96_h20.yaml"), "--gpu-gib", "89", *words])
    assert f"Fullest: {ranks}" in capsys.readouterr().out


def test_stages_in_a_row_are_told_as_one(capsys):
    main(["plan", str(RECIPES / "qwen3_235b_a22b_32_h20.yaml")])
    assert "Fullest: ranks 4 to 27 (stages 1 to 6) in sync, " in capsys.readouterr().out


def test_a_stage_of_one_rank_is_named_as_such(capsys):
    main(["plan", "Qwen3-8B", "cluster.ranks=4", "layout.pp=4"])
    assert "Fullest: rank 0 (stage 0) in train" in capsys.readouterr().out
