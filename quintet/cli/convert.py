"""`quintet convert`: Hugging Face directories to megatron-core checkpoints and back. Starts nothing else."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from quintet.cli.command import Command

if TYPE_CHECKING:
    from quintet.engine.convert.parts import Converted


def _add_options(parser: argparse.ArgumentParser) -> None:
    """Two directions, each with its paths and options."""
    directions = parser.add_subparsers(prog="quintet convert", dest="direction", required=True)
    to_mcore = directions.add_parser(
        "hf-to-mcore",
        help="a Hugging Face directory becomes a megatron-core checkpoint",
        allow_abbrev=False,
    )
    to_hf = directions.add_parser(
        "mcore-to-hf",
        help="a megatron-core checkpoint becomes a Hugging Face directory",
        allow_abbrev=False,
    )
    for one in (to_mcore, to_hf):
        one.add_argument("source", metavar="SOURCE", type=Path, help="the directory to read")
        one.add_argument("destination", metavar="DESTINATION", type=Path, help="the directory to make")
        one.add_argument(
            "--dtype",
            metavar="TYPE",
            help="of all weights: fp32, bf16 or fp16 (default: each keeps its own)",
        )
        one.add_argument(
            "--family",
            metavar="FILE.py:Class",
            help="a model family of your own, as model.family in a recipe",
        )
    for name, what in (("tp", "tensor"), ("pp", "pipeline"), ("ep", "expert"), ("vpp", "virtual pipeline")):
        said = f"{what} parallel size that the files are cut for (default: 1)"
        to_mcore.add_argument(f"--{name}", type=int, default=1, help=said)
    to_mcore.add_argument("--etp", type=int, help="tensor parallel size of experts (default: tp)")
    to_hf.add_argument(
        "--hf",
        metavar="DIRECTORY",
        type=Path,
        help="where config.json and the tokenizer come from (default: what hf-to-mcore left in the checkpoint, or the model of the run's recipe)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Convert what `source` holds into `destination`, which it writes whole or not at all. 0 done, 2 for files it cannot take."""
    from quintet.recipe.user_family import use_family

    use_family(arguments.family)
    done = _run(arguments)
    for note in done.notes:
        print(note, file=sys.stderr)
    print(f"{arguments.destination}: {done}")
    return 0


def _run(arguments: argparse.Namespace) -> Converted:
    from rich.console import Console

    from quintet.engine.convert import hf_to_mcore, mcore_to_hf
    from quintet.observe.progress import Progress

    shown = Progress(Console(stderr=True))
    with shown.task(f"converting {arguments.source}", unit="%", total=100, quiet=True) as task:

        def progress(done: int, total: int) -> None:
            percent = 100 * done // max(total, 1)
            if percent > task.done:
                task.advance(percent - task.done)

        paths = (arguments.source, arguments.destination)
        if arguments.direction == "mcore-to-hf":
            return mcore_to_hf(*paths, companions=arguments.hf, dtype=arguments.dtype, progress=progress)
        sizes = {name: getattr(arguments, name) for name in ("tp", "pp", "ep", "etp", "vpp")}
        return hf_to_mcore(*paths, **sizes, dtype=arguments.dtype, progress=progress)


COMMAND = Command(
    name="convert",
    summary="Hugging Face directory to megatron-core checkpoint and back",
    description="""\
Convert a model between a Hugging Face directory and a checkpoint in megatron-core's torch_dist format, which Megatron-LM
reads. One process, no GPU, memory for a few tensors; values are not changed unless --dtype asks for it. What is read
is checked (headers, names, shapes, checksums where there are any, values that are not finite), and the destination
appears only once it is whole. mcore-to-hf also reads a quintet run's checkpoints.""",
    examples="""\
  quintet convert hf-to-mcore Qwen3-8B Qwen3-8B-mcore --tp 2 --pp 2
  quintet convert mcore-to-hf Qwen3-8B-mcore Qwen3-8B-again
  quintet convert mcore-to-hf runs/demo-20261121-100000/checkpoints/step-000012 step-12""",
    run=run,
    add_options=_add_options,
    usage="hf-to-mcore|mcore-to-hf SOURCE DESTINATION [options]",
    codes="0 done, 2 something to put right, 130 Ctrl-C",
    of_recipe=False,
)
