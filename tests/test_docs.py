"""The documentation tells today's truth: keys, commands, links."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from quintet.observe.memory import GIB
from quintet.plan.phases import plan_stages
from quintet.recipe.hub import shapes_alone
from quintet.recipe.loader import load_recipe
from quintet.recipe.rules import shape_of
from quintet.runs.checkpoints import Checkpoints
from tests.models.directory import write_model, write_tokenizer
from tests.runs.test_checkpoints import save
from tests.shown import commands, run_as_shown

pytestmark = pytest.mark.usefixtures("templates_rendered_once")

ROOT = Path(__file__).parents[1]


def test_the_key_reference_is_what_the_schema_says():
    script = [sys.executable, str(ROOT / "tools" / "recipe_reference.py"), "--check"]
    assert subprocess.run(script, check=False).returncode == 0, "run: python tools/recipe_reference.py"


def test_the_benchmark_page_is_what_the_records_say():
    script = [sys.executable, str(ROOT / "tools" / "benchmark_page.py"), "--check"]
    assert subprocess.run(script, check=False).returncode == 0, "run: python tools/benchmark_page.py"


def record(bench: str, case: str, metric: str) -> tuple[float, float]:
    """Value and baseline."""
    rows = json.loads((ROOT / "benchmarks" / "results" / f"{bench}.json").read_text())
    (one,) = [row for row in rows if (row["case"], row["metric"]) == (case, metric)]
    return one["value"], one["baseline"]


def test_figures_of_the_guides_are_of_the_records():
    def times(case: str) -> str:
        vllm, native = (
            record("rollout", f"{case}/{one}", "tokens_per_second")[0] for one in ("vllm", "native")
        )
        return f"{vllm / native:.1f}"

    place = "qwen2.5-1.5b/1gpu"
    page = " ".join((ROOT / "docs" / "rollout.md").read_text().split())
    assert f"{times(place)} times as fast for responses of one length" in page
    assert f"and {times(f'{place}/long-tail')} times for long tails" in page
    (old, without), (told, _) = (record("routes", f"train/{one}", "kernel_s") for one in ("R2", "R3"))
    page = " ".join((ROOT / "docs" / "routes.md").read_text().split())
    assert f"take {old:.2f} s with `old`, {told:.2f} s with `rollout` and {without:.2f} s without" in page
    took = {
        one: record("handover", "vllm_one_gpu", f"{one}_s")[0]
        for one in ("step", "generate", "train", "sync")
    }
    brought = record("handover", "vllm_one_gpu", "weights_brought_s")[0]
    page = " ".join((ROOT / "docs" / "hybrid.md").read_text().split())
    assert f"takes {took['step']:.2f} s a step in the median: {took['generate']:.2f} s of generation" in page
    assert (
        f"{took['train']:.2f} s of training and {took['sync']:.2f} s of `sync`, {brought:.2f} s of that"
        in page
    )
    page = (ROOT / "recipes" / "vllm_one_gpu.yaml").read_text()
    assert (
        f"{took['step']:.2f} s a step on one H200, of which vLLM generates for {took['generate']:.2f} s"
        in page
    )
    assert f"and {took['train']:.2f} s are training" in page


def test_the_readmes_rates_are_of_the_records():
    page = " ".join((ROOT / "README.md").read_text().split())
    vllm, bare = record("rollout", "qwen2.5-1.5b/1gpu/vllm", "tokens_per_second")
    assert f"at {vllm:,.0f} tokens/s, log-probs" in page
    assert f"vLLM alone with its best options made {bare:,.0f} in the same run" in page
    case = "recompute-selective-mlp_act-layernorm/overlap_grad_reduce-true/overlap_param_gather-true"
    ours, core = record("engine", f"qwen3-8b/te/gpus4/{case}", "tokens_per_s_per_gpu")
    assert f"{ours:,.0f} tokens/s a GPU" in page
    assert f"again to fit, {core:,.0f}." in page
    for gpus, said in (
        (4, "{0:.1f} samples/s where TRL 1.14 with its own vLLM makes {1:.1f}, {2:.2f} times"),
        (1, "on one, {0:.1f} and {1:.1f}, {2:.2f} times"),
    ):
        ours, trl = record("step", f"qwen2.5-1.5b/{gpus}gpu", "samples_per_s")
        assert said.format(ours, trl, ours / trl) in page


def test_the_readmes_syncs_are_of_the_records():
    page = " ".join((ROOT / "README.md").read_text().split())
    cases = ["qwen2.5-1.5b/1gpu", "qwen3-8b/1gpu", *(f"qwen3-30b-a3b/{gpus}gpu" for gpus in (1, 2, 4))]
    told = re.findall(r"([\d.]+) GB \| ([\d.]+) s \| ([\d.]+) s \|", page)
    assert len(told) == len(cases)
    firsts = []
    for case, row in zip(cases, told, strict=True):
        seconds, serial = record("sync", case, "seconds")
        figures = record("sync", case, "gb_s")[0] * seconds, seconds, serial
        for said, measured in zip(row, figures, strict=True):
            assert said == f"{measured:.{len(said.partition('.')[2])}f}", case
        firsts.append(record("sync", case, "first_seconds")[0] / seconds)
    assert (round(min(firsts)), round(max(firsts))) == (2, 5)
    assert "a first one that takes two to five times as long;" in page


def test_the_8b_recipes_rates_are_of_the_records():
    header = " ".join((ROOT / "recipes" / "qwen3_8b_dapo_8gpu.yaml").read_text().replace("#", "").split())
    both = "overlap_grad_reduce-true/overlap_param_gather-true"

    def rate(recompute: str) -> tuple[float, float]:
        case = f"qwen3-8b/te/gpus4/recompute-{recompute}/{both}"
        return record("engine", case, "tokens_per_s_per_gpu")[0], record("engine", case, "mfu")[0]

    tokens, mfu = rate("selective")
    assert f"{tokens:,.0f} tokens/s a GPU (MFU {mfu:.2f}) with engine.recompute=selective" in header
    tokens, mfu = rate("selective-mlp_act-layernorm")
    assert f"{tokens:,.0f} ({mfu:.2f}) with engine.recompute_modules=[mlp_act,layernorm]" in header
    faster = ["engine.backend=transformer_engine", "engine.recompute_modules=[mlp_act,layernorm]"]
    with shapes_alone():
        recipe = load_recipe(ROOT / "recipes" / "qwen3_8b_dapo_8gpu.yaml", faster)
        shape = shape_of(recipe)
    assert shape is not None
    (stage,) = plan_stages(recipe, shape)
    assert f"would take {stage.device['train'] / GIB:.1f} GiB here with such layers" in header


@pytest.mark.parametrize("recipe", sorted((ROOT / "recipes").glob("*.yaml")), ids=lambda p: p.stem)
def test_every_recipe_loads(recipe, tmp_path):
    from quintet.recipe.hub import shapes_alone
    from quintet.recipe.loader import load_recipe

    file = tmp_path / "rows.jsonl"
    file.write_text('{"question": "1+1?", "answer": "#### 2"}\n')
    needs_files = "data.train_path=" in recipe.read_text()
    paths = [f"data.train_path={file}", f"data.eval_path={file}"] if needs_files else []
    if recipe.stem.endswith("_h20"):  # planned from a shape alone
        with shapes_alone():
            assert load_recipe(recipe).run.name == recipe.stem
        return
    if model := re.search(r"^  path: (\S+)$", recipe.read_text(), re.MULTILINE):
        (write_model(tmp_path, MODELS[model[1]]) / "tokenizer.json").touch()
        paths.append(f"model.path={tmp_path}")
    assert load_recipe(recipe, paths).run.name


PAGES = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/README.md"]
PAGES += sorted(str(page.relative_to(ROOT)) for page in (ROOT / "docs").glob("*.md"))


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    text = (ROOT / page).read_text()
    assert "@@" not in text
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        if not target.startswith("http"):
            assert ((ROOT / page).parent / target).exists(), target


def test_commands_in_the_readme_are_sound(tmp_path, capsys):
    """Every `quintet train` line that names a recipe of ours is checked as written, with the files it names."""
    from quintet.cli import main

    text = (ROOT / "README.md").read_text().replace("\\\n", " ")
    lines = re.findall(r"quintet train (recipes/\S+[^\n]*)", text)
    assert len(lines) >= 2
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"question": "1+1?", "answer": "#### 2"}\n')
    for line in lines:
        words = [w for w in line.split() if not w.startswith(("model.", "#"))]
        words = [re.sub(r"(data\.\w+_path)=.*", rf"\1={rows}", w) for w in words]
        assert main(["check", str(ROOT / words[0]), *words[1:]]) == 0, capsys.readouterr().err


def test_readme_and_help_agree_on_the_demos_time():
    line = next(one for one in (ROOT / "Makefile").read_text().splitlines() if one.startswith("demo:"))
    said = line.partition("## ")[2]
    assert f"make demo     # {said}" in (ROOT / "README.md").read_text()
    wall = re.search(r"wall time +│ +│ +(?:(\d+) min )?([\d.]+) s", (ROOT / "README.md").read_text())
    assert wall is not None
    minutes = int(wall[1] or 0) + float(wall[2]) / 60
    least, most = re.search(r"(\d+) to (\d+) minutes", said).groups()  # by the machine
    assert int(least) <= round(minutes, 1) <= int(most)


_QWEN3 = {"rms_norm_eps": 1e-6, "rope_theta": 1e6, "vocab_size": 151936, "max_position_embeddings": 40960}
MODELS = {
    "SmolLM2-135M-Instruct": {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 30,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49152,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
        "tie_word_embeddings": True,
    },
    "Qwen2.5-0.5B-Instruct": _QWEN3
    | {
        "architectures": ["Qwen2ForCausalLM"],
        "num_hidden_layers": 24,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
    },
    "Qwen3-8B": _QWEN3
    | {
        "architectures": ["Qwen3ForCausalLM"],
        "num_hidden_layers": 36,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    "Qwen3-30B-A3B": _QWEN3
    | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_hidden_layers": 48,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
    },
    "Moonlight-16B-A3B": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "num_hidden_layers": 27,
        "hidden_size": 2048,
        "intermediate_size": 11264,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "q_lora_rank": None,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 64,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 6,
        "n_shared_experts": 2,
        "moe_intermediate_size": 1408,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 2.446,
        "norm_topk_prob": True,
        "vocab_size": 163840,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 50000.0,
    },
    "MiMo-7B-SFT": {
        "architectures": ["MiMoForCausalLM"],
        "num_hidden_layers": 36,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "attention_bias": True,
        "num_nextn_predict_layers": 1,
        "vocab_size": 151680,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-5,
        "rope_theta": 640000.0,
        "tie_word_embeddings": False,
    },
}
"""The sizes of published models, as their config.json has them."""

LAYOUTS = (ROOT / "docs" / "layouts.md").read_text()
HYBRID = (ROOT / "docs" / "hybrid.md").read_text()
LORA = (ROOT / "docs" / "lora.md").read_text()
MTP = (ROOT / "docs" / "mtp.md").read_text()
DYNAMIC_CP = (ROOT / "docs" / "dynamic_cp.md").read_text()
CHECKPOINTS = (ROOT / "docs" / "checkpoints.md").read_text()


@pytest.fixture(scope="module")
def described(tmp_path_factory):
    """The directory that docs/layouts.md speaks of: its recipe, our own, and models without weights."""
    root = tmp_path_factory.mktemp("layouts")
    (root / "recipes").symlink_to(ROOT / "recipes")
    for name in ("dapo_math_17k.jsonl", "aime_2024.jsonl"):
        (root / name).write_text('{"prompt": "1+1?", "answer": "2"}\n')
    (recipe,) = re.findall(r"```yaml\n(.*?)```", LAYOUTS, re.DOTALL)
    (root / "my.yaml").write_text(recipe)
    for name in ("gsm8k_train.jsonl", "gsm8k_test.jsonl"):
        (root / name).write_text('{"question": "1+1?", "answer": "#### 2"}\n')
    for name, config in MODELS.items():
        if "num_nextn_predict_layers" in config:  # headers tell whether the layers are there
            write_model(root / name, config)
        else:
            (root / name).mkdir()
            (root / name / "config.json").write_text(json.dumps(config))
            (root / name / "model.safetensors").touch()
        write_tokenizer(root / name)
    return root


@pytest.mark.parametrize(
    ("arguments", "said"),
    [*commands(LAYOUTS), *commands(LORA), *commands(HYBRID), *commands(MTP), *commands(DYNAMIC_CP)],
    ids=lambda text: text.strip()[:80],
)
def test_outputs_in_the_guides_are_real(described, monkeypatch, capsys, arguments, said):
    monkeypatch.chdir(described)
    monkeypatch.setattr("quintet.recipe.rules.model.check_weights", lambda path, shape: None)
    monkeypatch.setattr(
        "quintet.plan.describe._devices", lambda recipe, command: None
    )  # a guide's machine has them
    run_as_shown(capsys, arguments, said)


def test_the_mtp_guide_checks_what_the_recipe_says_to_run():
    header = (ROOT / "recipes" / "mimo_7b_mtp_8gpu.yaml").read_text().partition("\nrun:")[0]
    lines = re.findall(r"quintet train (.*)", header.replace("\\\n#", ""))
    files = "data.train_path=dapo_math_17k.jsonl data.eval_path=aime_2024.jsonl"
    said = [line.replace("…", files).split() for line in lines]
    shown = [arguments.replace("engine.backend=portable", "").split() for arguments, _ in commands(MTP)]
    assert said == shown


FOR_GPUS = sorted((ROOT / "recipes").glob("*gpu.yaml"))


@pytest.mark.parametrize("recipe", FOR_GPUS, ids=lambda path: path.stem)
def test_recipes_for_gpus_say_the_memory_that_they_take(described, monkeypatch, capsys, recipe):
    """Checked by the first command in its head, with layers that are everywhere."""
    from quintet.cli import main

    header = recipe.read_text().partition("\nrun:")[0]
    monkeypatch.chdir(described)
    monkeypatch.setattr("quintet.recipe.rules.model.check_weights", lambda path, shape: None)
    monkeypatch.setattr("quintet.plan.describe._devices", lambda recipe, command: None)
    command = re.findall(r"quintet train (.*)", header.replace("\\\n#", ""))[0]
    # Portable layers have torch's experts alone, and refuse to be asked for them.
    portable = ["engine.backend=portable", "engine.experts=auto"]
    assert main(["check", *command.split(), *portable]) == 0, capsys.readouterr().err
    told = re.search(r"Memory: about ([\d.]+) GiB", " ".join(capsys.readouterr().err.split()))
    said = re.search(r"# Memory: about ([\d.]+) GiB", header)
    assert told is None or recipe.stem.startswith("mimo") or (said and said[1] == told[1]), told


PLANNED = re.compile(
    r"is planned to take ([\d.]+) s at the best, ([\d.]+) of them generating \(quintet plan (.+?)\)"
)


@pytest.mark.parametrize(
    "recipe", [one for one in FOR_GPUS if "planned to take" in one.read_text()], ids=lambda path: path.stem
)
def test_recipes_say_the_seconds_that_are_planned(monkeypatch, capsys, recipe):
    from quintet.cli import main

    monkeypatch.chdir(ROOT)
    header = re.sub(r"\n# ?", " ", recipe.read_text().partition("\nrun:")[0])
    step, generating, words = PLANNED.findall(header)[0]
    assert main(["plan", *words.split()]) == 0
    said = capsys.readouterr().out
    assert re.findall(r"^ *(?:generate|step) +([\d.,]+)", said, re.MULTILINE) == [generating, step]


@pytest.fixture
def interrupted(described, tmp_path, monkeypatch):
    """The directory that docs/checkpoints.md speaks of: its recipe, and a run of it that got as far as step 60."""
    from quintet.recipe.loader import load_recipe

    monkeypatch.setattr("quintet.recipe.rules.model.check_weights", lambda path, shape: None)
    monkeypatch.setattr("quintet.plan.describe._free", lambda path: 1 << 40)
    (recipe,) = re.findall(r"```yaml\n(.*?)```", CHECKPOINTS, re.DOTALL)
    for file in ("gsm8k_train.jsonl", "gsm8k_test.jsonl", "Qwen3-8B"):
        (tmp_path / file).symlink_to(described / file)
    (tmp_path / "my.yaml").write_text(recipe)
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "runs" / "math-20261121-090000"
    saved = load_recipe("my.yaml").model_dump(mode="json")
    for step in (20, 40, 60):
        data = {"epoch": 0, "position": 64 * step}
        save(Checkpoints(run / "checkpoints"), "rl", step, recipe=saved, data=data)
    (run / "checkpoints" / "step-000060" / "manifest.json").unlink()
    (run / "checkpoint").mkdir()
    (run / "checkpoint" / "config.json").touch()


@pytest.mark.parametrize(("arguments", "said"), commands(CHECKPOINTS), ids=lambda text: text.strip()[:80])
def test_outputs_in_the_checkpoint_guide_are_real(interrupted, capsys, arguments, said):
    run_as_shown(capsys, arguments, said)


def test_runs_of_the_checkpoint_guide_are_sound(capsys):
    from quintet.cli import main

    lines = re.findall(r"^\$ quintet (?:train|verify-resume) recipes/(.*)$", CHECKPOINTS, re.MULTILINE)
    assert len(lines) >= 3
    for line in lines:
        words = [w for w in line.partition(" --")[0].split() if w != "resume=auto"]
        assert main(["check", str(ROOT / "recipes" / words[0]), *words[1:]]) == 0, capsys.readouterr().err


def test_the_checkpoint_guide_names_every_key_that_may_change():
    from quintet.recipe.keys import all_keys
    from quintet.recipe.resume import MAY_CHANGE, WARM_UP_LENGTH

    _, _, table = CHECKPOINTS.partition("## What may change")
    named = set(re.findall(r"`([\w.*]+)`", table.partition("All else is")[0]))
    for key in (*MAY_CHANGE, *WARM_UP_LENGTH):
        near = {
            key,
            re.sub(r"\.eval_\w+", ".eval_*", key),
            re.sub(r"rollout\.(vllm|sglang)", "rollout.backend", key),
        }
        assert near & named or key == "sft.optimizer.cpu_fraction", key
    assert {one for one in named if "*" not in one} <= set(all_keys())


def test_layout_guide_names_what_is_free():
    from quintet.recipe.megatron import FREE

    _, _, free = LAYOUTS.partition("## What megatron-core has besides")
    assert set(re.findall(r"`(\w+)`", free.partition("Every other field")[0])) == FREE


def test_the_mismatch_guide_names_every_metric_and_place():
    from quintet.algorithms.aggregation import Tally
    from quintet.algorithms.kl import mismatch
    from quintet.diagnose.diagnosis import ADVICE
    from quintet.observe.memory import PHASES
    from quintet.train.mismatch import mismatch_metrics

    page = (ROOT / "docs" / "mismatch.md").read_text()
    tally, ones = Tally(), torch.ones(1)
    tally.add(mismatch(ones, ones, ones, 0.5), ones)
    for metric in mismatch_metrics(tally):
        short = re.sub(r"^mismatch/ratio_(?!p1$)", "_", metric)
        assert f"`{short}`" in page, metric
    for place in ADVICE:
        assert f"| {place} |" in page
    for phase in PHASES:
        assert phase in page.partition("## Memory by phase")[2]
