"""Is what FP8 computes right? Fifty steps beside bf16, log-probs that repeat to the bit, copies of weights that are never old.

    python -m benchmarks.fp8_proof              on one GPU: an 8B-shaped dense and a 30B-A3B-shaped model, two layers of each
    python -m benchmarks.fp8_proof --shape 8b --fp8 blockwise    one of them, by one recipe
    python -m benchmarks.fp8_proof --tiny       on a CPU, in bf16: the plumbing

The models have 4,096 words in place of 151,936: embedding and head are not computed in 8 bits, and only take time and memory.
Prints a line a claim, with its figure; exit status 1 if one does not hold; the figures become records:

- 50 steps on fresh text of a language of 256 words and known entropy (`mtp_work.Language`) have finite losses and gradient norms, bf16 has learnt a tenth
  of its first loss or more, and the mean loss of the last ten, of text that no step has trained on yet, is within 2% of bf16's, from the same
  weights on the same text;
- old log-probs of an unchanged policy are the first log-probs of an update, bit for bit, one plan, without recompute; with replayed
  routes, too; and with those routes told as a rollout tells them, by sample, where no token would choose otherwise;
- with full recompute, and with half of the optimizer on the CPU, losses and gradient norms are those without, to 1e-3;
- after a step, after offload and reload, after a checkpoint was loaded, and in another engine that resumes from one, every copy of a
  weight in 8 bits that a run multiplies by is the one made afresh of the weight, bit for bit, and none is left when the run is done;
- TransformerEngine's blocks are those that a rollout is sent (blockwise).
"""

from __future__ import annotations

import argparse
import gc
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.engine_work import TINY, Setup, parse_engine, setup_of
from benchmarks.mtp_work import Language
from benchmarks.records import RESULTS, merged, record, write_records

STEPS = 50
WORDS = 4096
SPOKEN = 256
"""Of the words, those that texts have. A language of all of them is learnt in one late jump, before or behind which the same training in bf16
is 5% apart from itself by the last bits of attention's gradients; this one is learnt to its end in 50 steps."""
LAYERS = 2
LOSS_APART, AGAIN_APART = 0.02, 1e-3
LEARNT = 0.9
"""Of the first loss, what bf16's last may be at most: two models that learn nothing are as good as each other."""
CASES = {"8b": "qwen3-8b", "30b-a3b": "qwen3-30b-a3b"}
OPTIMIZER = {"lr": 4e-4, "warmup_steps": 10}
"""With Adam a whole first step would go by the signs of gradients, those that are noise among them."""
RECIPES = ("blockwise", "tensorwise")


Pairs = list[tuple[float, float]]
"""Loss and gradient norm of each step."""


class Claims:
    """What was claimed of a model and recipe, whether all held, and the records of it. case: of the records; `name` is what lines begin with."""

    def __init__(self) -> None:
        self.held, self.name, self.case = True, "", ""
        self.records: list[dict[str, Any]] = []

    def tell(
        self,
        what: str,
        figure: str,
        holds: bool,
        value: tuple[str, float, str] | None = None,
        baseline: float | None = None,
    ) -> None:
        """Print a claim. value: metric, number and unit, where there is a number to keep."""
        print(f"{'holds ' if holds else 'FAILED'} {self.name}, {what}: {figure}", flush=True)
        self.held = self.held and holds
        if value is not None and math.isfinite(value[1]):
            metric, number, unit = value
            self.records.append(record("fp8", self.case, metric, number, unit, baseline=baseline))


def copies(chunks: Iterable[Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yield name, weight and its copy in 8 bits, of all that are there."""
    for chunk in chunks:
        for path, module in chunk.named_modules():
            for name, copy in getattr(module, "_fp8_workspaces", {}).items():
                yield f"{path}.{name}", getattr(module, name).detach(), copy


@contextmanager
def copies_seen(seen: list[tuple[int, list[str]]]) -> Iterator[None]:
    """Note at the end of each run how many copies there are, and which are not what the weight would be rounded to now."""
    import torch

    from quintet.engine import fp8

    drop = fp8.drop_copies

    def look(chunks: Any) -> None:
        found = list(copies(chunks))
        old = []
        for name, weight, copy in found:
            fresh = copy._quantizer.copy()
            fresh.set_usage(rowwise=True, columnwise=False)
            if not torch.equal(fresh.quantize(weight).dequantize(), copy.dequantize()):
                old.append(name)
        seen.append((len(found), old))
        drop(chunks)

    fp8.drop_copies = look
    try:
        yield
    finally:
        fp8.drop_copies = drop


def language_of(setup: Setup) -> Language:
    """What the texts are in."""
    return Language(min(SPOKEN, setup.shape.vocab_size))


def texts(setup: Setup, step: int) -> list[list[Any]]:
    """The rows of a step. Random tokens, met again and again, would be learnt by heart: of a loss that goes to zero no share is small."""
    import torch

    language = language_of(setup)
    seeds = iter(range(1000 * step, 1000 * (step + 1)))
    return [[torch.tensor(language.text(n, seed=next(seeds))) for n in row] for row in setup.rows(step)[0]]


class Case:
    """A model, and the loops that train it. Of each step all have the same text, and all begin from the same weights."""

    def __init__(self, shape: str, tiny: bool, engine: dict[str, Any] | None = None) -> None:
        import torch

        self.tiny, self.engine = tiny, engine or {}
        self.steps = 3 if tiny else STEPS
        self.device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
        backend = "portable" if tiny else "transformer_engine"
        size = {"tokens": None if tiny else 4096, "microbatches": 2}
        setup = setup_of(shape if tiny else CASES[shape], backend=backend, **size)
        words = None if tiny else WORDS
        self.plain = replace(setup, layers=LAYERS, steps=self.steps, vocab_size=words)
        self.texts = [texts(self.plain, step) for step in range(self.steps)]

    def loop(self, fp8: str | None = None, recompute: str = "none", on_cpu: float = 0.0) -> Any:
        from benchmarks.engine_worker import QuintetLoop
        from quintet.recipe import schema

        self.settle()
        setup = replace(self.plain, recompute=recompute, engine={"fp8": fp8, **self.engine})
        made = QuintetLoop(
            setup,
            schema.Optimizer(cpu_fraction=on_cpu, **OPTIMIZER),
            self.device,
        )
        for step, rows in enumerate(self.texts):
            made.prepare(step, rows)
        return made

    def train(self, made: Any, steps: int) -> Pairs:
        """Train the first so many steps."""
        return [made.step(step) for step in range(steps)]

    def settle(self) -> None:
        """Give back the memory of loops that are done with; engines are full of cycles."""
        import torch

        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def prove(
    shape: str, recipes: Sequence[str | None], claims: Claims, tiny: bool, engine: dict[str, Any]
) -> None:
    """All claims of one shape, by each recipe. engine: further keys of that section."""
    case = Case(shape, tiny, engine)
    theirs = case.train(case.loop(), case.steps)
    for recipe in recipes:
        began = time.perf_counter()
        claims.name = f"{shape} {recipe or 'bf16'}"
        claims.case = f"{shape}/gpus1/layers{LAYERS}/words{WORDS}/{recipe}/proof"
        prove_recipe(case, recipe, theirs, claims)
        print(f"       {claims.name}: {time.perf_counter() - began:.0f} s", flush=True)


def prove_recipe(case: Case, recipe: str | None, theirs: Pairs, claims: Claims) -> None:
    """All claims of one recipe. theirs: what bf16 came to."""
    from quintet.engine import fp8

    ours = case.loop(recipe)
    passes = {"log-probs of an update": ("logprobs_differ", partial(same_logprobs, ours, None))}
    if ours.engine.shape.moe is not None:
        passes["with replayed routes"] = (
            "replayed_logprobs_differ",
            partial(same_logprobs, ours, "replayed"),
        )
        passes["with routes that are told"] = ("told_routes_differ", partial(same_routes, ours))
    for what, (metric, compare) in passes.items():
        figure, differ, holds = compare()
        claims.tell(what, figure, holds, (metric, differ, "tokens"))
    found = case.train(ours, case.steps)
    same_loss(case, found, theirs, claims)

    again: dict[str, dict[str, Any]] = {"recompute": {"recompute": "full"}}
    if not case.tiny:  # on a CPU all of it is there already
        again["half of the optimizer on the CPU"] = {"on_cpu": 0.5}
    for what, how in again.items():
        pairs = zip(case.train(case.loop(recipe, **how), 2), found, strict=False)
        worst = max(abs(a / b - 1) for one, two in pairs for a, b in zip(one, two, strict=True))
        metric = "recompute_apart" if "recompute" in how else "cpu_optimizer_apart"
        claims.tell(what, f"{worst:.1e} apart", worst <= AGAIN_APART, (metric, worst, "fraction"))
    copies_are_fresh(ours, recipe, claims)
    if recipe == "blockwise":
        others = fp8.other_blocks(ours.engine.chunks)
        told = ("other_blocks", len(others), "weights")
        claims.tell("blocks", f"other than sent: {others or 'none'}", not others, told)

    with tempfile.TemporaryDirectory(prefix="quintet-fp8-") as directory:
        saved = Path(directory) / "saved"
        ours.engine.save(saved)
        del ours, passes, compare  # all that holds the engine
        resumed = case.loop(recipe)
        resumed.engine.load(saved)
        tell_copies(resumed, "resume", recipe, claims)


def same_loss(case: Case, found: Pairs, theirs: Pairs, claims: Claims) -> None:
    """Of the last ten steps, before each has trained on its text."""
    finite = all(math.isfinite(value) for pair in found for value in pair)
    ours, beside = (statistics.fmean(loss for loss, _ in one[-10:]) for one in (found, theirs))
    apart, share = ours / beside - 1, beside / theirs[0][0]
    learnt = case.tiny or share <= LEARNT  # three steps teach little
    figure = (
        f"loss {found[0][0]:.3f} → {ours:.3f}, {apart:+.2%} beside bf16's {beside:.3f}; the text has {language_of(case.plain).entropy:.3f} "
        f"nats a token{'' if finite else '; a loss or gradient norm is not finite'}"
        f"{'' if learnt else f'; bf16 learnt too little to tell: {share:.0%} of its first loss are left'}"
    )
    value = ("sft_loss", ours, "nats")
    claims.tell(f"{case.steps} steps", figure, finite and learnt and abs(apart) <= LOSS_APART, value, beside)


def same_logprobs(made: Any, routes: str | None) -> tuple[str, int, bool]:
    """Old log-probs against those of the update that follows, on the same cells. The weights stay. Returns what came out, the tokens that
    differ, and whether that is right."""
    import torch

    from quintet.data.batch import set_tokens
    from quintet.data.batch import tokens as flat
    from quintet.engine.routes import RecordedRoutes, ReplayedRoutes

    batch, cells = made.steps[0]
    recorded = RecordedRoutes() if routes else None
    old = made.engine.forward(batch, cells, routes=recorded).logprobs
    set_tokens(batch, "place", torch.arange(len(flat(batch, "loss_mask"))))
    new = torch.full_like(old, math.nan)

    def watched(outputs: Any, fields: Any) -> Any:
        new[fields["place"].long().cpu()] = outputs.logprobs.detach().float().cpu()
        return made.objective(outputs, fields)

    replayed = ReplayedRoutes(recorded) if recorded is not None else None
    made.engine.forward_backward(batch, cells, watched, routes=replayed)
    trained = flat(batch, "loss_mask") > 0
    other = int((old[trained] != new[trained]).sum())
    return f"{other} of {int(trained.sum())} tokens differ", other, other == 0


def same_routes(made: Any) -> tuple[str, int, bool]:
    """Log-probs by the routes that tokens choose against those by the same routes as a rollout tells them: by sample, none of a last
    token. Where rows were padded by another rule than routes are laid out by, tokens would be told those of others."""
    import torch

    from quintet.data.batch import lengths
    from quintet.engine.routes import BatchRoutes, RecordedRoutes

    batch, cells = made.steps[0]
    recorded, sizes = RecordedRoutes(), lengths(batch)
    free = made.engine.forward(batch, cells, routes=recorded).logprobs
    told = {}
    for cell, kept in zip(cells, recorded.kept, strict=True):
        ends = [0]
        for i in cell.samples:
            told[i] = kept[ends[-1] : ends[-1] + sizes[i] - 1]
            ends.append(ends[-1] + sizes[i])
    routes = BatchRoutes(torch.nested.nested_tensor([told[i] for i in sorted(told)], layout=torch.jagged))
    prescribed = made.engine.forward(batch, cells, routes=routes).logprobs
    others = sum(other for other, _ in routes.parted().values())
    tokens = {count for _, count in routes.parted().values()}
    differ = int((free != prescribed).sum())
    said = f"{differ} of {len(free)} tokens differ, {others} would choose otherwise"
    right = differ == others == 0 and tokens == {sum(sizes) - len(sizes)}
    return said, max(differ, others), right


def copies_are_fresh(made: Any, recipe: str | None, claims: Claims) -> None:
    """Of a run after each thing that changes weights or moves them."""
    engine = made.engine
    with tempfile.TemporaryDirectory(prefix="quintet-fp8-") as directory:
        saved = Path(directory) / "saved"

        def load() -> None:
            engine.save(saved)
            made.step(0)
            engine.load(saved)

        def offload() -> None:
            engine.offload(params=1.0, grads=1.0, optimizer=1.0)
            engine.reload()

        moves: dict[str, Callable[[], Any]] = {
            "a step": lambda: made.step(0),
            "offload": offload,
            "load": load,
        }
        for what, move in moves.items():
            move()
            tell_copies(made, what, recipe, claims)


def tell_copies(made: Any, what: str, recipe: str | None, claims: Claims) -> None:
    """Claim that the next run after something multiplies by no old copy, and leaves none."""
    seen: list[tuple[int, list[str]]] = []
    with copies_seen(seen):
        made.engine.forward(*made.steps[0])
    number, old = seen[-1]
    left = len(list(copies(made.engine.chunks)))
    figure = f"{number} copies, {len(old)} old {old[:2]}, {left} left"
    holds = not old and not left and (number > 0) is bool(recipe)
    metric = f"old_copies_after_{what.split()[-1]}"
    claims.tell(f"copies after {what}", figure, holds, (metric, len(old), "copies"))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.fp8_proof", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument(
        "--shape", choices=list(CASES), action="append", help="may be repeated (default: both)"
    )
    parser.add_argument("--fp8", choices=RECIPES, action="append", help="may be repeated (default: both)")
    parser.add_argument(
        "--engine",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a further key of a recipe's section engine; may be repeated",
    )
    parser.add_argument("--tiny", action="store_true", help="on a CPU, in bf16: the plumbing")
    parser.add_argument(
        "--out",
        type=Path,
        help="records are merged into this file (default: benchmarks/results/fp8.json)",
    )
    args = parser.parse_args(argv)
    if args.tiny and (args.shape or args.fp8 or args.out):
        parser.error(
            "--tiny is a dry run in bf16, of which nothing is kept: leave --shape, --fp8 and --out out"
        )
    place = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29519",
    }
    os.environ.update({key: value for key, value in place.items() if key not in os.environ})
    import torch
    import torch.distributed as dist

    if not (args.tiny or torch.cuda.is_available()):
        print("no GPU was found; --tiny tries the plumbing without one", file=sys.stderr)
        return 1
    from benchmarks.engine_worker import join

    join()
    claims = Claims()
    for shape in TINY if args.tiny else args.shape or CASES:
        recipes = (None,) if args.tiny else args.fp8 or RECIPES
        prove(shape, recipes, claims, args.tiny, parse_engine(args.engine))
        if not args.tiny and claims.held:
            out = args.out or RESULTS / "fp8.json"
            write_records(out, merged(out, claims.records))
    dist.destroy_process_group()
    return int(not claims.held)


if __name__ == "__main__":
    sys.exit(main())
