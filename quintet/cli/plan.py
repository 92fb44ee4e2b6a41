"""`quintet plan`: the memory that a recipe will take, from a config.json alone. Starts nothing."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from quintet.cli.command import Command

if TYPE_CHECKING:
    from collections.abc import Sequence

    from quintet.models import ModelShape
    from quintet.plan.phases import StagePlan
    from quintet.recipe import Recipe

GIB = 1 << 30
MISFIT = 2
DIFFERS = 4
"""Exit code where a model that was built is not what was planned."""
MOST_TOLD = 20
PUBLISHED = {
    "DeepSeek-V3": (96, 66, 1500),
    "Qwen3-235B-A22B": (32, 48, 800),
    "Qwen2-7B": (8, 24, 200),
}
"""By the shape's name: ranks, and GB of a GPU and of a node's host memory that others report of it."""


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--gpu-gib",
        type=float,
        metavar="GIB",
        help="memory of one device: says where it does not suffice, and what to change",
    )

    parser.add_argument(
        "--build",
        metavar="RANK",
        type=_rank,
        help="build that rank's model on the meta device instead, or all, and compare it with the plan and the shard map",
    )


def _rank(text: str) -> int | str:
    return text if text == "all" else int(text)


def run(arguments: argparse.Namespace) -> int:
    """Print the memory of each pipeline stage's fullest rank by phase. 0 it fits or is not compared, 2 it does not fit."""
    from quintet.plan.phases import advice, plan_stages
    from quintet.recipe import load_recipe
    from quintet.recipe.hub import shapes_alone
    from quintet.recipe.rules import shape_of

    with shapes_alone():
        recipe = load_recipe(arguments.recipe, arguments.overrides)
        shape = shape_of(recipe)
    assert shape is not None  # a sound recipe names a model
    if arguments.build is not None:
        return _build(recipe, shape, arguments.build)
    limit = None if arguments.gpu_gib is None else int(arguments.gpu_gib * GIB)
    stages = plan_stages(recipe, shape, limit)
    print(
        f"{shape.family}, {shape.parameter_count / 1e9:.1f}B parameters, {shape.active_parameter_count / 1e9:.1f}B of them for each token, "
        f"on {recipe.cluster.ranks} ranks"
    )
    _table(stages)
    full = max(stages, key=lambda one: one.device[one.fullest])
    print(
        f"Fullest: stage {full.stage} in {full.fullest}, {full.device[full.fullest] / GIB:.1f} GiB; "
        f"host memory of a node up to {max(one.host for one in stages) / GIB:.0f} GiB."
    )
    name = Path(str(recipe.model.path)).name
    if name in PUBLISHED and PUBLISHED[name][0] == recipe.cluster.ranks:
        ranks, gpu, host = PUBLISHED[name]
        print(f"Published of verl on {ranks} GPUs: {gpu} GB of a GPU, {host} GB of a host.")
    if limit is None:
        return 0
    over = {
        phase: max(stages, key=lambda one: one.device[phase])
        for phase in full.device
        if max(one.device[phase] for one in stages) > limit
    }
    for phase, one in over.items():
        print(
            f"{phase}: {one.device[phase] / GIB:.1f} GiB on stage {one.stage} are more than {arguments.gpu_gib:g}; take "
            f"{advice(recipe, phase)}"
        )
    return MISFIT if over else 0


def _build(recipe: Recipe, shape: ModelShape, which: int | str) -> int:
    """Build one rank's model or all, and say what does not fit. 0 nothing, 4 something."""
    from quintet.diagnose.build_rank import build_ranks, not_covered

    every = which == "all"
    wrong: list[str] = []
    for found in build_ranks(recipe, shape, range(recipe.cluster.ranks) if every else [int(which)]):
        (rank, held) = list(found.parameters.items())[-1]
        print(f"rank {rank}: {held:,} parameters in {found.shards[rank]:,} shards", flush=True)
        wrong = found.wrong
    wrong = wrong + (not_covered(found, shape) if every else [])
    for one in wrong[:MOST_TOLD]:
        print(one)
    if len(wrong) > MOST_TOLD:
        print(f"and {len(wrong) - MOST_TOLD} more")
    whole = f" Together they hold each of {len(found.boxes):,} tensors once." if every and not wrong else ""
    print(f"{len(wrong)} differences." if wrong else f"As planned, and as the shard map says.{whole}")
    return DIFFERS if wrong else 0


def _table(stages: Sequence[StagePlan]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in (
        "stage",
        "layers",
        "parameters of a rank",
        *(f"{one} GiB" for one in stages[0].device),
        "host GiB",
    ):
        table.add_column(name, justify="right")
    for one in stages:
        sizes = (*one.device.values(), one.host)
        cells = (str(one.stage), str(one.layers), f"{one.parameters / 1e9:.2f}B")
        table.add_row(*cells, *(f"{size / GIB:.1f}" for size in sizes))
    Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else 180).print(table)


COMMAND = Command(
    name="plan",
    summary="memory of a recipe's ranks by phase, from a config.json alone",
    description="""\
Print how much memory the fullest rank of each pipeline stage takes in each phase of a step: load, generate, logprob, train, sync,
save, and the host memory of a node. The model need be no more than a directory with a config.json, or one of the shapes that came with
quintet, by name: DeepSeek-V3, Qwen3-235B-A22B, Qwen2-7B. With --build RANK that rank's model is built without memory, in a fake world of
its size, and compared with the plan and the shard map; --build all does so for every rank, and sees that together they hold each tensor
of the model once. What a process needs before any tensor and fragmentation come on top.""",
    examples="""\
  quintet plan recipes/deepseek_v3_96_h20.yaml --gpu-gib 89
  quintet plan my.yaml layout.tp=8 cluster.ranks=64""",
    run=run,
    add_options=_add_options,
    codes="0 it fits or no size was given, 2 it does not fit or something is to be put right, 4 a rank that was built differs, 130 Ctrl-C",
)
