"""Is what FP8 computes right? Fifty steps beside bf16, log-probs that repeat to the bit, copies of weights that are never old.

    python -m benchmarks.fp8_proof              on one H200: an 8B-shaped dense and a 30B-A3B-shaped model, two layers of each
    python -m benchmarks.fp8_proof --tiny       on a CPU, in bf16: the plumbing

Prints a line a claim, with its figure; exit status 1 if one does not hold:

- 50 steps on fresh text of a language of known entropy (`mtp_work.Language`) have finite losses and gradient norms, and the mean loss of the
  last ten is within 2% of bf16's;
- old log-probs of an unchanged policy are the first log-probs of an update, bit for bit, one plan, without recompute; with replayed
  routes, too; and with those routes told as a rollout tells them, by sample, where no token would choose otherwise;
- with full recompute, and with half of the optimizer on the CPU, losses and gradient norms are those without, to 1e-3;
- after a step, after offload and reload, and after a checkpoint was loaded, every copy of a weight in 8 bits that a run multiplies by
  is the one made afresh of the weight, bit for bit, and none is left when the run is done;
- TransformerEngine's blocks are those that a rollout is sent (blockwise).
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.engine_work import TINY, Setup, setup_of
from benchmarks.mtp_work import Language

STEPS, LR = 50, 1e-4
LOSS_APART, AGAIN_APART = 0.02, 1e-3
CASES = {"8b": "qwen3-8b", "30b-a3b": "qwen3-30b-a3b"}


class Claims:
    """What was claimed, and whether all held."""

    def __init__(self) -> None:
        self.held = True

    def tell(self, what: str, figure: str, holds: bool) -> None:
        print(f"{'holds ' if holds else 'FAILED'} {what}: {figure}", flush=True)
        self.held = self.held and holds


@contextmanager
def copies_seen(seen: list[tuple[int, list[str]]]) -> Iterator[None]:
    """Note at the end of each run how many copies there are, and which are not what the weight would be rounded to now."""
    import torch

    from quintet.engine import fp8

    drop = fp8.drop_copies

    def look(chunks: Any) -> None:
        found = list(fp8.copies(chunks))
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


def texts(setup: Setup, step: int) -> list[list[Any]]:
    """The rows of a step. Random tokens, met again and again, would be learnt by heart: of a loss that goes to zero no share is small."""
    import torch

    language = Language(min(4096, setup.shape.vocab_size))
    seeds = iter(range(1000 * step, 1000 * (step + 1)))
    return [[torch.tensor(language.text(n, seed=next(seeds))) for n in row] for row in setup.rows(step)[0]]


def prove(shape: str, recipe: str | None, claims: Claims, tiny: bool) -> None:
    """All claims of one shape and recipe."""
    import torch

    from benchmarks.engine_worker import OPTIMIZER, QuintetLoop
    from quintet.engine import fp8

    name = f"{shape} {recipe or 'bf16'}"
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    backend = "portable" if tiny else "transformer_engine"
    plain = setup_of(
        shape if tiny else CASES[shape], backend=backend, tokens=None if tiny else 4096, microbatches=2
    )
    count = 3 if tiny else STEPS
    plain = replace(plain, layers=2, steps=count)

    def loop(fp8: str | None = None, recompute: str = "none", on_cpu: float = 0.0) -> Any:
        setup = replace(plain, recompute=recompute, engine={"fp8": fp8})
        made = QuintetLoop(setup, OPTIMIZER.model_copy(update={"cpu_fraction": on_cpu, "lr": LR}), device)
        for step in range(setup.steps):
            made.prepare(step, texts(setup, step))
        return made

    def train(made: Any, steps: int) -> list[tuple[float, float]]:
        return [made.step(step) for step in range(steps)]

    ours = loop(recipe)
    claims.tell(f"{name}, log-probs of an update", *same_logprobs(ours, None))
    if ours.engine.shape.moe is not None:
        claims.tell(f"{name}, with replayed routes", *same_logprobs(ours, "replayed"))
        claims.tell(f"{name}, with routes that are told", *same_routes(ours))
    found = train(ours, count)
    theirs = train(loop(), count)
    finite = all(math.isfinite(value) for pair in found for value in pair)
    ends = [statistics.fmean(loss for loss, _ in one[-10:]) for one in (found, theirs)]
    apart = ends[0] / ends[1] - 1
    figure = f"loss {found[0][0]:.3f} → {ends[0]:.3f}, {apart:+.2%} beside bf16's {ends[1]:.3f}"
    claims.tell(f"{name}, {count} steps", figure, finite and abs(apart) <= LOSS_APART)

    again: dict[str, dict[str, Any]] = {"recompute": {"recompute": "full"}}
    if not tiny:  # on a CPU all of it is there already
        again["half of the optimizer on the CPU"] = {"on_cpu": 0.5}
    for what, how in again.items():
        pairs = zip(train(loop(recipe, **how), 2), found, strict=False)
        worst = max(abs(a / b - 1) for one, two in pairs for a, b in zip(one, two, strict=True))
        claims.tell(f"{name}, {what}", f"{worst:.1e} apart", worst <= AGAIN_APART)
    copies_are_fresh(ours, recipe, name, claims)
    if recipe == "blockwise":
        others = fp8.other_blocks(ours.engine.chunks)
        claims.tell(f"{name}, blocks", f"other than sent: {others or 'none'}", not others)


def same_logprobs(made: Any, routes: str | None) -> tuple[str, bool]:
    """Old log-probs against those of the update that follows, on the same cells. The weights stay."""
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
    return f"{other} of {int(trained.sum())} tokens differ", other == 0


def same_routes(made: Any) -> tuple[str, bool]:
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
    return said, differ == others == 0 and tokens == {sum(sizes) - len(sizes)}


def copies_are_fresh(made: Any, recipe: str | None, name: str, claims: Claims) -> None:
    """Of a run after each thing that changes weights or moves them."""
    from quintet.engine import fp8

    engine, (batch, cells) = made.engine, made.steps[0]
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
            seen: list[tuple[int, list[str]]] = []
            with copies_seen(seen):
                engine.forward(batch, cells)
            number, old = seen[-1]
            left = len(list(fp8.copies(engine.chunks)))
            figure = f"{number} copies, {len(old)} old {old[:2]}, {left} left"
            claims.tell(
                f"{name}, copies after {what}", figure, not old and not left and (number > 0) is bool(recipe)
            )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.fp8_proof", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--tiny", action="store_true", help="on a CPU, in bf16: the plumbing")
    args = parser.parse_args(argv)
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
    for shape in TINY if args.tiny else CASES:
        for recipe in (None,) if args.tiny else ("blockwise", "tensorwise"):
            prove(shape, recipe, claims, args.tiny)
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
    dist.destroy_process_group()
    return int(not claims.held)


if __name__ == "__main__":
    sys.exit(main())
