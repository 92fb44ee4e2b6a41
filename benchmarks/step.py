"""Samples per second of a whole GRPO step on GPUs with vLLM, beside TRL's GRPOTrainer with its colocated vLLM on the same work.

    python -m benchmarks.step --gpus 1                  Qwen2.5-1.5B's shape: responses of one length, then long-tailed
    python -m benchmarks.step --gpus 4 --only quintet
    python -m benchmarks.step --gpus 8 --shape qwen3-8b --fp8    trainer and vLLM in 8 bits, beside quintet in bf16
    python -m benchmarks.step --shape qwen3-8b --layers 12 --fp8     cut in depth to what one GPU holds
    python -m benchmarks.step --tiny                    a dry run on a CPU: native generation, and TRL's own in .venv-trl

Same random weights, prompts, samples per prompt, response lengths (each forced), reward and algorithm, as in `laptop_grpo`; prompts of 256
tokens, 512 samples a step, of 512 tokens or log-normal with a median of 256 up to 2048. A step is timed from the end of one to the end of
the next; `controller_share` is the part of it that the controller takes to plan and scatter, or that is in no phase; `start_s` is what
passes before the first step, the import of libraries included. quintet keeps fp32 weights and moments beside bf16; TRL trains in bf16
alone, which is less work and less memory. Both keep vLLM and trainer on the GPU at the same time, as all fits. TRL comes from
TRL_PYTHON, by default the interpreter that runs this.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import string
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.options import end_at_sigterm, need_gpus, positive_int
from benchmarks.records import RESULTS, ROOT, commit, merged, record, versions, write_records
from benchmarks.rollout_work import CONFIGS, Case, cases_of

FILE = RESULTS / "step.json"
WARMUP_STEPS = 2
TOKENS = {"qwen2.5-1.5b": 16384}
FEWER_TOKENS = 8192
"""Of a micro-batch a GPU, by shape and of larger ones, so that all fits without recomputation."""
OWN: dict[str, Any] = {"layers": None, "backend": "transformer_engine", "memory_fraction": 0.3, "trl": ""}
"""What a record's case says of other values."""
LETTERS = string.ascii_lowercase
TRL_SETTINGS = {"": (16, []), "long-tail": (8, ["--recompute"])}
"""Samples of a micro-batch and further options that fit a GPU of 80 GB beside vLLM; a sample's row is as long as the longest of its
micro-batch."""


def write_inputs(directory: Path, config: dict[str, Any]) -> Path:
    """Write random weights and a tokenizer with a text for each number as a Hugging Face directory; a letter is a token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from benchmarks.rollout import write_model

    model = directory / "model"
    write_model(model, config, "bfloat16" if torch.cuda.is_available() else "float32")
    # Of bytes, as Qwen2's own: transformers takes the class of that for any tokenizer beside such a config.
    names = ["<unk>", "<pad>", "<eos>", *LETTERS]
    names += [f"w{n}" for n in range(len(names), config["vocab_size"])]
    letters = Tokenizer(models.BPE({name: n for n, name in enumerate(names)}, [], unk_token="<unk>"))
    letters.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    letters.decoder = decoders.ByteLevel()
    special = {f"{name.strip('<>')}_token": name for name in names[:3]}
    plain = PreTrainedTokenizerFast(tokenizer_object=letters, **special)
    plain.save_pretrained(model)
    return model


def work_of(case: Case, steps: int) -> dict[str, Any]:
    """The case as plain data, for either side's process; the same work at each step, warm-up first."""
    count = WARMUP_STEPS + steps
    draw = random.Random(0)
    prompts = ["".join(draw.choices(LETTERS, k=case.prompt_tokens)) for _ in range(case.prompts * count)]
    lengths = [length for row in case.response_tokens() for length in row]
    return {
        "case": case.name,
        "samples_per_prompt": case.samples_per_prompt,
        "longest": case.longest,
        "prompt_tokens": case.prompt_tokens,
        "warmup_steps": WARMUP_STEPS,
        "steps": steps,
        "prompts": prompts,
        "lengths": [lengths] * count,
    }


def quintet(args: argparse.Namespace, model: Path, work: dict[str, Any]) -> dict[str, Any]:
    """This process's run of the work in quintet."""
    from benchmarks.laptop_quintet import run_steps
    from quintet.recipe import schema

    samples = len(work["lengths"][0])
    rollout = {"max_response_tokens": work["longest"], "sequences_per_rank": samples // args.gpus}
    if not args.tiny:
        rollout |= {"backend": "vllm", "memory_fraction": args.memory_fraction}
    if args.fp8:
        rollout["quantization"] = "fp8"
    settings = schema.Recipe.model_validate(
        {
            "cluster": {"ranks": args.gpus, "device": "cpu" if args.tiny else "cuda"},
            "model": {"path": str(model), "dtype": "fp32" if args.tiny else "bf16"},
            "data": {"chat": False, "max_prompt_tokens": work["prompt_tokens"]},
            "engine": {"tokens_per_microbatch_per_rank": args.tokens, "backend": args.backend}
            | ({"fp8": "blockwise"} if args.fp8 else {}),
            "rollout": rollout,
            "optimizer": {"lr": 1e-6},
        }
    )
    return run_steps(settings, work, lambda line: print(f"    {line}", flush=True))


def trl(args: argparse.Namespace, model: Path, work: Path, case: Case) -> dict[str, Any]:
    """One run of the work in TRL, in processes of its own."""
    python = os.environ.get("TRL_PYTHON", sys.executable)
    command = [
        python,
        *(["-m", "torch.distributed.run", f"--nproc-per-node={args.gpus}"] if args.gpus > 1 else []),
    ]
    command += [str(ROOT / "benchmarks" / "trl_baseline.py"), "--model", str(model), "--work", str(work)]
    if not args.tiny:
        command += ["--vllm", "--memory-fraction", str(args.memory_fraction)]
        command += ["--prompt-tokens", str(case.prompt_tokens)]
        rows, options = TRL_SETTINGS[case.name]
        samples = case.prompts * case.samples_per_prompt
        own = ["--micro-batches", str(max(samples // args.gpus // rows, 1)), *options]
        command += args.trl.split() if args.trl else own
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    log = work.with_suffix(".trl-log")  # which a run that is cut short leaves with --keep
    with log.open("w") as told:
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=told, text=True)
    if done.returncode:
        raise SystemExit(f"TRL failed:\n{done.stdout[-2000:]}\n{log.read_text()[-6000:]}")
    return json.loads(next(line for line in reversed(done.stdout.splitlines()) if line.startswith("{")))


def told(side: str, found: dict[str, Any]) -> str:
    share = f", controller {found['controller_share']:.1%}" if "controller_share" in found else ""
    return (
        f"  {side:8} starts in {found['start_s']:.0f} s, {statistics.median(found['step_s']):7.2f} s/step ({min(found['step_s']):.2f} to {max(found['step_s']):.2f}), "
        f"generate {found['generate_s_median']:.2f}, train {found['train_s_median']:.2f}, {found['samples_per_s']:.1f} samples/s{share}"
    )


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--gpus", type=positive_int, default=1)
    add("--shape", default="qwen2.5-1.5b", choices=sorted(CONFIGS))
    add("--layers", type=positive_int, help="of the model in place of the shape's")
    add("--only", choices=["quintet", "trl"], help="one side alone; writes no records")
    add("--case", choices=["one-length", "long-tail"], help="one case alone")
    add("--steps", type=positive_int, default=3, help=f"timed steps, after {WARMUP_STEPS}")
    add("--tokens", type=positive_int, help="of a micro-batch a GPU, quintet's side (default: the shape's)")
    add("--backend", default=OWN["backend"], choices=["transformer_engine", "portable"])
    add("--trl", default=OWN["trl"], help="options of trl_baseline.py in place of its settings here")
    add(
        "--memory-fraction",
        type=float,
        default=OWN["memory_fraction"],
        help="of the GPU, for vLLM on either side",
    )
    add(
        "--fp8",
        action="store_true",
        help="quintet in 8 bits (engine.fp8=blockwise, rollout.quantization=fp8), beside itself in bf16 and not TRL",
    )
    add("--write", action="store_true", help="keep the records")
    add(
        "--keep",
        type=Path,
        help="directory for model and answers; a side whose answer of this commit and machine is there does not run again",
    )
    add("--out", type=Path, default=FILE, help="records are merged into this file, with --write")
    add("--tiny", action="store_true", help="a dry run on a CPU")
    add("--worker", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.fp8 and (args.tiny or args.only == "trl"):
        parser.error("--fp8 is of quintet on GPUs: leave --tiny and --only trl out")
    args.own = OWN | {"tokens": TOKENS.get(args.shape, FEWER_TOKENS)}
    args.tokens = args.tokens or args.own["tokens"]
    if args.tiny:
        args.shape, args.backend, args.tokens = "tiny", "portable", 2048
        os.environ.setdefault("TRL_PYTHON", str(ROOT / ".venv-trl" / "bin" / "python"))
    return args


def place_of(args: argparse.Namespace, case: Case) -> str:
    """The case of the records."""
    place = f"{args.shape}/{args.gpus}gpu" + (f"/{case.name}" if case.name else "")
    if args.fp8:
        place += "/blockwise"
    for option, own in args.own.items():
        if (value := getattr(args, option)) != own and not args.tiny:
            place += f"/{option}-{value}".replace(" ", "").replace("_", "-")
    return place


def sides_of(args: argparse.Namespace) -> tuple[str, str]:
    """What is measured, and what it is measured beside."""
    return ("quintet", "bf16") if args.fp8 else ("quintet", "trl")


def measure(args: argparse.Namespace, model: Path, case: Case) -> list[dict[str, Any]]:
    """Run both sides of a case one after the other, and print them; the records, where both ran."""
    name, place = case.name or "one-length", place_of(args, case)
    work = model.parent / f"{place}-{args.steps}steps.json".replace("/", "_")
    work.write_text(json.dumps(work_of(case, args.steps)))
    found, sides, made_by = {}, sides_of(args), [commit(), platform.node()]
    for side in sides:
        answer = work.with_suffix(f".{side}")
        kept = json.loads(answer.read_text()) if answer.exists() else {}
        if kept.get("of") != made_by:
            began = time.time()
            if args.only not in (None, "quintet" if side == "bf16" else side):
                continue
            if side == "trl":
                given = trl(args, model, work, case)
            else:  # a process of its own, so that the other side finds the GPU empty
                words = [word for word in sys.argv[1:] if side != "bf16" or word != "--fp8"]
                words += ["--worker", str(work)]
                subprocess.run([sys.executable, "-m", "benchmarks.step", *words], cwd=ROOT, check=True)
                given = json.loads(work.with_suffix(".answer").read_text())
            kept = given | {"start_s": given.pop("first_step_at") - began, "of": made_by}
            answer.write_text(json.dumps(kept))
        found[side] = kept
        print(told(side, found[side]), flush=True)
    if args.only or len(found) < 2:
        return []
    ours, theirs = (found[side] for side in sides)
    print(f"  {name}: {ours['samples_per_s'] / theirs['samples_per_s']:.2f}x of {sides[1]}", flush=True)
    named = versions()
    if not args.fp8:
        named |= {f"trl side: {key}": version for key, version in theirs["versions"].items()}
    units = {"samples_per_s": "samples/s", "generate_s_median": "s", "train_s_median": "s"}
    units |= {"controller_share": "fraction", "start_s": "s"}
    return [
        record("step", place, key, ours[key], unit, baseline=theirs.get(key)) | {"versions": named}
        for key, unit in units.items()
    ]


def main(argv: list[str] | None = None) -> None:
    args = arguments(argv)
    if not args.tiny:
        need_gpus(args.gpus, "--tiny")
    if args.worker:
        found = quintet(args, args.worker.parent / "model", json.loads(args.worker.read_text()))
        args.worker.with_suffix(".answer").write_text(json.dumps(found))
        return
    end_at_sigterm()
    with tempfile.TemporaryDirectory(prefix="quintet-step-") as temporary:
        config = CONFIGS[args.shape]
        config = config | {"num_hidden_layers": args.layers or config["num_hidden_layers"]}
        directory = Path(args.keep or temporary) / f"{args.shape}-{config['num_hidden_layers']}"
        model = directory / "model"
        if not (model / "tokenizer.json").exists():  # which is written last
            write_inputs(directory, config)
        for case in cases_of(args.shape):
            if args.case in (None, case.name or "one-length"):
                made = measure(args, model, case)
                if made and args.write:
                    write_records(args.out, merged(args.out, made))


if __name__ == "__main__":
    main()
