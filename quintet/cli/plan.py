"""`quintet plan`: the memory and the time that a recipe will take, from a config.json alone. Starts nothing."""

from __future__ import annotations

import argparse
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from quintet.cli.command import Command, positive, print_table
from quintet.errors import UserError
from quintet.plan.cards import CARDS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from quintet.models import ModelShape
    from quintet.plan.phases import StagePlan
    from quintet.plan.seconds import Samples
    from quintet.recipe.schema import Recipe

GIB = 1 << 30
MISFIT = 2
DIFFERS = 4
"""Exit code where a model that was built is not what was planned."""
MOST_TOLD = 20
PUBLISHED = {
    "DeepSeek-V3": (
        (96, 8, 12, 8, 1),
        "66 GB of a GPU, 1500 GB of a host, 1700 s a step and MFU 0.19, with 96 × 8 samples of 1960 response tokens, generated in 1050 s",
    ),
    "Qwen3-235B-A22B": (
        (32, 4, 8, 4, 1),
        "48 GB of a GPU, 800 GB of a host, 600 s a step and MFU 0.25, by its script with 32 × 8 samples; lengths are not told",
    ),
    "Qwen2-7B": (
        (8, 2, 1, 1, 1),
        "24 GB of a GPU, 200 GB of a host, 120 s a step and MFU 0.35; GPU, layout, samples and lengths are not told",
    ),
}
"""By the shape's name: ranks, tp, pp, ep and cp of the shipped recipe, and what verl is reported to take; of the first by
https://verl.readthedocs.io/en/latest/perf/dpsk.html."""
ASSUMED = "H20", 89
"""What these recipes are for: 96 GB."""


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--gpu-gib",
        type=positive,
        metavar="GIB",
        help="memory of one device: says where it does not suffice, and what to change",
    )
    parser.add_argument("--gpu", choices=tuple(CARDS), help="predicts the seconds of a step on such devices")
    parser.add_argument(
        "--mean-tokens",
        type=int,
        nargs=2,
        metavar=("PROMPT", "RESPONSE"),
        help="tokens of a prompt and of a response in the mean, to predict with; otherwise the most that the recipe allows",
    )
    parser.add_argument(
        "--build",
        metavar="RANK",
        type=_rank,
        help="build that rank's model on the meta device instead, or all, and compare it with the plan and the shard map",
    )


def _rank(text: str) -> int | str:
    if text != "all" and not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text} is neither a rank, 0 or more, nor all")
    return text if text == "all" else int(text)


def run(arguments: argparse.Namespace) -> int:
    """Print the memory of each pipeline stage's fullest rank by phase. 0 it fits or is not compared, 2 it does not fit."""
    from quintet.recipe.hub import shapes_alone

    with shapes_alone():
        return _plan(arguments)


def _plan(arguments: argparse.Namespace) -> int:
    from quintet.plan.describe import in_units
    from quintet.plan.fp8 import USUAL, in_8_bits
    from quintet.plan.phases import plan_stages
    from quintet.plan.seconds import samples_of
    from quintet.recipe.loader import load_recipe
    from quintet.recipe.rules import shape_of

    recipe = load_recipe(arguments.recipe, arguments.overrides)
    shape = shape_of(recipe)
    assert shape is not None  # a sound recipe names a model
    if arguments.build is not None:
        if arguments.gpu or arguments.gpu_gib or arguments.mean_tokens:
            raise UserError("--build plans no phases: leave --gpu, --gpu-gib and --mean-tokens out")
        return _build(recipe, shape, arguments.build)
    published, ranks = _published(recipe), recipe.cluster.ranks
    gpu = arguments.gpu or (published and ASSUMED[0])
    gib = arguments.gpu_gib or (ASSUMED[1] if published and gpu == ASSUMED[0] else None)
    if arguments.mean_tokens and gpu is None:
        raise UserError("--mean-tokens is what is predicted with: name a GPU (--gpu), or leave it out")
    samples, limit = samples_of(recipe, arguments.mean_tokens), None if gib is None else int(gib * GIB)
    stages = plan_stages(recipe, shape, limit)
    print(
        f"{shape.family}, {in_units(shape.parameter_count)} parameters, {in_units(shape.active_parameter_count)} of them for each token, "
        f"on {ranks} rank{'s' * (ranks != 1)}"
    )
    _table(stages)
    full = max(stages, key=lambda one: one.device[one.fullest])
    most = full.device[full.fullest] / GIB
    print(f"Fullest: {_ranks_like(full, stages, ranks)} in {full.fullest}, {most:.1f} GiB.")
    print(_of_host(stages, recipe.checkpoint.async_save))
    if recipe.engine.fp8 is not None:
        print(in_8_bits(recipe, shape, gpu or USUAL))
    assumed = [f"--gpu {gpu}"] * (gpu != arguments.gpu) + [f"--gpu-gib {gib}"] * (gib != arguments.gpu_gib)
    if assumed:
        print(f"Assumed, as for the shipped recipe of this model: {' '.join(assumed)}.")
    if gpu is not None:
        _predict(recipe, shape, gpu, samples, limit, mean=arguments.mean_tokens is not None)
    if published is not None:
        print(f"Published of verl on {ranks} GPUs: {published}.")
    if limit is None:
        if recipe.rollout.backend != "native":
            print(
                "Without --gpu-gib, generate has a cache for rollout.sequences_per_rank samples of full length; an engine takes no more than "
                "rollout.memory_fraction of the device."
            )
        return 0
    for line in (lacking := list(_lacking(recipe, shape, stages, limit))):
        print(line)
    return MISFIT if lacking else 0


def _lacking(recipe: Recipe, shape: ModelShape, stages: Sequence[StagePlan], limit: int) -> Iterator[str]:
    """The phases that take more than `limit` bytes of a device, and what to change for each."""
    from quintet.plan.fullest import setup_of
    from quintet.plan.phases import advice
    from quintet.plan.rollout import without_room

    narrow = without_room(recipe, setup_of(recipe, shape), limit)
    for phase in stages[0].device:
        full = max(stages, key=lambda one: one.device[phase])
        if full.device[phase] > limit and not (phase == "generate" and narrow):
            yield (
                f"{phase}: {full.device[phase] / GIB:.1f} GiB on stage {full.stage} are more than {limit / GIB:g}; take "
                f"{advice(recipe, shape, phase, rests=full.device['load'] > limit)}"
            )
    if narrow is not None:
        yield f"generate: {narrow}"


def _published(recipe: Recipe) -> str | None:
    """What is reported of this model on as many ranks in the same layout."""
    layout, (where, reported) = recipe.layout, PUBLISHED.get(Path(str(recipe.model.path)).name, ((), None))
    return reported if (recipe.cluster.ranks, layout.tp, layout.pp, layout.ep, layout.cp) == where else None


def _of_host(stages: Sequence[StagePlan], aside: bool) -> str:
    """Host memory of the fullest node at each moment, and what needs less of it. aside: copies are saved, and training goes on."""
    most = {moment: max(one.host[moment] for one in stages) / GIB for moment in stages[0].host}
    said = f"Host memory of a node: up to {most['steps']:,.0f} GiB in steps"
    save, load = (f"{most[moment]:,.0f}" for moment in ("save", "load"))
    if most["save"] == most["steps"]:
        return f"{said}, {load} while a checkpoint is loaded." if most["load"] else f"{said}."
    if not aside:
        return f"{said}, {save} while a checkpoint is saved, {load} while one is loaded."
    said += f", {save} from the first save on, whose copies stay, {load} while a checkpoint is loaded."
    return f"{said} checkpoint.async_save=false makes none, and training waits for the disk."


def _ranks_like(full: StagePlan, stages: Sequence[StagePlan], ranks: int) -> str:
    """The ranks of all stages that are as full as the fullest."""
    each, phase = ranks // len(stages), full.fullest
    alike = [one.stage for one in stages if one.device[phase] == full.device[phase]]
    if len(alike) == len(stages):
        return "all ranks"
    runs = [list(run) for _, run in groupby(alike, key=lambda stage: stage - alike.index(stage))]
    return ", ".join(
        f"{_from_to('rank', run[0] * each, (run[-1] + 1) * each - 1)} ({_from_to('stage', run[0], run[-1])})"
        for run in runs
    )


def _from_to(what: str, first: int, last: int) -> str:
    return f"{what} {first}" if first == last else f"{what}s {first} to {last}"


def _build(recipe: Recipe, shape: ModelShape, which: int | str) -> int:
    """Build one rank's model or all, and say what does not fit. 0 nothing, 4 something."""
    from quintet.diagnose.build_rank import build_ranks, not_covered

    every = which == "all"
    for found in build_ranks(recipe, shape, range(recipe.cluster.ranks) if every else [int(which)]):
        (rank, held) = list(found.parameters.items())[-1]
        print(f"rank {rank}: {held:,} parameters in {found.shards[rank]:,} shards", flush=True)
    wrong = found.wrong + (not_covered(found, shape) if every else [])
    for one in wrong[:MOST_TOLD]:
        print(one)
    if len(wrong) > MOST_TOLD:
        print(f"and {len(wrong) - MOST_TOLD} more")
    whole = f" Together they hold each of {len(found.boxes):,} tensors once." if every and not wrong else ""
    print(f"{len(wrong)} differences." if wrong else f"As planned, and as the shard map says.{whole}")
    return DIFFERS if wrong else 0


def _predict(
    recipe: Recipe, shape: ModelShape, gpu: str, samples: Samples, limit: int | None, *, mean: bool
) -> None:
    """Print the seconds and the MFU of each phase, and of them together."""
    from quintet.plan.seconds import mfu, plan_seconds

    card = CARDS[gpu]
    times = plan_seconds(recipe, shape, card, samples, limit)
    known = "in the mean" if mean else "each, the most that the recipe allows"
    print(
        f"On {gpu}, {card.flops / 1e12:g} TFLOP/s and {card.bandwidth / 1e12:g} TB/s, {samples.prompts} × {samples.per_prompt} "
        f"samples of {samples.prompt_tokens:,} + {samples.response_tokens:,} tokens {known}; the longest response has {samples.longest:,}:"
    )
    rows = [(name, [one]) for name, one in times.items()] + [("step", list(times.values()))]
    cells = []
    for name, parts in rows:
        share = mfu(parts, card, recipe.cluster.ranks)
        cells.append((name, f"{sum(one.seconds for one in parts):,.1f}", f"{share:.2f}" if share else ""))
    print_table(("phase", "seconds", "MFU"), cells)
    eight = "" if recipe.engine.fp8 is None else " Products in 8 bits are taken to last as long as in bf16."
    print(
        "At the best: nothing overlaps, and the trainer's exchanges of tp, cp and ep, uneven loads and work between phases are not counted."
        f"{eight}"
    )


def _table(stages: Sequence[StagePlan]) -> None:
    sizes = [f"{one} GiB" for one in (*stages[0].device, "host")]
    rows = [
        (
            str(one.stage),
            str(one.layers),
            f"{one.parameters / 1e9:.2f}B",
            *(f"{size / GIB:,.1f}" for size in (*one.device.values(), max(one.host.values()))),
        )
        for one in stages
    ]
    print_table(["stage", "layers", "parameters of a rank", *sizes], rows)


COMMAND = Command(
    name="plan",
    summary="memory and seconds of a recipe by phase, from a config.json alone",
    description="""\
Print how much memory the fullest rank of each pipeline stage takes in each phase of a step: load, generate, logprob, train, sync,
save, and the host memory of a node. The model need be no more than a directory with a config.json, or one of the shapes that came with
quintet, by name, such as DeepSeek-V3 or Qwen3-8B. With --gpu NAME the seconds and the MFU of generate, logprob, train and sync are
predicted; for models that came with a recipe for H20s, in its layout, those are assumed. With --build RANK that rank's model is built
without memory, in a fake world of its size, and compared with the plan and the shard map; --build all does so for every rank, and sees
that together they hold each tensor of the model once. What a process needs before any tensor and fragmentation come on top.""",
    examples="""\
  quintet plan recipes/deepseek_v3_96_h20.yaml --gpu-gib 89 --gpu H20 --mean-tokens 200 1960
  quintet plan my.yaml layout.tp=8 cluster.ranks=64""",
    run=run,
    add_options=_add_options,
    codes="0 it fits or no size was given, 2 it does not fit or something is to be put right, 4 a rank that was built differs, 130 Ctrl-C",
)
