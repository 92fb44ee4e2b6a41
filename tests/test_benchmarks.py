"""The benchmarks' plumbing: records that can be trusted, and work that both sides share."""

import io
import json
import math
import random
import re
import statistics
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks import gsm8k, plan, proof
from benchmarks.engine import arguments as engine_arguments
from benchmarks.engine import fitted
from benchmarks.engine_recipe import as_options
from benchmarks.engine_work import MODELS, REAL, Setup, parse_engine, peak_flops, setup_of
from benchmarks.fingerprints import experts, measure
from benchmarks.fingerprints import items as fingerprinted
from benchmarks.laptop_cases import CASES, PROMPTS_PER_STEP, SAMPLES_PER_PROMPT
from benchmarks.options import need_gpus, need_whole, parse_layout
from benchmarks.records import RESULTS, command, merged, read_records, record, write_records
from benchmarks.rollout import arguments, records_of
from benchmarks.rollout_work import CONFIGS, LONG_TAIL, cases_of
from benchmarks.routes import Overhead
from benchmarks.sides import FAILED
from benchmarks.step import main as time_steps
from benchmarks.step import work_of as step_work
from benchmarks.step import write_inputs
from benchmarks.sync import case_of
from benchmarks.sync_work import Setup as SyncSetup
from quintet.data.tokenizer import load_tokenizer
from tests.benchmark_runs import benchmark


def sound(**changes):
    return {**record("b", "short/trl", "samples_per_s", 2.0, "samples/s"), **changes}


def test_a_new_record_replaces_that_of_the_same_case_metric_and_hardware(tmp_path) -> None:
    file = tmp_path / "b.json"
    write_records(file, [sound(value=1.0), sound(case="long/trl", baseline=3.0)])
    write_records(file, merged(file, [sound(value=5.0), sound(hardware="H200")]))
    found = [(one["case"], one["value"], one["baseline"]) for one in read_records(file)]
    assert found == [("short/trl", 5.0, None), ("long/trl", 2.0, 3.0), ("short/trl", 2.0, None)]


@pytest.mark.parametrize(
    "changes",
    [
        {"value": math.nan},
        {"value": "2"},
        {"value": None},
        {"baseline": math.inf},
        {"unit": ""},
        {"versions": {}},
        {"date": "soon"},
        {"note": "a key too many"},
    ],
)
def test_a_record_that_is_not_sound_is_refused(changes, tmp_path) -> None:
    with pytest.raises(ValueError):
        write_records(tmp_path / "b.json", [sound(**changes)])


def test_a_command_does_not_tell_where_its_results_went(monkeypatch) -> None:
    options = ["--out", "x/r.json", "--backend", "te", "--profile-dir", "x"]
    monkeypatch.setattr(sys, "argv", ["benchmarks/engine.py", *options])
    assert command() == "python -m benchmarks.engine --backend te"


@pytest.mark.parametrize("file", sorted(RESULTS.glob("*.json")), ids=lambda file: file.stem)
def test_committed_results_are_valid(file) -> None:
    assert read_records(file)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_work_is_the_same_each_time_and_within_its_bounds(case) -> None:
    work = case.work()
    assert work == case.work()
    assert len(work["prompts"]) == PROMPTS_PER_STEP * len(work["lengths"])
    assert {len(step) for step in work["lengths"]} == {PROMPTS_PER_STEP * SAMPLES_PER_PROMPT}
    lengths = [length for step in work["lengths"] for length in step]
    assert case.shortest <= min(lengths) <= max(lengths) <= case.longest


def test_long_tail_is_log_normal() -> None:
    logs = [math.log(length) for step in CASES["long_tail"].lengths() for length in step]
    low, high = math.log(8), math.log(256)
    assert statistics.mean(logs) == pytest.approx((low + high) / 2, abs=0.05)
    # Two standard deviations reach the bounds; redrawing what falls outside narrows it to 0.88 of that.
    assert statistics.stdev(logs) == pytest.approx(0.88 * (high - low) / 4, rel=0.05)


# the engine benchmark


@pytest.mark.parametrize("tokens", [64, 100, 4096, 16384])
def test_rows_are_full_and_their_lengths_within_bounds(tokens) -> None:
    generator = random.Random(0)
    for _ in range(50):
        lengths = REAL.row(tokens, generator)
        assert sum(lengths) == tokens
        assert REAL.shortest <= min(lengths)
        assert max(lengths) <= REAL.longest


def test_lengths_follow_their_distribution() -> None:
    setup = Setup("qwen2.5-1.5b", "portable", microbatches=16)
    lengths = [n for step in range(20) for n in setup.lengths(step)]
    assert statistics.median(lengths) == pytest.approx(REAL.median, rel=0.05)
    assert lengths == [n for step in range(20) for n in setup.lengths(step)]


def test_a_step_spreads_over_dp_and_its_flops_count_attention_within_sequences() -> None:
    setup = setup_of("qwen2.5-1.5b", backend="portable", gpus=8, layout=parse_layout("tp=2,sp=true"))
    assert setup.layout == {"tp": 2, "sp": True}
    rows = setup.rows(0)
    assert (len(rows), len(rows[0])) == (4, 4)
    assert setup.tokens_per_step == 4 * 4 * 16384
    shape, sequences = setup.shape, list(setup.lengths(0))
    dense = 6 * shape.parameter_count * sum(sequences)
    # Scores and weighted values, 2 d FLOPs each for a pair, half the pairs, and twice that again backward.
    attention = sum(
        3 * 2 * (2 * shape.head_dim) * (n * n / 2) * shape.heads * shape.layers for n in sequences
    )
    assert setup.flops(0) == pytest.approx(dense + attention, rel=1e-9)
    assert setup.trained(0) == sum(sequences) - len(sequences)


@pytest.mark.parametrize("cp", [2, 4])
@pytest.mark.parametrize("ragged", [False, True])
def test_a_row_that_ranks_share_is_full_without_padding(cp: int, ragged: bool) -> None:
    sizes: dict[str, Any] = {"layout": {"cp": cp}, "gpus": 4, "ragged": ragged, "steps": 5}
    for setup in (
        setup_of("qwen3-8b", backend="portable", tokens=8192, **sizes),
        setup_of("tiny", backend="portable", **sizes),
    ):
        rows = [row for step in range(5) for rank in setup.rows(step) for row in rank]
        assert all(n > 0 and n % (2 * cp) == 0 for row in rows for n in row)
        assert all(sum(row) <= cp * setup.tokens for row in rows)
        assert ragged or all(sum(row) == cp * setup.tokens for row in rows)


def test_cases_are_named_by_what_differs() -> None:
    assert Setup("qwen2.5-1.5b", "transformer_engine").case() == "qwen2.5-1.5b/te"
    layout = parse_layout("tp=2,sp=true,ep=4")
    other = Setup("qwen3-30b-a3b", "portable", gpus=8, layout=layout, recompute="full")
    assert other.case() == "qwen3-30b-a3b/portable/gpus8-tp2-sp-ep4/recompute-full"
    args = engine_arguments(["--layout", "pp=2", "--gpus", "2", "--stage-layers", "28", "0"])
    uneven = Setup("qwen2.5-1.5b", "portable", gpus=args.gpus, layout=args.layout)
    assert uneven.case() == "qwen2.5-1.5b/portable/gpus2-pp2-stage_layers28+0"
    cut = Setup(
        "qwen3-30b-a3b", "portable", layers=12, balance="forced", recompute="selective", cpu_fraction=0.5
    )
    cut = replace(cut, recompute_modules=["moe_act"], engine=parse_engine(["z_loss=0.1", "megatron.a=true"]))
    assert cut.case() == (
        "qwen3-30b-a3b/portable/layers12/balance-forced/recompute-selective-moe_act/cpu0.5/z_loss-0.1/a-true"
    )
    short = setup_of("qwen2.5-1.5b", backend="portable", tokens=8192, microbatches=8)
    assert short.case() == "qwen2.5-1.5b/portable/tokens8192/microbatches8"
    sync = SyncSetup("qwen3-30b-a3b", "cuda", 4, {"ep": 4}, {"tp": 4, "sp": True}, False, 256)
    assert case_of(sync) == "qwen3-30b-a3b/4gpu"
    sync = replace(sync, train={"tp": 2, "sp": True}, rollout={}, bucket_mib=64, whole=True)
    assert case_of(sync) == "qwen3-30b-a3b/4gpu/train-tp2-sp/rollout-dp/buckets64/whole"


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "many"])
def test_a_count_is_a_whole_number_of_at_least_1(text: str, capsys) -> None:
    with pytest.raises(SystemExit):
        engine_arguments(["--rounds", text])
    assert f"{text} is not a whole number of at least 1" in capsys.readouterr().err


def test_a_depth_is_named_once(capsys) -> None:
    with pytest.raises(SystemExit):
        engine_arguments(["--layers", "2", "2"])
    assert "name each depth once" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--engine foo=1", "unknown key engine.foo"),
        ("--engine foo", "expected key=value"),
        ("--engine fp8", "expected key=value"),
        ("--engine z_loss=much", "engine.z_loss is"),
        (
            "--engine megatron.foo=1",
            "engine.megatron.foo: megatron-core's TransformerConfig has no such field",
        ),
        ("--engine overlap_param_gather=true", "needs the buckets of engine.overlap_grad_reduce=true"),
        ("--layout tpp=2", "there is no axis tpp; there are tp, sp, pp"),
        ("--layout tp=2,sp=yes --gpus 2", "sp=yes: expected true or false"),
        ("--layout tp=2,sp --gpus 2", "sp=: expected true or false"),
        ("--layout tp=3 --gpus 4", "cluster.ranks=4 is not divisible by layout.tp"),
        ("--layout pp=3 --gpus 3", "does not divide the model's 28 layers"),
        ("--layout pp=2 --gpus 2 --layers 4 5", "does not divide the model's 5 layers"),
        ("--layout pp=2 --gpus 2 --stage-layers 20 9", "is 2 pipeline stages of 29 layers together"),
        ("--layout pp=2 --gpus 2 --stage-layers 15 13 --layers 28 8", "makes 2 of 8"),
        ("--layout pp=3 --gpus 3 --stage-layers 14 0 14", "leaves a stage in the middle without layers"),
        ("--layout pp=2 --gpus 2 --stage-layers 29 -1", "layout.stage_layers.1 is -1"),
        (
            "--recompute selective --recompute-modules mpl_act",
            'is "mpl_act"; expected a list, each item one of',
        ),
        ("--recompute-modules mlp", "is read by engine.recompute=selective alone"),
        ("--shape tiny --layout ep=2 --gpus 2", "the model has no experts"),
        ("--layers 99", "--layers 99: qwen2.5-1.5b has 28"),
        ("--engine recompute=full", "--engine recompute: use --recompute"),
        ("--engine offload_params=1", "--engine offload_params changes nothing here"),
        ("--shape tiny-moe --engine replay_routes=old", "--engine replay_routes changes nothing here"),
        ("--engine z_loss=[", "z_loss"),
        ("--engine z_loss=1 --engine z_loss.a=2", "--engine says of z_loss that it is 1"),
        (
            "--engine tokens_per_microbatch_per_rank=8",
            "--engine tokens_per_microbatch_per_rank: use --tokens",
        ),
    ],
)
def test_what_a_recipe_would_be_refused_for_is_refused(words: str, said: str, capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        engine_arguments(words.split())
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_what_was_recorded_is_not_refused() -> None:
    commands = {
        one["command"].partition("benchmarks.engine")[2] for one in read_records(RESULTS / "engine.json")
    }
    for words in commands | {
        "--shape qwen3-8b --gpus 8 --layout tp=2,sp=true --backend te",
        "--shape tiny-moe",
    }:
        assert engine_arguments(words.split()).rounds


def test_ragged_rows_are_within_the_budget_and_counted_as_they_are() -> None:
    setup = setup_of("tiny", backend="portable", ragged=True, steps=5)
    rows = [sum(row) for step in range(5) for rank in setup.rows(step) for row in rank]
    assert len(set(rows)) > 10
    assert min(rows) >= 0.7 * 128 - 1
    assert max(rows) <= 128
    assert setup.tokens_per_step == round(sum(rows) / 5)
    assert setup.case() == "tiny/portable/ragged"
    assert replace(setup, ragged=False).tokens_per_step == 4 * 128
    args = engine_arguments(["--ragged", "--rounds", "2", "--steps-per-turn", "3"])
    assert args.steps == 2 + 2 * (1 + 3)


def test_a_setup_says_what_a_recipe_says() -> None:
    setup = setup_of(
        "tiny-moe", backend="portable", recompute="selective", engine=parse_engine(["z_loss=0.5"])
    )
    made = Setup(**json.loads(json.dumps(setup.asdict()))).engine_recipe
    assert (made.tokens_per_microbatch_per_rank, made.recompute, made.z_loss) == (128, "selective", 0.5)
    with pytest.raises(ValueError, match="z_los"):
        replace(setup, engine={"z_los": 1}).engine_recipe  # noqa: B018


def test_all_layers_are_on_the_line_through_two_depths() -> None:
    """Steps of 2 s and 0.25 s a layer: of 28 layers 9 s, of as many FLOPs as the whole model has."""
    setups = [Setup("qwen2.5-1.5b", "portable", layers=layers) for layers in (4, 8, 12)]
    assert [one.shape.layers for one in setups] == [4, 8, 12]
    measured = [{"raw": {"s_per_step": 2 + 0.25 * one.shape.layers}} for one in setups]
    whole, found = fitted(setups, measured)
    assert whole.case() == "qwen2.5-1.5b/portable"
    assert found["raw"]["s_per_step"] == pytest.approx(9)
    assert found["raw"]["tokens_per_s_per_gpu"] == pytest.approx(whole.tokens_per_step / 9)
    flops = statistics.mean(whole.flops(step) for step in range(whole.steps))
    assert found["raw"]["tflop_per_s_per_gpu"] == pytest.approx(flops / 9 / 1e12)


def dealt(setup: Setup) -> list[list[int]]:
    """On a rank: of each router call in a step, how many tokens each expert got."""
    from megatron.core.transformer.moe.router import TopKRouter

    from benchmarks import engine_worker

    loop = engine_worker.QuintetLoop(setup, engine_worker.OPTIMIZER, torch.device("cpu"))
    loop.prepare(0, engine_worker._tokens(setup, 0, loop.dp_rank))
    counts: list[list[int]] = []
    for module in loop.engine.model.modules():
        if isinstance(module, TopKRouter):
            module.register_forward_hook(lambda module, given, out: counts.append(out[1].sum(0).tolist()))
    loop.step(0)
    return counts


@pytest.mark.parametrize("balance", ["forced", "natural"])
def test_forced_balance_deals_as_many_tokens_to_each_expert(pool, balance: str) -> None:
    setup = Setup("tiny-moe", "portable", tokens=128, microbatches=2, balance=balance, recompute="full")
    (counts,) = pool.run(dealt, 1, setup)
    assert len(counts) == 2 * 2 * 4  # layers, micro-batches, and all once more in backward
    assert {sum(one) for one in counts} == {128 * 2}
    assert ({n for one in counts for n in one} == {128 * 2 // 8}) == (balance == "forced")


@pytest.mark.parametrize("counts", [None, [2, 0], [0, 2]])
def test_the_raw_loop_cuts_its_layers_as_the_recipe_does(counts: list[int] | None) -> None:
    from benchmarks import engine_raw

    layout = {"pp": 2} | ({"stage_layers": counts} if counts else {})
    setup = setup_of("tiny", backend="portable", gpus=2, layout=layout)
    found = engine_raw._config(setup, setup.shape, torch.device("cpu")).pipeline_model_parallel_layout
    held = found and [found.get_num_layers_to_build(pp_rank=stage) for stage in range(2)]
    assert held == counts


@pytest.mark.parametrize(
    ("layout", "what"),
    [
        ({"cp": 2}, "context parallelism"),
        ({"pp": 2, "vpp": 2, "stage_layers": [1, 0, 1, 0]}, "interleaved pipelines"),
    ],
)
def test_what_the_raw_loop_cannot_do_it_refuses(layout: dict[str, Any], what: str) -> None:
    from benchmarks import engine_raw

    with pytest.raises(SystemExit, match=f"has no {what}: measure it with --only quintet"):
        engine_raw._refuse(setup_of("tiny", backend="portable", gpus=2, layout=layout))


@pytest.mark.parametrize("phase", ["setup", "burst"])
def test_a_rank_without_memory_answers_with_what_needs_less_in_options(monkeypatch, phase: str) -> None:
    from benchmarks import engine_worker

    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has")

    class Loop:
        dp_rank = 0
        prepare = full if phase == "setup" else lambda *_: None
        step = full

    monkeypatch.setattr(engine_worker, "join", lambda: torch.device("cpu"))
    monkeypatch.setattr(engine_worker, "settle", lambda _: None)
    monkeypatch.setattr(engine_worker, "_loop", lambda *_: Loop())
    monkeypatch.setattr(sys, "stdin", ['{"do": "burst", "warmup": 1, "steps": 1}'])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    answers = io.StringIO()
    setup = setup_of("qwen3-30b-a3b", backend="portable", gpus=4, layout={"ep": 4}, layers=12)
    with pytest.raises(SystemExit):
        engine_worker.serve("quintet", setup, answers)
    told = json.loads(answers.getvalue().splitlines()[-1])[FAILED]
    assert told.startswith(
        f"out of memory in {phase} (2.50 GiB more were asked for).\nWhile it trains the fullest"
    )
    (advice,) = (line for line in told.splitlines() if line.startswith("What needs less"))
    for options in ("--tokens 8192", "--recompute full"):
        assert f"{options} (" in advice
    assert "engine." not in advice


@pytest.mark.parametrize(
    ("settings", "options"),
    [
        (
            "engine.recompute=selective engine.recompute_modules=[mlp_act,layernorm]",
            "--recompute selective --recompute-modules mlp_act,layernorm",
        ),
        ("engine.recompute=full engine.recompute_modules=null", "--recompute full no --recompute-modules"),
        ("layout.pp=2", "--layout tp=2,sp=true,pp=2"),
        ("optimizer.cpu_fraction=1.0", "--cpu-fraction 1.0"),
        ("engine.distributed_optimizer=true", "--engine distributed_optimizer=true"),
    ],
)
def test_keys_of_a_recipe_are_told_as_options(settings: str, options: str) -> None:
    setup = setup_of("qwen3-8b", backend="portable", gpus=8, layout={"tp": 2, "sp": True})
    assert as_options(settings, setup) == options


def test_peaks_are_those_of_the_card() -> None:
    assert peak_flops("NVIDIA H200") == peak_flops("NVIDIA H100 80GB HBM3") == 989e12
    assert peak_flops("NVIDIA H100 PCIe") == 756e12
    assert peak_flops("a laptop") is None


@pytest.mark.parametrize(
    ("name", "billions", "active"),
    [("qwen2.5-1.5b", 1.54, 1.54), ("qwen3-8b", 8.19, 8.19), ("qwen3-30b-a3b", 30.5, 3.35)],
)
def test_shapes_are_those_of_the_models(name, billions, active) -> None:
    shape = MODELS[name].shape
    assert shape.parameter_count / 1e9 == pytest.approx(billions, rel=0.01)
    assert shape.active_parameter_count / 1e9 == pytest.approx(active, rel=0.01)


@pytest.mark.nightly
def test_engine_and_raw_loop_train_the_same_on_a_cpu() -> None:
    """The whole benchmark on a tiny model: the command itself fails when the sides' losses or gradients differ."""
    options = ["--shape", "tiny", "--rounds", "1", "--steps", "1", "--steps-per-turn", "1", "--profile"]
    printed = benchmark("engine", *options)
    norms = [float(text) for text in re.findall(r"gradient norm ([\d.]+)", printed)]
    assert norms[0] == pytest.approx(norms[1], rel=0.02)
    assert "quintet / raw:" in printed
    assert "aten::mm" in printed
    assert "written to" not in printed


@pytest.mark.nightly
@pytest.mark.parametrize(
    "how",
    [
        ["--shape", "tiny", "--recompute", "selective", "--recompute-modules", "core_attn,mlp"],
        ["--shape", "tiny-moe", "--only", "quintet", "--balance", "forced", "--recompute", "selective"],
        ["--shape", "tiny", "--ragged", "--engine", "row_buckets=true"],
        ["--shape", "tiny", "--busy", "2"],
        [
            "--shape",
            "tiny-moe",
            "--only",
            "quintet",
            "--gpus",
            "2",
            "--layout",
            "ep=2",
            "--engine",
            "z_loss=0.1",
        ],
    ],
)
def test_every_way_of_a_recipe_is_measured_on_a_cpu(how: list[str]) -> None:
    options = ["--layers", "1", "2", "--rounds", "1", "--steps", "1", "--steps-per-turn", "1"]
    printed = benchmark("engine", *how, *options)
    assert "by-layers1-2: all" in printed
    assert printed.count("tflop_per_s_per_gpu") >= 3


@pytest.mark.nightly
def test_a_pipeline_of_unequal_stages_is_measured_on_a_cpu() -> None:
    """The command itself fails when the sides' losses or gradients differ."""
    options = ["--shape", "tiny", "--gpus", "2", "--layout", "pp=2", "--stage-layers", "2", "0"]
    printed = benchmark("engine", *options, "--rounds", "1", "--steps", "1", "--steps-per-turn", "1")
    assert "tiny/portable/gpus2-pp2-stage_layers2+0: " in printed
    assert "quintet / raw:" in printed


@pytest.mark.parametrize("shape", ["tiny", "tiny-moe"])
def test_prompts_of_steps_have_the_tokens_that_a_case_has(tmp_path, shape: str) -> None:
    """By the class of tokenizers that transformers takes beside such a model."""
    tokenizer, case = load_tokenizer(write_inputs(tmp_path, CONFIGS[shape])), cases_of(shape)[1]
    assert {len(tokenizer.encode(one)) for one in step_work(case, 2)["prompts"]} == {case.prompt_tokens}
    assert len(tokenizer.decode([29, 100])) > 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_what_a_machine_cannot_do_is_said_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit, match="no GPU was found; --tiny is a dry run"):
        need_gpus(4, "--tiny")
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "device_count", lambda: 1)
        with pytest.raises(SystemExit, match="GPUs were found: 1, and 4 are needed; --tiny is a dry run"):
            need_gpus(4, "--tiny")
    need_whole({"tp": 2, "sp": True, "ep": 4, "etp": 1}, 8)
    for layout in ({"tp": 3}, {"ep": 8}, {"tp": 2, "pp": 2, "cp": 2}):
        with pytest.raises(SystemExit, match="have to divide --gpus 4"):
            need_whole(layout, 4)


@pytest.mark.parametrize("measured", [gsm8k, plan])
def test_a_key_that_no_recipe_has_is_told_without_a_traceback(measured: Any, monkeypatch) -> None:
    monkeypatch.setattr(plan, "end_at_sigterm", lambda: None)  # of the tests' own process
    with pytest.raises(SystemExit, match=r'error: override "foo.bar=1": unknown key foo.bar'):
        measured.main(["--tiny", "foo.bar=1"])


@pytest.mark.nightly
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_steps_need_a_gpu_or_are_tiny() -> None:
    with pytest.raises(SystemExit, match="no GPU was found; --tiny"):
        time_steps(["--gpus", "1"])


@pytest.mark.nightly
def test_steps_are_measured_on_a_cpu(tmp_path) -> None:
    """A dry run; what it keeps is not measured again."""
    options = ["--tiny", "--only", "quintet", "--case", "long-tail", "--steps", "1", "--keep", str(tmp_path)]
    printed = benchmark("step", *options)
    assert re.search(r"quintet +starts in \d+ s, +[\d.]+ s/step .* samples/s, controller \d+\.\d%\n", printed)
    assert benchmark("step", *options) == printed.splitlines(keepends=True)[-1]


@pytest.mark.nightly
def test_checkpoints_are_measured_on_a_cpu(tmp_path) -> None:
    """A dry run: every number comes out, and nothing is left on the disk."""
    printed = benchmark("checkpoint", "--device", "cpu", "--tiny", "--dir", str(tmp_path))
    for metric in (
        "disk_read",
        "hf_load_cold",
        "hf_load_warm",
        "hf_save",
        "save",
        "load_cold",
        "load_other_layout_cold",
    ):
        assert re.search(rf" {metric}_gb_s ", printed), metric
    assert "async_save_blocks_step_s" in printed
    assert not list(tmp_path.iterdir())


# the rollout benchmark


ROLLOUT_CASES = [case for shape in ("qwen2.5-1.5b", "laptop", "tiny") for case in cases_of(shape)]


@pytest.mark.parametrize("case", ROLLOUT_CASES, ids=lambda case: case.name)
def test_both_sides_are_asked_for_the_same_responses_each_time(case) -> None:
    assert case.prompt_ids(128) == case.prompt_ids(128)
    assert {len(ids) for ids in case.prompt_ids(128)} == {case.prompt_tokens}
    lengths = case.response_tokens()
    assert lengths == case.response_tokens()
    assert {len(row) for row in lengths} == {case.samples_per_prompt}
    assert 0 < min(map(min, lengths)) <= max(map(max, lengths)) <= case.longest


def test_the_long_tail_has_its_median() -> None:
    lengths = [n for row in cases_of("qwen2.5-1.5b")[1].response_tokens() for n in row]
    assert statistics.median(lengths) == pytest.approx(LONG_TAIL.median, rel=0.1)


def told(args, seconds):
    return records_of(args, "tokens_per_second", "tokens/s", seconds)


def test_native_is_beside_vllm_and_vllm_beside_itself_alone() -> None:
    args = arguments(["--gpus", "2"])
    fixed, tail = (sum(map(sum, case.response_tokens())) for case in cases_of("qwen2.5-1.5b"))
    seconds = {"native": [[4.0, 5.0, 9.0], [1.0]], "vllm": [[2.0, 2.5, 1.0], [2.0]], "bare": [[1.0], [4.0]]}
    found = {one["case"]: (one["value"], one["baseline"]) for one in told(args, seconds)}
    assert found == {
        "qwen2.5-1.5b/2gpu/native": (fixed / 5, fixed / 2),
        "qwen2.5-1.5b/2gpu/vllm": (fixed / 2, fixed),
        "qwen2.5-1.5b/2gpu/bare": (fixed, None),
        "qwen2.5-1.5b/2gpu/long-tail/native": (tail, tail / 2),
        "qwen2.5-1.5b/2gpu/long-tail/vllm": (tail / 2, tail / 4),
        "qwen2.5-1.5b/2gpu/long-tail/bare": (tail / 4, None),
    }
    silent = told(args, {"bare": seconds["bare"], "bare-silent": [[0.5], [2.0]]})
    assert [one["baseline"] for one in silent if one["case"].endswith("bare")] == [2 * fixed, tail / 2]
    (alone, _) = told(args, {"native": seconds["native"]})
    assert alone["baseline"] is None


def test_on_a_cpu_the_case_says_so() -> None:
    (one, _) = told(arguments(["--shape", "laptop"]), {"native": [[1.0], [1.0]]})
    assert one["case"] == "laptop/cpu/native"
    with pytest.raises(SystemExit):
        arguments(["--shape", "laptop", "--gpus", "2"])


def generates(*options: str) -> str:
    """What the rollout benchmark prints on tiny sizes."""
    return benchmark("rollout", "--tiny", "--rounds", "1", *options)


@pytest.mark.nightly
def test_native_generation_is_measured_on_a_cpu() -> None:
    assert re.search(r"tiny/1gpu/long-tail/native: [\d,]+ tokens/s", generates("--only", "native"))


@pytest.mark.vllm
@pytest.mark.nightly
def test_vllm_generation_is_measured_beside_it() -> None:
    told = generates()
    assert all(re.search(rf"tiny/1gpu/{side}: [\d,]+ tokens/s", told) for side in ("native", "vllm"))


@pytest.mark.nightly
def test_weight_sync_is_measured_on_a_cpu() -> None:
    """A dry run: the weights that arrive are compared, and every number comes out."""
    printed = benchmark("sync", "--device", "cpu", "--tiny", "--gpus", "2", "--rounds", "1")
    for metric in ("seconds", "gb_s", "copy_limit_share", "peak_extra_gib", "plan_seconds"):
        assert re.search(rf"tiny/2cpu/buckets1 +{metric} ", printed), metric
    assert "written to" not in printed


def test_the_proof_of_a_large_run_is_measured() -> None:
    run = proof.Run(replace(MODELS["qwen3-30b-a3b"].shape, layers=2), 3)
    cases = {case: (told, plain) for case, told, plain in proof.measure(run, 2)}
    assert list(cases) == ["first", "next"]
    assert all(told[0] > 0 and plain[0] > 0 for told, plain in cases.values())
    assert cases["next"][0][1] < cases["next"][1][1] / 4, (
        "values alone are little beside values with their parts"
    )


def test_fingerprints_are_measured_on_a_cpu() -> None:
    held = [*fingerprinted(1, 64, 96, 2, 1, 10, "cpu"), *experts(1, 2, 64, 32, "cpu")]
    assert len({one[0] for one in held}) == len(held) == 1 + 8 + 6
    seconds, plain, nbytes = measure(held, 1)
    assert seconds > 0
    assert plain > 0
    assert nbytes == 2 * sum(one[3].numel() for one in held)


@pytest.mark.nightly
def test_replay_of_routes_is_measured_on_a_cpu() -> None:
    printed = benchmark("routes", "--shape", "tiny", "--rounds", "2")
    for case in ("R2", "R3"):
        told = rf"^train/{case} tokens_per_s: [\d.,]+ tokens/s, [+-][\d.]+% beside none$"
        assert re.search(told, printed, re.MULTILINE), case
        assert re.search(
            rf"^train/{case} overhead: [+-].*%, 95% within [+-].* to [+-].*%$", printed, re.MULTILINE
        )
        assert re.search(rf"^train/{case} host_ms: ", printed, re.MULTILINE)
    assert "train/R3 bytes_per_token: 4.0 bytes" in printed


def test_an_overhead_is_of_pairs_and_says_how_sure_it_is() -> None:
    """A host that is slow for some rounds is so for both sides of them; the medians of the sides would be 40% apart."""
    draw = random.Random(1)
    slow = [1.0 if n < 20 else 1.4 for n in range(40)]
    pairs = [(1.01 * s * draw.uniform(0.995, 1.005), s * draw.uniform(0.995, 1.005)) for s in slow]
    found = Overhead.of(pairs)
    assert 0.5 < found.low < 1 < found.high < 1.5
    same = Overhead.of([(draw.uniform(3.4, 4.7), draw.uniform(3.4, 4.7)) for _ in range(40)])
    assert same.low < 0 < same.high
    assert same.high - same.low > 3  # noise of the host, which no median of sides tells


@pytest.mark.vllm
@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_returned_routes_are_measured_on_a_cpu() -> None:
    printed = benchmark("routes", "--rollout", "--shape", "tiny", "--rounds", "2")
    for case in ("", "/long-tail"):
        told = rf"^rollout/vllm{case} tokens_per_s: [\d.,]+ tokens/s, [+-][\d.]+% beside none$"
        assert re.search(told, printed, re.MULTILINE), printed


def test_what_is_planned_stands_beside_each_phase(tmp_path) -> None:
    """Of the steps after the first, the most memory and the median of seconds; planned, by the same names."""
    steps = [
        {f"{kind}/{phase}{unit}": n * (step + 1) for kind, unit in (("memory", "_device_gib"), ("seconds", "")) for n, phase in enumerate(plan.PHASES, 1)}
        for step in (7, 3, 1, 2, 9)
    ]  # fmt: skip
    for step, (device, host) in ((3, (5.0, 6.0)), (4, (7.0, 8.0))):  # of the save before it, and of the load
        steps[step] |= {"memory/checkpoint_device_gib": device, "memory/checkpoint_host_gib": host}
    found = plan.measured(steps, "device")
    assert found == {"generate_gib": 4, "logprob_gib": 8, "train_gib": 12, "sync_gib": 16} | {
        "save_gib": 5, "save_host_gib": 6, "load_gib": 7, "load_host_gib": 8} | {
        "generate_s": 3, "logprob_s": 6, "train_s": 9, "sync_s": 12}  # fmt: skip
    args = plan.arguments(["--tiny", "rollout.own_processes=true"])
    words = plan.words_of(args, tmp_path)
    known = plan.planned([*words, "cluster.device=cuda", "model.dtype=bf16"], "NVIDIA H20", 80 << 30)
    assert known.keys() == found.keys()
    assert all(value is not None and value > 0 for value in known.values())
    slower = plan.planned([*words, "cluster.device=cuda", "model.dtype=bf16"], "NVIDIA L40S", 80 << 30)
    assert slower["train_s"] != known["train_s"]
    assert plan.planned(words, "a CPU", None)["train_s"] is None


def test_a_run_that_fails_or_takes_too_long_ends_the_measurement(capfd) -> None:
    with pytest.raises(SystemExit, match="the run ended with status 2; see what it printed above"):
        plan.run(["no-such-recipe.yaml"], limit_s=60.0)
    assert "no-such-recipe.yaml" in capfd.readouterr().err
    with pytest.raises(SystemExit, match="was not done in 0 s and was killed: --steps makes it shorter"):
        plan.run(["no-such-recipe.yaml"], limit_s=0.1)


def test_a_run_that_is_planned_too_large_is_not_started() -> None:
    said = dict.fromkeys([f"{phase}_gib" for phase in plan.PHASES + plan.CHECKPOINTS], 60.0) | {
        "train_gib": 90.0
    }
    plan.too_large(said, None)
    plan.too_large(said, 140 << 30)
    with pytest.raises(
        SystemExit, match="train is planned to take 90 GiB of a device of 79, so the run is not started"
    ):
        plan.too_large(said, 79 << 30)


@pytest.mark.skipif(torch.cuda.is_available(), reason="without a GPU")
def test_a_plan_without_a_gpu_is_a_dry_run() -> None:
    with pytest.raises(SystemExit, match="no GPU was found; --tiny is a dry run on a CPU"):
        plan._device(plan.arguments([]))
