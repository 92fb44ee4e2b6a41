"""The command line: help, exit codes, messages, and what each command hands on."""

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quintet.cli import COMMANDS, main
from quintet.errors import Stopped, SyncFailure, SyncMismatch, UserError, WorkerFailure
from quintet.recipe.loader import dump_resolved, load_recipe
from quintet.recipe.schema import Recipe
from quintet.rollout.draft_length import Measured
from quintet.runs.lock import LOCK, RunLock
from tests.models.directory import QWEN3, QWEN3_MOE, write_model, write_tokenizer
from tests.patience import BUSY

pytestmark = pytest.mark.usefixtures("templates_rendered_once")

RECIPE = (
    "model:\n  build: {layers: 2}\ndata:\n  task: addition\n  task_options: {digits: 1}\nsft:\n  steps: 3\n"
)


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    file = tmp_path / "r.yaml"
    file.write_text(RECIPE)
    return str(file)


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Put a function where a command looks for its loop."""

    def put(module: str, **functions: Callable[..., object]) -> None:
        stand_in = types.ModuleType(module)
        stand_in.__dict__.update(functions)
        monkeypatch.setitem(sys.modules, module, stand_in)

    return put


@pytest.mark.parametrize("name", COMMANDS)
def test_help_is_complete(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([name, "--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    others = {
        "convert": ("SOURCE", "DESTINATION"),
        "diagnose": ("RUN", "--step"),
        "chat": ("CHECKPOINT", "key=value"),
        "push": ("RUN", "REPO"),
        "report": ("RUN",),
    }
    takes = others.get(name, ("RECIPE.yaml", "key=value"))
    for part in (*takes, "examples:", f"quintet {name} ", "exit codes"):
        assert part in text
    if "RECIPE.yaml" in takes and name != "plan":  # as the errors have them
        for error, means in ((SyncFailure, "was not reached"), (SyncMismatch, "other weights")):
            assert re.search(rf"{error.exit_code} [^,]*{means}", text)


def test_each_direction_of_convert_says_how_it_is_called(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["convert", "hf-to-mcore"])
    assert capsys.readouterr().err.startswith("usage: quintet convert hf-to-mcore [-h] [--dtype TYPE]")


def test_the_head_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(name in text and command.summary in text for name, command in COMMANDS.items())
    assert main([]) == 2
    assert main(["trian"]) == 2
    assert "there is no command 'trian'" in capsys.readouterr().err


def test_train_and_sft_hand_on_the_recipe(recipe: str, stub) -> None:
    seen: list[Recipe] = []
    stub("quintet.train.ppo", train=seen.append)
    stub("quintet.train.sft", sft=seen.append)
    assert main(["train", recipe, "train.steps=5"]) == 0
    assert main(["sft", recipe, "sft.steps=6"]) == 0
    assert seen[0].train.steps == 5
    assert seen[1].sft is not None
    assert seen[1].sft.steps == 6


def test_errors_become_messages_and_exit_codes(recipe: str, stub, capsys: pytest.CaptureFixture[str]) -> None:
    def raising(error: BaseException) -> Callable[[Recipe], None]:
        def train(recipe: Recipe) -> None:
            raise error

        return train

    for error, code, said in (
        (UserError("the disk is full"), 2, "error: the disk is full\n"),
        (
            WorkerFailure("rank 1 died in phase train", rank=1, phase="train", traceback="Traceback: x"),
            3,
            "error: rank 1 died in phase train",
        ),
        (KeyboardInterrupt(), 130, "quintet: interrupted\n"),
    ):
        stub("quintet.train.ppo", train=raising(error))
        assert main(["train", recipe]) == code
        captured = capsys.readouterr()
        assert said in captured.err
        assert 'File "' not in captured.err
    stub("quintet.train.ppo", train=raising(ZeroDivisionError()))
    with pytest.raises(ZeroDivisionError):
        main(["train", recipe])


def test_a_bad_recipe_ends_with_2_before_the_loop_is_imported(
    recipe: str, stub, capsys: pytest.CaptureFixture[str]
) -> None:
    stub("quintet.train.ppo")  # importing `train` from it would fail
    assert main(["train", recipe, "train.stpes=5"]) == 2
    assert "train.steps" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--train.steps=4"], "--train.steps=4: keys of a recipe are set without dashes: train.steps=4"),
        (["-train.steps=4"], "without dashes: train.steps=4"),
        (["--train.steps", "4"], "--train.steps: keys of a recipe are set without dashes: train.steps=…"),
    ],
)
def test_a_key_with_dashes_is_told_to_go_without(
    recipe: str, given: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", recipe, *given]) == 2
    assert said in capsys.readouterr().err


def test_generate_reads_prompts_and_writes_samples(
    recipe: str, stub, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def generate(recipe: Recipe, prompts: list[str]) -> list[dict]:
        return [{"prompt": one, "response": one[::-1]} for one in prompts]

    stub("quintet.train.generate", generate=generate)
    lines = tmp_path / "p.txt"
    lines.write_text("\ufefftwo\n\nthree\n")
    rows = tmp_path / "p.jsonl"
    rows.write_text('{"prompt": "four"}\n')
    # Options may stand before, between and after the key=value arguments.
    assert main(["generate", "--prompt", "one", recipe, "--prompts", str(lines), "run.seed=3"]) == 0
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [one["prompt"] for one in printed] == ["one", "two", "three"]
    out = tmp_path / "out.jsonl"
    assert main(["generate", recipe, "--prompts", str(rows), "--output", str(out)]) == 0
    assert json.loads(out.read_text()) == {"prompt": "four", "response": "ruof"}
    assert "1 samples of 1 prompts" in capsys.readouterr().out

    rows.write_text('{"prompt": "four"}\n{"question": "five"}\n')
    for arguments, said in (
        ([], "no prompts: give --prompt"),
        (["--prompts", str(rows)], "p.jsonl:2: expected an object with a text 'prompt'"),
        (["--prompts", "nowhere.txt"], "--prompts nowhere.txt: No such file"),
        (["--prompt", "x", "--output", "no/where.jsonl"], "--output: there is no directory no"),
        (["--prompt", "x", "--output", str(tmp_path)], f"--output: {tmp_path} is a directory, or may not be"),
        (["--prompt", "x", "--output", "/dev/full"], "/dev/full cannot be written: No space left"),
    ):
        assert main(["generate", recipe, *arguments]) == 2
        assert said in capsys.readouterr().err


def test_eval_prints_and_writes_results(
    recipe: str, stub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = []
    stub(
        "quintet.train.generate",
        evaluate=lambda recipe, samples: asked.append(samples) or {"accuracy": 0.5, "prompts": 64},
    )
    out = tmp_path / "result.json"
    assert main(["eval", recipe, "--output", str(out)]) == 0
    assert capsys.readouterr().out == "accuracy  0.5000\nprompts   64\n"
    assert json.loads(out.read_text()) == {"accuracy": 0.5, "prompts": 64}
    assert main(["eval", recipe, "--samples", str(tmp_path / "samples.jsonl")]) == 0
    assert asked == [None, tmp_path / "samples.jsonl"]
    capsys.readouterr()
    assert main(["eval", recipe, "--samples", "no/where.jsonl"]) == 2
    assert "--samples: there is no directory no" in capsys.readouterr().err
    assert main(["eval", recipe, "--output", "/dev/full"]) == 2
    assert "/dev/full cannot be written: No space left" in capsys.readouterr().err


def test_report_leaves_a_run_that_is_under_way_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "recipe.yaml").write_text(dump_resolved(Recipe()))
    lock = RunLock(tmp_path / LOCK)
    assert main(["report", str(tmp_path)]) == 0
    assert "is under way: process" in capsys.readouterr().out
    assert not (tmp_path / "report.html").exists()
    lock.release()
    assert main(["report", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{tmp_path}/report.html and summary.json are made anew\n"
    assert json.loads((tmp_path / "summary.json").read_text())["status"] == "unfinished"
    (tmp_path / "file").touch()
    assert main(["report", str(tmp_path / "file")]) == 2
    assert "is no run directory" in capsys.readouterr().err


def test_check_prints_the_resolved_recipe(
    recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", recipe, "cluster.ranks=2", "rollout.layout.tp=2"]) == 0
    captured = capsys.readouterr()
    resolved = tmp_path / "resolved.yaml"
    resolved.write_text(captured.out)
    assert load_recipe(resolved) == load_recipe(recipe, ["cluster.ranks=2", "rollout.layout.tp=2"])
    for said in (
        "sound recipe for quintet train",
        "Layout: 2 ranks = dp 2 × tp 1 × pp 1.",
        "Rollout: dp 1 × tp 2 × pp 1, resharded each step.",
        "Micro-batches: up to 8192 tokens.",
        "prompts in",
    ):
        assert said in captured.err


@pytest.fixture
def model(tmp_path: Path) -> str:
    """Override that names a model with experts."""
    directory = write_model(tmp_path / "model", QWEN3_MOE)
    write_tokenizer(directory)
    return f"model.path={directory}"


def test_check_tells_what_follows_from_the_recipe(
    recipe: str, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    layout = [
        "cluster.ranks=16",
        "layout.tp=2",
        "layout.sp=true",
        "layout.cp=2",
        "layout.pp=2",
        "layout.vpp=2",
    ]
    experts = ["layout.ep=4", "layout.etp=1", "model.build=null", model, "rollout.layout.tp=4"]
    again = ["engine.recompute=selective", "engine.recompute_modules=[core_attn, moe]"]
    assert main(["check", recipe, *layout, *experts, *again, "engine.backend=portable"]) == 0
    said = capsys.readouterr().err.splitlines()
    for line in (
        "Model: qwen3_moe, 212.1K parameters, 101.5K of them for each token.",
        "Layout: 16 ranks = dp 2 × cp 2 × tp 2 with sp × pp 2 with vpp 2.",
        "Experts: dp 2 × ep 4 × etp 1, 2 of 8 on a rank.",
        "Rollout: dp 4 × tp 4 × pp 1, resharded each step.",
        "Engine: portable layers, recompute selective (core_attn, moe).",
        "Micro-batches: up to 16384 tokens on 2 ranks, each sample padded to a multiple of 4.",
    ):
        assert line in said
    (memory,) = [line for line in said if line.startswith("Memory: about 0.0 GiB on the fullest rank")]
    assert "the rollout and fragmentation" in memory
    assert main(["check", recipe, *layout, *experts, "--command", "sft"]) == 0
    said = capsys.readouterr().err
    assert "Rollout" not in said
    assert "the rollout" not in said


def test_check_tells_of_the_layouts_that_roles_have_of_their_own(
    recipe: str, capsys: pytest.CaptureFixture[str]
) -> None:
    ppo = ["cluster.ranks=4", "rollout.layout.tp=1", "algorithm.name=ppo", "algorithm.kl_coef=0.1"]
    own = ["critic.layout.cp=4", "critic.layout.dynamic_cp=true", "reference.layout.tp=2"]

    def said(*overrides: str) -> list[str]:
        assert main(["check", recipe, *ppo, *overrides]) == 0
        return [line for line in capsys.readouterr().err.splitlines() if line.startswith("Layout of")]

    device = "cluster.device=cpu"
    assert said(*own, device) == [
        "Layout of the reference: 4 ranks = dp 2 × tp 2 × pp 1. Micro-batches: up to 8192 tokens.",
        (
            "Layout of the critic: 4 ranks = dp 1 × cp 4 (dynamic: 1, 2, 4 for each micro-batch) × tp 1 × pp 1. "
            "Micro-batches: up to 32768 tokens on 4 ranks, each sample padded to a multiple of 8; less of both on fewer ranks. "
            "Dynamic cp: planned by default constants: none were measured on cpu for this shape."
        ),
    ]
    assert said(device, "critic.layout.cp=1", "reference.layout.cp=1") == []
    assert said(*own, "--command", "sft") == []  # which has the policy alone


def test_check_counts_memory_of_a_built_model_where_a_device_is_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    built = str(Path(__file__).parents[2] / "recipes" / "vllm_one_gpu.yaml")
    assert main(["check", built, "--gpu-gib", "139"]) == 0
    said = capsys.readouterr().err
    assert "Layout: 1 rank = dp 1" in said
    assert "Memory: about 57.4 GiB" in said
    assert "The rollout stays awake: training beside it needs 99.1 GiB. Of 139.0 GiB" in said
    assert "has no room" not in said
    assert main(["check", built, "--gpu-gib", "40"]) == 0
    assert (
        "A GPU of 40 GiB has no room for it: quintet plan --gpu-gib 40 names what needs less."
        in capsys.readouterr().err
    )


def test_check_tells_what_replayed_routes_come_to(
    recipe: str, model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quintet.plan.describe._GIB", 1024)
    sizes = ["train.prompts_per_step=4", "rollout.samples_per_prompt=2", "train.mini_batches_per_step=2"]
    sizes += ["data.max_prompt_tokens=16", "rollout.max_response_tokens=48"]  # 512 tokens
    layout = ["cluster.ranks=16", "layout.tp=2", "layout.sp=true", "layout.cp=2", "layout.pp=2"]
    layout += ["rollout.layout.tp=1", "model.build=null", model]
    told = ["rollout.return_routes=true", "engine.replay_routes=rollout"]
    for replay, says in (
        (told, "from the rollout to the ranks, {}; of the longest samples 4 GiB a step, 1 GiB on a rank."),
        (
            ["engine.replay_routes=old"],
            "recorded and kept on the ranks, {}; of the longest samples 4 GiB a step, 0.25",
        ),
    ):
        assert main(["check", recipe, *layout, *sizes, *replay]) == 0
        assert f"Routes: {says.format('8 bytes a token in 4 layers')}" in capsys.readouterr().err
    monkeypatch.setattr("quintet.plan.describe._GIB", 1 << 30)
    assert main(["check", recipe, *layout, *sizes, *told]) == 0
    assert "less than 0.001 GiB a step, less than 0.001 GiB on a rank." in capsys.readouterr().err


def test_check_tells_of_layers_for_multi_token_prediction(
    recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = QWEN3 | {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1, "head_dim": 8}
    path = write_model(tmp_path / "ahead", config)
    write_tokenizer(path)
    assert main(["check", recipe, "model.build=null", f"model.path={path}"]) == 0
    said = capsys.readouterr().err
    assert (
        "Model: mimo, 179.8K parameters. Its layer for multi-token prediction: not trained, saved as found."
        in said
    )
    built = ["model.build.family=mimo", "mtp.init_layers=2"]
    assert main(["check", recipe, *built]) == 0
    said = capsys.readouterr().err
    assert "built from nothing. Its 2 layers for multi-token prediction: new ones, trained." in said


def test_check_tells_what_auto_drafts(
    recipe: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On each GPU of the table, as a rollout there would say it; on a CPU, which no table has."""
    rows = [Measured("NVIDIA H200", n, 4096, 1, 0.8, speed) for n, speed in ((8, 1.5), (512, 1.4))]
    rows += [Measured("NVIDIA B200", 8, 4096, 1, 0.8, 1.5)]
    monkeypatch.setattr("quintet.rollout.draft_length.read_table", lambda: rows)
    drafts = ["model.build.family=mimo", "mtp.init_layers=1", "rollout.backend=vllm"]
    drafts += ["cluster.ranks=1", "rollout.draft_tokens=auto"]

    def said(*overrides: str) -> list[str]:
        assert main(["check", recipe, *drafts, *overrides]) == 0
        return [line for line in capsys.readouterr().err.splitlines() if line.startswith("Drafts: ")]

    (both,) = said("cluster.device=auto")
    assert re.search(r"\d+ sequences of \d+ tokens on NVIDIA B200 nothing was measured, the table ends", both)
    assert "1 drafted tokens: for" in both
    assert "on NVIDIA H200 that was measured 1.24 times as fast as none" in both
    assert both.endswith("; none on other devices.")
    (cpu,) = said("cluster.device=cpu")
    assert cpu.endswith("tokens on cpu nothing was measured.")
    assert said("rollout.draft_tokens=1") == []


def test_check_tells_the_memory_of_the_most_demanding_optimizer(
    recipe: str, model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quintet.plan.describe._GIB", 1024)
    model = ["model.build=null", model, "cluster.device=cpu", "engine.distributed_optimizer=false"]
    trained = 4 * 212096 / 1024  # fp32
    for optimizers, command, state in (
        (["optimizer.name=sgd"], "train", 2 * trained),
        (["optimizer.name=sgd", "sft=null"], "train", trained),
        (["optimizer.name=adamw", "sft.optimizer.name=sgd"], "sft", trained),
    ):
        assert main(["check", recipe, *model, *optimizers, "--command", command]) == 0
        said = capsys.readouterr().err
        assert (
            f"parameters {trained:.1f}, gradients {trained:.1f}, optimizer {state:.1f}, activations" in said
        )


def test_check_tells_what_a_rollout_on_a_cpu_packs(
    recipe: str, model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quintet.plan.describe._GIB", 1024)
    attention, head = 4 * (64 * (8 + 2 * 4) * 8 + 64 * 64), 100 * 64
    for more, packed in (
        (["rollout.layout.tp=1"], attention + head),
        (["rollout.layout.tp=2", "cluster.ranks=2"], head / 2),
    ):
        assert main(["check", recipe, "model.build=null", model, "cluster.device=cpu", *more]) == 0
        said = f"the rollout (with {4 * packed / 1024:.1f} GiB of weights packed for its products) and"
        assert said in capsys.readouterr().err
    assert main(["check", recipe, "model.build=null", model, "cluster.device=cpu", "model.dtype=bf16"]) == 0
    assert "the rollout and" in capsys.readouterr().err


def test_check_counts_the_reference_policy(
    recipe: str, model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quintet.plan.describe._GIB", 1024)
    asked = ["check", recipe, "model.build=null", model, "cluster.device=cpu", "sft={}"]
    totals = []
    for more in ([], ["algorithm.kl_coef=0.1"], ["algorithm.kl_coef=0.1", "--command", "sft"]):
        assert main([*asked, *more]) == 0
        said = capsys.readouterr().err
        totals.append(float(said.split("Memory: about ")[1].split(" GiB")[0]))
        assert (f"reference policy {4 * 212096 / 1024:.1f}" in said) == (len(more) == 1)
    alone, with_reference, sft = totals
    assert with_reference - alone == pytest.approx(4 * 212096 / 1024, abs=0.11)
    assert sft == alone


def test_check_tells_where_checkpoints_go_and_how_large_one_is(
    recipe: str, model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quintet.plan.describe._GIB", 1024)
    monkeypatch.setattr("quintet.plan.describe._free", lambda path: 16 << 20)
    asked = ["check", recipe, "model.build=null", model, "run.dir=out"]
    assert main(asked) == 0
    assert "Checkpoints: none to resume from (checkpoint.every_steps=0)" in capsys.readouterr().err
    asked += ["checkpoint.every_steps=20"]
    for more, bytes_each in ((["cluster.device=cpu"], 12), (["model.dtype=bf16"], 14)):
        assert main([*asked, *more]) == 0
        said = capsys.readouterr().err
        one = bytes_each * 212096 / 1024
        assert "Checkpoints: every 20 steps to out/run-<time>/checkpoints, the newest 2 kept" in said
        assert (
            f"; one takes about {one:.1f} GiB, and from the first on as much of the hosts' memory (checkpoint.async_save), "
            f"all up to {3 * one:.1f} GiB of the 16384 GiB that are" in said
        )
    assert main([*asked, "cluster.device=cpu", "lora={rank: 4, targets: [q_proj]}"]) == 0
    adapters = re.search(r"linear layers: ([\d,]+) parameters are trained", said := capsys.readouterr().err)
    assert adapters is not None
    assert f"; one takes about {12 * int(adapters[1].replace(',', '')) / 1024:.1f} GiB" in said
    assert main([*asked, "checkpoint.keep_last=9", "checkpoint.hf_every_steps=40"]) == 0
    said = capsys.readouterr().err
    assert ": warning, 16384.0 GiB are free there." in said
    assert main([*asked, "checkpoint.async_save=false"]) == 0
    assert "of the hosts' memory" not in capsys.readouterr().err
    assert "Hugging Face directories: every 40 steps to out/run-<time>/hf, all kept." in said


def test_sigterm_is_no_error(recipe: str, stub, capsys: pytest.CaptureFixture[str]) -> None:
    def train(recipe: Recipe) -> None:
        raise Stopped("stopped after rl step 3, as SIGTERM asked")

    stub("quintet.train.ppo", train=train)
    assert main(["train", recipe]) == 143
    assert capsys.readouterr().err == "quintet: stopped after rl step 3, as SIGTERM asked\n"


def as_if(monkeypatch: pytest.MonkeyPatch, package: str, *, installed: bool) -> None:
    """Have a package be found, or not."""
    find = importlib.util.find_spec

    def found(name: str, parent: str | None = None) -> Any:
        return (object() if installed else None) if name == package else find(name, parent)

    monkeypatch.setattr("importlib.util.find_spec", found)


@pytest.mark.parametrize(
    ("overrides", "installed", "layers"),
    [
        ([], False, "portable layers (TransformerEngine is not installed here)"),
        ([], True, "transformer_engine layers (portable on ranks without it or without a GPU)"),
        (["cluster.device=cpu"], False, "portable layers"),
        (["cluster.device=cuda"], True, "transformer_engine layers"),
        (["cluster.address=there:1"], False, "transformer_engine layers (portable on ranks"),
        (["engine.backend=portable", "cluster.device=cuda"], True, "portable layers,"),
    ],
)
def test_check_tells_the_layers(
    recipe: str,
    overrides: list[str],
    installed: bool,
    layers: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    as_if(monkeypatch, "transformer_engine", installed=installed)
    assert main(["check", recipe, *overrides]) == 0
    assert f"Engine: {layers}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("overrides", "shared"),
    [
        ([], True),
        (["rollout.layout.tp=2"], True),  # the training layout, written out
        (["rollout.layout.tp=2", "layout.sp=true"], False),
        (["rollout.layout.tp=1"], False),
    ],
)
def test_check_says_whether_the_weights_are_shared(
    recipe: str, overrides: list[str], shared: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", recipe, "cluster.ranks=2", "layout.tp=2", *overrides]) == 0
    said = capsys.readouterr().err
    assert ("Rollout: shares the layout and the weights." in said) == shared
    assert ("resharded each step" in said) != shared


def test_check_says_what_generates_where_and_whether_it_is_installed(
    recipe: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    as_if(monkeypatch, "vllm", installed=False)
    wanted = ["check", recipe, "rollout.backend=vllm", "rollout.placement=separate", "rollout.ranks=1"]
    assert main(wanted) == 0
    said = capsys.readouterr().err
    assert "Rollout: vllm, 1 copy of tp 1 × pp 1 in processes of their own, on 1 device of its own." in said
    missing = "Rollout: vllm is not installed here, which quintet train needs (docs/rollout.md)"
    assert f"{missing}.\n" in said
    assert main([*wanted, "rollout.vllm.enforce_eagr=true"]) == 0
    unread = "; the options in rollout.vllm were not read.\n"
    assert missing + unread in capsys.readouterr().err
    assert main([*wanted, "cluster.address=10.0.0.1:6379"]) == 0
    assert "not installed" not in capsys.readouterr().err


def test_check_says_which_model_runner_vllm_takes(
    recipe: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def said(*overrides: str) -> str:
        assert main(["check", recipe, "rollout.backend=vllm", *overrides]) == 0
        return capsys.readouterr().err

    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
    second = "vLLM on GPUs: the second model runner, the faster: it can do all that the recipe asks.\n"
    first = "vLLM on GPUs: the first model runner, the slower: "
    assert second in said()
    assert f"{first}the second lacks rollout.vllm.enable_dbo (not tried).\n" in said(
        "rollout.vllm.enable_dbo=true"
    )
    assert "model runner" not in said("cluster.device=cpu")
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    assert f"{first}VLLM_USE_V2_MODEL_RUNNER=0 in the environment.\n" in said()
    assert second in said("cluster.address=10.0.0.1:6379")


def test_check_says_that_no_gpu_is_seen(
    recipe: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    devices: set[str] = set()
    exists = Path.exists
    monkeypatch.setattr(
        Path,
        "exists",
        lambda path, **more: str(path) in devices if str(path).startswith("/dev/") else exists(path, **more),
    )
    said = "no NVIDIA GPU is seen here, which quintet train needs"
    for overrides, found, told in (
        (["cluster.device=cuda"], set(), True),
        (["cluster.device=auto"], set(), False),
        (["cluster.device=cuda"], {"/dev/nvidiactl"}, False),
        (["cluster.device=cuda", "cluster.address=10.0.0.1:6379"], set(), False),
    ):
        devices = found
        assert main(["check", recipe, *overrides]) == 0
        assert (said in capsys.readouterr().err) == told


def test_check_reads_every_row(recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "a", "answer": "b"}\n' * 16 + '{"prompt": \n')
    command = [
        recipe,
        "data.task=jsonl",
        "data.task_options={}",
        f"data.train_path={rows}",
        "data.eval_path=who/knows",
        "sft=null",
    ]
    assert main(["check", *command]) == 2
    assert "rows.jsonl:17: not valid JSON" in capsys.readouterr().err
    rows.write_text('{"prompt": "a", "answer": "b"}\n')
    assert main(["check", *command]) == 0
    assert "taken for a hub name" in capsys.readouterr().err
    assert main(["check", *command, "sft={}"]) == 2
    assert "rows.jsonl:1: no column 'response'" in capsys.readouterr().err


_HEAVY = "('torch', 'ray', 'transformers', 'tensordict', 'megatron', 'datasets', 'rich', 'numpy')"


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["train", "--help"], ["check", "{recipe}", "train.mini_batches_per_step=3"]],
)
def test_help_and_refusals_import_nothing_heavy(recipe: str, arguments: list[str]) -> None:
    code = (
        "import sys\nfrom quintet.cli import main\n"
        "try: code = main(sys.argv[1:])\nexcept SystemExit as end: code = end.code\n"
        f"heavy = [m for m in {_HEAVY} if m in sys.modules]\nassert code == (2 if sys.argv[1] == 'check' else 0), code\n"
        "sys.exit(' '.join(heavy) or 0)"
    )
    command = [sys.executable, "-c", code, *(one.format(recipe=recipe) for one in arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def start_train(tmp_path: Path, train: str, *arguments: str, **pipes: int) -> subprocess.Popen[str]:
    """A process of `quintet train` in which this text of a function `train(recipe)` stands for the loop."""
    (tmp_path / "loop.py").write_text(
        f"import sys, types, time\nloop = types.ModuleType('quintet.train.ppo')\n{train}"
        "loop.train = train\nsys.modules['quintet.train.ppo'] = loop\n"
        "from quintet.cli import main\nsys.exit(main(sys.argv[1:]))\n"
    )
    return subprocess.Popen(
        [sys.executable, str(tmp_path / "loop.py"), "train", *arguments],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        **pipes,
    )


def test_ctrl_c_ends_with_130_and_one_line(recipe: str, tmp_path: Path) -> None:
    """Through a real process, because Python's own handler and exit code are what is tested."""
    train = "def train(recipe):\n    print('ready', flush=True)\n    time.sleep(60)\n"
    process = start_train(tmp_path, train, recipe, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    started = time.monotonic()
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert said == "quintet: interrupted\n"
    assert time.monotonic() - started < 5 * BUSY


def test_a_run_outlives_the_reader_of_its_words(recipe: str, tmp_path: Path) -> None:
    """As of `quintet train R.yaml 2>&1 | tee log`, of which Ctrl-C ends both ends."""
    train = (
        "def train(recipe):\n    from quintet.errors import Stopped\n    from quintet.observe.observer import Observer\n"
        "    with Observer(recipe) as observer:\n        input()\n"
        "        observer.step(1, {'loss': 1.0})\n        raise Stopped('stopped after step 1', 130)\n"
    )
    runs = f"run.dir={tmp_path / 'runs'}"
    process = start_train(tmp_path, train, recipe, runs, stdin=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert process.stdout is not None
    assert process.stdout.readline().startswith("run directory")
    process.stdout.close()
    process.communicate("\n", timeout=60)
    assert process.returncode == 130
    (summary,) = tmp_path.glob("runs/*/summary.json")
    assert json.loads(summary.read_text())["status"] == "interrupted"
