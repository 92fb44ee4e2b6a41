"""`quintet plan`: the memory that a recipe will take, from a config.json alone. Starts nothing."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from quintet.cli.command import Command

if TYPE_CHECKING:
    from collections.abc import Sequence

    from quintet.plan.phases import StagePlan

GIB = 1 << 30
MISFIT = 2
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
quintet, by name: DeepSeek-V3, Qwen3-235B-A22B, Qwen2-7B. What a process needs before any tensor and fragmentation come on top.""",
    examples="""\
  quintet plan recipes/deepseek_v3_96_h20.yaml --gpu-gib 89
  quintet plan my.yaml layout.tp=8 cluster.ranks=64""",
    run=run,
    add_options=_add_options,
    codes="0 it fits or no size was given, 2 it does not fit or something is to be put right, 130 Ctrl-C",
)
