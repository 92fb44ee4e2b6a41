"""Does a model end better than it began? SmolLM2-135M on GSM8K: as loaded, after a warm-up by SFT, after GRPO.

    python -m benchmarks.gsm8k --model smollm2-135m --train gsm8k_train.jsonl --test gsm8k_test.jsonl
    python -m benchmarks.gsm8k --model smollm2-135m --train … --test … --lora
    python -m benchmarks.gsm8k --tiny                        a dry run on a CPU: the plumbing

One run of `recipes/smollm2_gsm8k_1gpu.yaml` with the verbs of `quintet train`, and one engine of vLLM: every question of the test file is
answered once greedily and four times at temperature 1, with the same prompt, before the warm-up, after it and after GRPO. GRPO takes the
recipe's steps, or as many as leave time for the last evaluation within `--limit-s` of the start. What it came to is gsm8k.json in `--out`:
records, the curve, and ten questions with the answers of all three. Exit status 1 where GRPO is not better than the warm-up with
p < 0.01 by a bootstrap over questions, greedy and sampled.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.options import user_errors_told
from benchmarks.paired import Gain, paired_bootstrap
from benchmarks.records import ROOT, check, record

if TYPE_CHECKING:
    from quintet.recipe.schema import Recipe
    from quintet.train.session import Session

BEGAN = time.monotonic()
RECIPE = ROOT / "recipes" / "smollm2_gsm8k_1gpu.yaml"
LORA = ("lora={rank: 32}", "optimizer.lr=1.0e-4", "sft.optimizer.lr=5.0e-4")
TINY = (
    *(
        "cluster.device=cpu",
        "model.path=null",
        "model.build={layers: 2, hidden_size: 64, ffn_hidden_size: 128}",
    ),
    *("data.chat=false", "rollout={samples_per_prompt: 2, max_response_tokens: 8, sequences_per_rank: 16}"),
    *("engine.tokens_per_microbatch_per_rank=2048", "sft.steps=3", "sft.samples_per_step=4", "train.steps=3"),
    *("train.prompts_per_step=4", "train.eval_samples_per_prompt=2"),
)
TINY_ROWS = 12
LOADED, WARM, TRAINED = "loaded", "warm-up", "grpo"
KINDS = ("greedy", "sampled")
SURE = 0.01
SHOWN = 10
MOST_CHARACTERS = 1_500
"""Of a shown response."""
CURVE = {
    "reward/mean": "reward",
    "loss": "loss",
    "response_tokens/mean": "response_tokens",
    "truncated": "truncated",
    "frac_groups_zero_std": "equal_groups",
    "entropy": "entropy",
    "mismatch/kl_k3": "kl_rollout",
    "grad_norm": "grad_norm",
    "seconds/step": "seconds",
    "seconds/generate": "generate_seconds",
}
"""What is kept of a step's metrics, and as what."""
BUCKETS = 10
"""Of steps, whose mean rewards are records."""


@dataclass
class Row:
    """An evaluation: of each question how right it was answered, by kind, and its greedy response."""

    right: dict[str, list[float]]
    prompts: list[str]
    answers: list[str]
    responses: list[str]
    response_tokens: float
    """Mean of the sampled ones."""
    truncated: float
    """Share of all that the longest response cut off."""
    seconds: float


@dataclass
class Found:
    """What a run came to so far."""

    rows: dict[str, Row] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    lines: list[dict[str, Any]] = field(default_factory=list)
    """Of metrics.jsonl."""

    def gains(self) -> dict[str, Gain]:
        """Return what GRPO gained over the warm-up, by kind; {} before there is an evaluation after it."""
        if TRAINED not in self.rows:
            return {}
        before, after = self.rows[WARM], self.rows[TRAINED]
        return {kind: paired_bootstrap(before.right[kind], after.right[kind]) for kind in KINDS}


def row_of(lines: Sequence[Mapping[str, Any]], metrics: Mapping[str, float], seconds: float) -> Row:
    """Return an evaluation's row. lines: what it wrote to samples.jsonl, samples of a prompt one round of prompts after the other."""
    greedy = [one for one in lines if one["kind"] == "greedy"]
    sampled = [one for one in lines if one["kind"] == "eval"]
    count, left = divmod(len(sampled), len(greedy))
    if left or [one["prompt"] for one in sampled] != count * [one["prompt"] for one in greedy]:
        raise AssertionError("sampled and greedy answers are not of the same questions")
    each = [sampled[i :: len(greedy)] for i in range(len(greedy))]
    return Row(
        {
            "greedy": [float(one["correct"]) for one in greedy],
            "sampled": [statistics.fmean(float(one["correct"]) for one in of) for of in each],
        },
        [one["prompt"] for one in greedy],
        [one["answer"] for one in greedy],
        [one["response"] for one in greedy],
        metrics["response_tokens"],
        statistics.fmean(one["finish"] == "length" for one in lines),
        seconds,
    )


def evaluated(s: Session, step: int) -> Row:
    """Evaluate the present policy on all questions."""
    from quintet.train.evaluate import evaluate

    file, began = s.observer.directory.samples, time.monotonic()
    before = file.stat().st_size if file.exists() else 0
    metrics = evaluate(s, step, show_all=True)
    with file.open("rb") as written:
        written.seek(before)
        lines = [json.loads(line) for line in written]
    return row_of(lines, metrics, time.monotonic() - began)


def reinforced(s: Session, until: float) -> int:
    """Take steps of GRPO as `quintet.train.ppo.reinforce` does, until the clock is at `until`; returns how many."""
    from quintet.data.stream import PromptStream
    from quintet.train.algorithms import algorithm_of
    from quintet.train.ppo import take_step
    from quintet.train.source import Source
    from quintet.train.step_metrics import record as record_step
    from quintet.train.steps import Step

    assert s.inputs.train is not None
    algorithm = algorithm_of(s.recipe, s.controller.roles)
    stream = PromptStream(
        s.inputs.train, seed=s.recipe.run.seed, shuffle=s.recipe.data.shuffle, lengths=s.lengths
    )
    source = Source(s, stream)
    for one in algorithm.trained:
        steps = one.steps * s.recipe.train.mini_batches_per_step
        s.controller.start_optimizer(one.optimizer, steps, one.role.name)
    s.saver.begin("rl", stream)
    s.begin_steps(0)
    began = time.monotonic()
    for number in range(1, s.recipe.train.steps + 1):
        step = Step(number)
        take_step(s, algorithm, source, step)
        record_step(s, step)
        s.saver.after_step(number, last=False)
        now = time.monotonic()
        if now + (now - began) / number > until:
            s.observer.note(f"the time is up after {number} steps of {s.recipe.train.steps}")
            return number
    return s.recipe.train.steps


def run(recipe: Recipe, args: argparse.Namespace) -> Found:
    """Evaluate, warm up, evaluate, train, evaluate; after each part all that is known is written."""
    from quintet.runs.ledger import read_metrics
    from quintet.train.session import session
    from quintet.train.sft import run_sft

    found = Found()
    with session(recipe, "train") as s:

        def told(part: str, since: float) -> float:
            now = time.monotonic()
            found.seconds[part] = now - since
            found.lines = read_metrics(s.observer.directory.metrics)
            written(found, recipe, args)
            return now

        assert recipe.sft is not None
        now = told("start", BEGAN)
        found.rows[LOADED] = evaluated(s, 0)
        now = told("evaluate_loaded", now)
        run_sft(s, recipe.sft, recipe.sft.optimizer)
        now = told("warm_up", now)
        found.rows[WARM] = evaluated(s, 0)
        now = told("evaluate_warm_up", now)
        last = max(found.rows[WARM].seconds, found.rows[LOADED].seconds)
        steps = reinforced(s, BEGAN + args.limit_s - 1.2 * last - args.end_s)
        now = told("grpo", now)
        found.rows[TRAINED] = evaluated(s, steps)
        told("evaluate_grpo", now)
        s.finish()
    return found


def curve_of(lines: Sequence[Mapping[str, Any]], stage: str) -> list[dict[str, Any]]:
    """Return what is kept of each step of a stage."""
    steps = [one for one in lines if one["stage"] == stage and one.get("loss") is not None]
    return [
        {"step": one["step"]}
        | {name: round(one[key], 5) for key, name in CURVE.items() if isinstance(one.get(key), int | float)}
        for one in steps
    ]


def chosen(rows: Mapping[str, Row]) -> list[int]:
    """Return the questions that are shown: half of them spread evenly over the file, the others the first that GRPO alone got right,
    where there are so many."""
    count = len(rows[LOADED].prompts)
    spread = [i * count // SHOWN for i in range(SHOWN)]
    if TRAINED not in rows:
        return spread
    new = [
        i
        for i in range(count)
        if rows[TRAINED].right["greedy"][i] and not rows[WARM].right["greedy"][i] and i not in spread[::2]
    ]
    even = spread[::2] if len(new) >= SHOWN // 2 else spread[: SHOWN - len(new)]
    return sorted({*even, *new[: SHOWN - len(even)]})


def shown(rows: Mapping[str, Row]) -> list[dict[str, Any]]:
    """Return ten questions with the greedy responses of each row."""
    return [
        {
            "question": i + 1,
            "prompt": rows[LOADED].prompts[i],
            "answer": rows[LOADED].answers[i],
            "responses": {
                name: {"text": row.responses[i][:MOST_CHARACTERS], "right": bool(row.right["greedy"][i])}
                for name, row in rows.items()
            },
        }
        for i in chosen(rows)
    ]


def records_of(found: Found, recipe: Recipe, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return what is recorded: accuracies beside those of the row before, and of GRPO how certain its gain is."""
    place = "/".join([args.name, "lora" if recipe.lora is not None else "full"])
    made = []

    def keep(case: str, metric: str, value: float, unit: str, baseline: float | None = None) -> None:
        made.append(record("gsm8k", f"{place}/{case}", metric, value, unit, baseline=baseline))

    before: Row | None = None
    for name, row in found.rows.items():
        for kind in KINDS:
            beside = None if before is None else statistics.fmean(before.right[kind])
            keep(name, f"{kind}_accuracy", statistics.fmean(row.right[kind]), "fraction", beside)
        keep(name, "response_tokens", row.response_tokens, "tokens")
        keep(name, "truncated", row.truncated, "fraction")
        before = row
    for kind, gain in found.gains().items():
        for metric, value in (("gain", gain.mean), ("gain_low", gain.low), ("gain_high", gain.high)):
            keep(TRAINED, f"{kind}_{metric}", value, "fraction")
        keep(TRAINED, f"{kind}_p", gain.p, "probability")
    steps = curve_of(found.lines, "rl")
    size = -(-len(steps) // BUCKETS) or 1
    for at in range(0, len(steps), size):
        some = steps[at : at + size]
        case = f"{TRAINED}/steps{some[0]['step']}-{some[-1]['step']}"
        keep(case, "train_accuracy", statistics.fmean(one["reward"] for one in some), "fraction")
    if steps:
        keep(TRAINED, "steps", len(steps), "steps")
        keep(TRAINED, "step_s", statistics.median(one["seconds"] for one in steps), "s")
    for part, seconds in found.seconds.items():
        keep("parts", f"{part}_s", seconds, "s")
    return made


def written(found: Found, recipe: Recipe, args: argparse.Namespace) -> None:
    """Write all that is known to gsm8k.json in `args.out`."""
    records = records_of(found, recipe, args)
    for one in records:
        check(one)
    told = {
        "records": records,
        "curve": {stage: curve_of(found.lines, stage) for stage in ("sft", "rl")},
        "samples": shown(found.rows) if LOADED in found.rows else [],
        "right": {name: row.right for name, row in found.rows.items()},
        "recipe": recipe.model_dump(mode="json", exclude_defaults=True),
    }
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "gsm8k.json").write_text(json.dumps(told, ensure_ascii=False) + "\n", encoding="utf-8")


def write_tiny(directory: Path) -> None:
    """Write few rows of GSM8K's form."""
    draw = random.Random(0)
    for name in ("train", "test"):
        rows = []
        for _ in range(TINY_ROWS):
            a, b = draw.randrange(2, 9), draw.randrange(2, 9)
            question = f"Ann has {a} apples and gets {b} more. How many are there?"
            rows.append({"question": question, "answer": f"{a}+{b}=<<{a}+{b}={a + b}>>{a + b}\n#### {a + b}"})
        text = "".join(json.dumps(one) + "\n" for one in rows)
        (directory / f"{name}.jsonl").write_text(text, encoding="utf-8")


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line; ends the program with code 2 where something is missing."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("overrides", nargs="*", metavar="key=value", help="of the recipe")
    add("--model", type=Path, help="SmolLM2's Hugging Face directory, as tools/smollm2.py makes it")
    add("--train", type=Path, help="GSM8K's training questions, jsonl")
    add("--test", type=Path, help="GSM8K's test questions, jsonl")
    add("--out", type=Path, help="directory of gsm8k.json (default runs/gsm8k/MODEL/full, or /lora)")
    add("--lora", action="store_true", help="train adapters alone")
    add("--limit-s", type=float, default=520, help="seconds of the whole command (default 520)")
    add("--end-s", type=float, default=20, help="of these, for writing the model and ending (default 20)")
    add("--tiny", action="store_true", help="a dry run on a CPU")
    args = parser.parse_args(argv)
    for option in ("model", "train", "test"):
        path = getattr(args, option)
        if args.tiny and path is not None:
            parser.error(f"--tiny makes its own: leave --{option} out")
        if not args.tiny and (path is None or not path.exists()):
            parser.error(f"--{option}: there is no {path}" if path else f"--{option} is missing")
    if wrong := [one for one in args.overrides if "=" not in one]:
        parser.error(f"{wrong[0]}: expected key=value")
    args.name = "tiny" if args.tiny else args.model.resolve().name.lower()
    args.out = args.out or Path("runs", "gsm8k", args.name, "lora" if args.lora else "full")
    return args


def words_of(args: argparse.Namespace, directory: Path) -> list[str]:
    """Return the overrides of the recipe. directory: where the run, and what is made for it, goes."""
    if args.tiny:
        write_tiny(directory)
    train, test = (
        directory / f"{one}.jsonl" if args.tiny else getattr(args, one) for one in ("train", "test")
    )
    words = [f"run.dir={directory / 'runs'}", f"data.train_path={train}", f"data.eval_path={test}"]
    words += TINY if args.tiny else [f"model.path={args.model}"]
    return [*words, *(LORA if args.lora else ()), *args.overrides]


def table(found: Found) -> str:
    """Return what is printed at the end."""
    lines = [f"{'':10} {'greedy':>8} {'sampled':>8} {'tokens':>8} {'truncated':>10}"]
    for name, row in found.rows.items():
        shares = " ".join(f"{statistics.fmean(row.right[kind]):8.2%}" for kind in KINDS)
        lines.append(f"{name:10} {shares} {row.response_tokens:8.0f} {row.truncated:10.1%}")
    for kind, gain in found.gains().items():
        lines.append(f"{kind}: {gain.mean:+.2%} ({gain.low:+.2%} to {gain.high:+.2%}), p = {gain.p:.5f}")
    lines += [f"  {part}: {seconds:.1f} s" for part, seconds in found.seconds.items()]
    return "\n".join(lines)


@user_errors_told()
def main(argv: list[str] | None = None) -> int:
    """Run all of it, print what it came to, and judge."""
    args = arguments(argv)
    from quintet.recipe.loader import load_recipe

    with tempfile.TemporaryDirectory(prefix="quintet-gsm8k-") as directory:
        recipe = load_recipe(RECIPE, words_of(args, Path(directory)))
        found = run(recipe, args)
    print(table(found), flush=True)
    unsure = [kind for kind, gain in found.gains().items() if gain.p >= SURE]
    if unsure and not args.tiny:
        print(f"FAILED no certain gain: {', '.join(unsure)}", flush=True)
    return int(bool(unsure) and not args.tiny)


if __name__ == "__main__":
    sys.exit(main())
