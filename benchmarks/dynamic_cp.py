"""What dynamic context parallelism gains: each step planned by it, beside plans of static cells, on one engine in turns.

    python -m benchmarks.dynamic_cp --gpus 4                             Qwen3-8B's shape over NVLink, both mixes of lengths
    python -m benchmarks.dynamic_cp --gpus 4 --shape qwen3-30b-a3b       a mixture of experts, 12 of its 48 layers
    python -m benchmarks.dynamic_cp --gpus 4 --slow-links                GPUs that reach each other as nodes do
    python -m benchmarks.dynamic_cp --gpus 4 --old-logprobs              steps as GRPO's on one batch, but for the generation
    python -m benchmarks.dynamic_cp --gpus 4 --step                      and whole GRPO steps, with vLLM
    python -m benchmarks.dynamic_cp --gpus 4 --plans 200                 random plans, whose losses and gradients are compared
    python -m benchmarks.dynamic_cp --gpus 1 --write                     the model of time alone, for the planner of runs
    python -m benchmarks.dynamic_cp --gpus 2 --shape tiny --step         a dry run, on a CPU

First the links and the model of time are measured, then each way to plan is tried; those that are compared then take turns.
What is measured and how: benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.dynamic_cp_step import measure_steps
from benchmarks.dynamic_cp_work import (
    Point,
    Work,
    candidates,
    fit,
    layouts_of_plans,
    modelled,
    points,
    work_of,
)
from benchmarks.dynamic_cp_work import Side as Planned
from benchmarks.engine_work import parse_engine
from benchmarks.options import layout_name, positive_int
from benchmarks.records import RESULTS, command, commit, merged, record, write_records
from benchmarks.room import GIB, card_bytes, deepest
from benchmarks.sides import Side, answer_stream
from quintet.cluster.environment import FP32_PRODUCTS
from quintet.packing.measured import OFFERED, TABLE, MeasuredCosts, layer_of, write_measured
from quintet.packing.plan import Plan
from quintet.packing.time_model import CellCosts

SLOW = {"NCCL_P2P_DISABLE": "1"}
"""No NVLink: GPUs reach each other through memory of the host, at about the rate of links between nodes."""
TOLERANCE = {"bf16": 1e-2, "fp32": 1e-4}
"""Of losses and gradient norms of the same samples."""
AIMS = {
    ("longest", "share_of_ceiling"): (0.9, math.inf),
    ("longest-slow-links", "tokens_per_s"): (1.7, math.inf),
    ("longest", "seconds_as_modelled"): (0.85, 1.15),
    ("best_static", "tokens_per_s"): (1.2, math.inf),
    ("step", "tokens_per_s"): (1.15, math.inf),
}
"""By the end of a case's name and its metric: between what the value, or its ratio to the baseline, is to be."""
NOT_ON_ONE = (
    "One GPU alone has nobody to share a row with: what ranks exchange, ceiling, longest, best_static, step and plans are not measured; "
    "the other constants of the model of time are, with --gpus 1"
)
FITS = 0.15
"""How far the model of time may be from what was measured for runs to plan by its constants."""
ROUNDS_TIMED = 4
"""Of a calibration's pass: the time of a micro-batch is what all but one of them take more than one."""


class Ran(NamedTuple):
    """What a step came to on all ranks."""

    seconds: float
    loss: float
    norm: float
    peak_gib: float


class Machine:
    """The ranks, and what is known of their speed."""

    def __init__(self, ranks: Side, work: Work) -> None:
        self.ranks, self.work = ranks, work
        self.costs, self.token_s, self.step_s = CellCosts(quadratic=work.model.quadratic), 0.0, 0.0
        self.worst = math.inf
        """How far a micro-batch's time is from what the fitted model says, as a share of it, at the most."""

    def take(self, lengths: Sequence[int]) -> None:
        """Make these lengths the samples that plans are of."""
        self.ranks.ask(do="batch", lengths=list(lengths))

    def step(self, plan: Plan) -> Ran:
        """Take a step by a plan; it ends with its slowest rank, and losses are shares."""
        rounds = [[[cell.samples, cell.ranks.start, cell.cp] for cell in row] for row in plan.rounds]
        told = self.ranks.ask(do="step", rounds=rounds)
        seconds, peak = (max(one[name] for one in told) for name in ("seconds", "peak_gib"))
        # A cell's loss is told by its first rank alone.
        return Ran(seconds, sum(one["loss"] for one in told), told[0]["norm"], peak)

    def calibrate(self, turns: int) -> list[tuple[Point, float, float]]:
        """Time micro-batches, and fit the model of time to them. Returns of each point its seconds, measured and modelled."""
        found, fixed = [], []
        for point in points(self.work):
            seconds: dict[int, list[float]] = {1: [], ROUNDS_TIMED: []}
            for number in range(1 + turns):
                for rounds, spent in seconds.items():
                    plan, lengths = point.plan(self.work.gpus, rounds)
                    self.take(lengths)
                    ran = self.step(plan)
                    spent += [ran.seconds] if number else []
            one, many = (statistics.median(spent) for spent in seconds.values())
            found.append((point, max((many - one) / (ROUNDS_TIMED - 1), 1e-6)))
            fixed.append(one - found[-1][1])
        self.token_s, self.costs = fit(found, self.work.gpus)
        self.step_s = max(statistics.median(fixed), 0.0)
        told = [(point, spent, self._micro_batch(point)) for point, spent in found]
        self.worst = max(abs(spent / expected - 1) for _, spent, expected in told)
        return told

    def _micro_batch(self, point: Point) -> float:
        plan, lengths = point.plan(self.work.gpus, 1)
        return self.token_s * modelled(plan, self.work, lengths, self.costs)

    def expected(self, plan: Plan, lengths: Sequence[int]) -> float:
        """Return the seconds that a step is modelled to take."""
        return self.step_s + self.token_s * modelled(plan, self.work, lengths, self.costs)


def calibrated(machine: Machine, turns: int, ending: str) -> list[dict[str, Any]]:
    """Measure the links and the constants of the model of time; their records."""
    work, told = machine.work, machine.ranks.ask(do="engine")
    print(f"{work.title}, {work.layers} layers, {work.gpus} ranks: {told[0]['layers']}", flush=True)
    case = f"{work.title}/{work.gpus}ranks/calibration{ending}"
    values = {"groups": (max(one["groups_mib"] for one in told), "MiB")}
    values["launch"] = (max(one["launch_us"] for one in told), "µs")
    if work.gpus > 1:
        gathered = machine.ranks.ask(do="links", mib=64 if work.most > 1024 else 1)
        values["gather"] = (min(one["gb_s"] for one in gathered), "GB/s")
    for point, measured, expected in machine.calibrate(turns):
        print(f"  {point}: {1e3 * measured:.2f} ms, modelled {1e3 * expected:.2f}", flush=True)
    costs = machine.costs
    values |= {
        "token": (1e6 * machine.token_s, "µs"),
        "fixed": (costs.fixed, "tokens"),
        "quadratic": (costs.quadratic, "tokens"),
        "step": (machine.step_s, "s"),
    }
    if work.gpus > 1:
        values |= {f"exchange_{2 << at}": (one, "tokens") for at, one in enumerate(costs.exchange)}
    return [record("dynamic_cp", case, name, value, unit) for name, (value, unit) in values.items()]


def measured(machine: Machine) -> MeasuredCosts:
    """Return the row of a calibrated machine in the table that runs plan by."""
    work, costs = machine.work, machine.costs
    device = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "cpu"
    told = command(), commit(), date.today().isoformat()
    return MeasuredCosts(
        device,
        layer_of(work.model),
        costs.fixed,
        costs.quadratic,
        costs.exchange if work.gpus > 1 else (),
        work.layers,
        *told,
    )


class Compared:
    """The ways to plan a mix of lengths: all tried once, then those that are compared in turns."""

    def __init__(self, machine: Machine, mix: str) -> None:
        self.machine, self.lengths = machine, machine.work.lengths(mix)
        every = candidates(machine.work, max(self.lengths))
        self.plans = {side: side.plan(machine.work, self.lengths, machine.costs) for side in every}
        machine.take(self.lengths)
        tried = {side: min(machine.step(plan).seconds for _ in range(2)) for side, plan in self.plans.items()}
        for side, seconds in tried.items():
            print(f"  {side.name}: {seconds:.3f} s, modelled {self.modelled(side):.3f}", flush=True)
        self.dynamic, self.longest = every[:2]
        self.best, self.best_dynamic = (
            min((side for side in every if side.dynamic == kind), key=tried.__getitem__)
            for kind in (False, True)
        )
        self.fitting = [n for n in self.lengths if n <= self.dynamic.budget]
        """What needs one rank alone."""

    def take_turns(self, turns: int) -> tuple[dict[Planned, list[Ran]], dict[Planned, list[Ran]]]:
        """Take steps by all that are compared, and of what fits one rank by cells of one and of all. SystemExit where sides
        differ in loss or gradient norm."""
        machine, budget = self.machine, self.dynamic.budget
        sides = dict.fromkeys((self.dynamic, self.longest, self.best, self.best_dynamic))
        found: dict[Planned, list[Ran]] = {side: [] for side in sides}
        single: dict[Planned, list[Ran]] = {Planned(cp, budget): [] for cp in (1, machine.work.gpus)}
        for _ in range(turns):
            for lengths, ran in ((self.fitting, single), (self.lengths, found)):
                machine.take(lengths)
                for side, of_side in ran.items():
                    of_side.append(machine.step(side.plan(machine.work, lengths, machine.costs)))
        for one in (found, single):
            same([ran for of_side in one.values() for ran in of_side], TOLERANCE[machine.work.dtype])
        return found, single

    def modelled(self, side: Planned) -> float:
        """Return the seconds that a step is modelled to take."""
        return self.machine.expected(self.plans[side], self.lengths)

    def bound(self, side: Planned) -> float:
        """Return the seconds that no plan takes less than, by the model of time."""
        told = self.plans[side].modelled
        assert told is not None
        return self.machine.step_s + self.machine.token_s * told.bound


def measure(compared: Compared, mix: str, turns: int, ending: str) -> list[dict[str, Any]]:
    """Compare ways to plan a mix of lengths; the records."""
    machine = compared.machine
    found, single = compared.take_turns(turns)
    seconds = {side: statistics.median(one.seconds for one in ran) for side, ran in found.items()}
    peak = {side: max(one.peak_gib for one in ran) for side, ran in found.items()}
    alone, shared = (statistics.median(one.seconds for one in ran) for ran in single.values())
    tokens, of_fitting = sum(compared.lengths), sum(compared.fitting)
    dynamic, longest, best = compared.dynamic, compared.longest, compared.best
    theirs = compared.best_dynamic
    gain = seconds[longest] / seconds[dynamic]
    values: list[tuple[str, str, float, str, float | None]] = [
        ("ceiling", "tokens_per_s", of_fitting / alone, "tokens/s", of_fitting / shared),
        ("longest", "tokens_per_s", tokens / seconds[dynamic], "tokens/s", tokens / seconds[longest]),
        ("longest", "bound_tokens_per_s", tokens / compared.bound(dynamic), "tokens/s", None),
        ("longest", "seconds_as_modelled", seconds[dynamic], "s", compared.modelled(dynamic)),
        ("longest", "static_seconds_as_modelled", seconds[longest], "s", compared.modelled(longest)),
        ("longest", "peak", peak[dynamic], "GiB", peak[longest] or None),
        ("best_static", "tokens_per_s", tokens / seconds[theirs], "tokens/s", tokens / seconds[best]),
        ("best_static", "bound_tokens_per_s", tokens / compared.bound(theirs), "tokens/s", None),
        ("best_static", "cp", best.cp, "ranks", None),
        ("best_static", "budget", theirs.budget, "tokens", best.budget),
    ]
    if alone < shared:  # of a loss there is no share
        values.append(("longest", "share_of_ceiling", gain * alone / shared, "fraction", None))
    case = f"{machine.work.title}/{machine.work.gpus}ranks/{mix}"
    return [
        record("dynamic_cp", f"{case}/{name}{ending}", metric, value, unit, baseline=baseline)
        for name, metric, value, unit, baseline in values
    ]


def same(ran: Sequence[Ran], tolerance: float) -> None:
    """SystemExit unless all losses and gradient norms are the same up to rounding."""
    for name in ("loss", "norm"):
        values = [getattr(one, name) for one in ran]
        if not math.isclose(min(values), max(values), rel_tol=tolerance):
            raise SystemExit(
                f"the sides did not do the same work: {name} from {min(values):.5f} to {max(values):.5f}"
            )


def run_plans(ranks: Side, work: Work, plans: int) -> list[dict[str, Any]]:
    """Run random plans, in each layout its share; their records. SystemExit where a loss or norm differs."""
    layouts, made = layouts_of_plans(work.gpus), []
    for at, (experts, layout, engine) in enumerate(layouts):
        share = plans * (at + 1) // len(layouts) - plans * at // len(layouts)
        told = ranks.ask(do="plans", experts=experts, layout=layout, engine=engine, plans=share)[0]
        sizes = "-".join([layout_name({**layout, "dynamic_cp": False}), *engine.values()])
        case = f"plans/{'experts' if experts else 'dense'}/{sizes}"
        print(
            f"  {case}: {share} plans in {told['seconds']:.1f} s, at most {told['worst']:.1e} apart",
            flush=True,
        )
        if not told["worst"] < TOLERANCE["fp32"]:
            raise SystemExit(
                f"{case}: a plan's loss or gradient norm is {told['worst']:.2e} from that of whole blocks"
            )
        made.append(record("dynamic_cp", case, "plans", share, "plans"))
        made.append(record("dynamic_cp", case, "difference", told["worst"], "fraction"))
    return made


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--shape", choices=[*OFFERED, "tiny", "tiny-moe"], default="qwen3-8b")
    add("--gpus", type=positive_int, choices=[1, 2, 4, 8], default=4, help="ranks, one GPU each (default 4)")
    add(
        "--layers",
        type=positive_int,
        help="of the model (default: 36 of 36 dense, 12 of 48 with experts; on one GPU what it holds)",
    )
    add(
        "--samples",
        type=positive_int,
        help="of a step (default: for each GPU 16 with a tail to 32k, 64 of NVIDIA's)",
    )
    add(
        "--most-tokens",
        type=positive_int,
        help="that a rank has memory for, the largest budget tried (default 16384)",
    )
    add(
        "--engine",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a further key of a recipe's section engine; may be repeated",
    )
    add("--mix", action="append", help="of lengths: tail32k or nvidia; may be repeated (default: both)")
    add("--turns", type=positive_int, default=5, help="how often the sides take their turn (default 5)")
    add(
        "--calibration-turns",
        type=positive_int,
        default=2,
        help="of each micro-batch that is timed (default 2)",
    )
    add("--slow-links", action="store_true", help="GPUs reach each other as nodes do")
    add(
        "--old-logprobs",
        action="store_true",
        help="a step has a pass for old log-probs before its update, as GRPO's",
    )
    add(
        "--step",
        action="store_true",
        help="whole GRPO steps besides, the best dynamic plan beside the best static one",
    )
    add("--memory-fraction", type=float, default=0.4, help="of a GPU, for vLLM in whole steps (default 0.4)")
    add("--plans", type=positive_int, help="run so many random plans instead")
    add("--timeout-s", type=float, default=300.0, help="longest silence of a rank (default 300)")
    add(
        "--write",
        action="store_true",
        help="keep records in benchmarks/results/dynamic_cp.json, and constants where runs plan by them",
    )
    add("--out", type=Path, default=RESULTS / "dynamic_cp.json", help="another file to merge them into")
    add("--table", type=Path, default=TABLE, help="of constants, into which --write puts the measured ones")
    add("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    for option in ("plans", "step"):
        if getattr(args, option) and args.gpus == 1:
            parser.error(f"--{option} needs ranks that share rows: --gpus 2, 4 or 8")
    if args.plans and args.engine:
        parser.error("--plans runs small models as they are: leave --engine out")
    if args.step and (args.slow_links or args.plans):
        parser.error(f"--step does not go with --{'plans' if args.plans else 'slow-links'}")
    there = torch.cuda.device_count()
    if not args.worker and 0 < there < args.gpus:
        parser.error(
            f"--gpus {args.gpus}: this machine has {there}. {NOT_ON_ONE if there == 1 else f'--gpus {there} or less runs here'}"
        )
    return args


def depth_on_one(args: argparse.Namespace, card: int | None) -> int | None:
    """Return the model's depth: what was asked for, or on a single GPU of which the size is known the most that it holds; None is the shape's
    own. SystemExit where it does not fit."""
    if args.gpus > 1 or card is None or args.shape.startswith("tiny"):
        return args.layers
    work = work_of(args.shape, 1, args.layers, args.samples, args.most_tokens)
    fits = deepest(lambda layers: replace(work, layers=layers).memory.peak, work.layers, card)
    if fits == 0 or (args.layers and fits < args.layers):
        raise SystemExit(
            f"{work.layers} layers of {args.shape} take {work.memory.peak / GIB:.0f} GiB of a card of {card / GIB:.0f}: "
            f"{f'--layers {fits} fits' if fits else '--most-tokens makes rows smaller'}"
        )
    return fits


def ending_of(args: argparse.Namespace) -> str:
    """What cases' names end in where a run is not the usual one."""
    sizes = {"samples": args.samples, "most": args.most_tokens}
    ending = "".join(f"-{name}{size}" for name, size in sizes.items() if size)
    return ending + "-old-logprobs" * args.old_logprobs + "-slow-links" * args.slow_links


def line_of(one: dict[str, Any]) -> str:
    """Return a record as it is printed: with its ratio to the baseline, and whether that is what is aimed at."""
    ratio = one["value"] / one["baseline"] if one["baseline"] else None
    beside = "" if ratio is None else f" beside {one['baseline']:,.4g}: {ratio:.3f}×"
    name = one["case"].rpartition("/")[2], one["metric"]
    if name in AIMS:
        low, high = AIMS[name]
        reached = low <= (one["value"] if ratio is None else ratio) <= high
        beside += f" (aim: {low:g} {'or more' if high == math.inf else f'to {high:g}'}, {'reached' if reached else 'missed'})"
    return f"{one['case']} {one['metric']}: {one['value']:,.4g} {one['unit']}{beside}"


def main() -> None:
    """Measure, print the records, and keep them where asked."""
    args = arguments()
    if not args.worker:
        args.layers = depth_on_one(args, card_bytes())
    work = work_of(args.shape, args.gpus, args.layers, args.samples, args.most_tokens)
    work = replace(work, engine=parse_engine(args.engine))
    if unknown := set(args.mix or []) - set(work.mixes):
        raise SystemExit(f"--mix: no {', '.join(sorted(unknown))}; there are {', '.join(work.mixes)}")
    if args.worker:
        stream = answer_stream()
        from benchmarks.dynamic_cp_worker import serve

        serve(work, args.old_logprobs, stream)
        return
    same_work = ["--shape", args.shape, "--gpus", str(args.gpus)]
    for option, value in (("--layers", args.layers), ("--most-tokens", args.most_tokens)):
        same_work += [option, str(value)] if value else []
    same_work += ["--old-logprobs"] if args.old_logprobs else []
    same_work += [word for one in args.engine for word in ("--engine", one)]
    ranks = Side(
        f"{work.title} on {args.gpus} ranks",
        ["benchmarks.dynamic_cp", "--worker", *same_work],
        ranks=args.gpus,
        timeout_s=args.timeout_s,
        environment=(SLOW if args.slow_links else {}) | (FP32_PRODUCTS if args.plans else {}),
    )
    try:
        ranks.answer()
        if args.plans:
            made = run_plans(ranks, work, args.plans)
        else:
            machine, ending, compared = Machine(ranks, work), ending_of(args), {}
            made = calibrated(machine, args.calibration_turns, ending)
            for mix in (args.mix or work.mixes) if args.gpus > 1 else ():
                print(f"{mix}: {len(work.lengths(mix))} samples, {sum(work.lengths(mix))} tokens", flush=True)
                compared[mix] = Compared(machine, mix)
                made += measure(compared[mix], mix, args.turns, ending)
    except BaseException:
        ranks.kill()
        raise
    ranks.stop()
    if args.step:  # by processes of their own, which find the GPUs empty
        for mix, one in compared.items():
            sides = one.best_dynamic, one.best
            made += measure_steps(work, mix, sides, machine.costs, args.turns, args.memory_fraction)
    for one in made:
        print(line_of(one))
    if args.write:
        write_records(args.out, merged(args.out, made))
        if not (args.plans or args.engine or ending_of(args)):  # what runs plan by
            if machine.worst > FITS:
                print(
                    f"the constants are kept from runs: the model is {machine.worst:.0%} off, and {FITS:.0%} may be"
                )
            else:
                write_measured(measured(machine), args.table)
    if args.gpus == 1:
        print(f"{NOT_ON_ONE}.")
    print(json.dumps(sorted({one["case"] for one in made})))


if __name__ == "__main__":
    main()
