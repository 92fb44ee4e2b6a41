"""`quintet check`: is this recipe sound, and what does it say in full? Starts nothing."""

from __future__ import annotations

import argparse
import functools
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from quintet.cli.command import Command, positive
from quintet.errors import UserError

if TYPE_CHECKING:
    from quintet.data.prompts import PromptSet, Which
    from quintet.plan.describe import Look
    from quintet.recipe.rules import Command as RecipeCommand
    from quintet.recipe.schema import Recipe


def run(arguments: argparse.Namespace) -> int:
    """Check the recipe and its data, print it in full to stdout and what follows from it to stderr; writes nothing. 0 sound, 2 not."""
    from quintet.recipe.loader import dump_resolved, load_recipe
    from quintet.recipe.time_limit import TimeUp, time_limit

    command = arguments.command
    try:
        with time_limit(arguments.time_limit_s):
            recipe = load_recipe(arguments.recipe, arguments.overrides, command=command)
            notes, whole = _look_through(_looks(recipe, command, arguments.gpu_gib))
    except TimeUp as limit:
        raise UserError(
            f"{arguments.recipe}: {limit} did not suffice to look through it; --time-limit-s gives it more"
        ) from None
    if whole or not recipe.data.makes_problems:
        notes += _prepare(recipe, command)
    if command != "sft":
        notes += _drafts(recipe)
    if command in ("train", "sft"):
        notes += _saves(recipe, command)
    if arguments.verify_weights:
        notes += _verify_weights(recipe)
    print(dump_resolved(recipe), end="")
    sys.stdout.flush()
    print(
        "\n".join([f"{arguments.recipe} is a sound recipe for quintet {command}.", *notes]), file=sys.stderr
    )
    return 0


def _look_through(looks: dict[str, Look]) -> tuple[list[str], bool]:
    """What each look has to say, and which were not taken when the time was over; whether all were."""
    from quintet.recipe.time_limit import TimeUp, stop_the_clock

    notes: list[str] = []
    for number, look in enumerate(looks.values()):
        try:
            note = look()
        except TimeUp as limit:
            stop_the_clock()
            left = ", ".join(list(looks)[number:])
            return [
                *notes,
                f"Not looked through in {limit}: {left}; --time-limit-s gives it more.",
            ], False
        if note is not None:
            notes.append(note)
    return notes, True


def _looks(recipe: Recipe, command: RecipeCommand, gpu_gib: float | None) -> dict[str, Look]:
    """What is looked at within the time limit, and the look."""
    from quintet.data.chat_template import check_template
    from quintet.data.prompts import check_rows
    from quintet.plan import describe

    def draw_problems(which: Which) -> None:
        check_rows(recipe.data, which, seed=recipe.run.seed)

    looks: dict[str, Look] = {"the chat template": lambda: check_template(recipe.model, recipe.data)}
    looks |= describe.looks(recipe, command, gpu_gib)
    if recipe.data.makes_problems:
        sides: dict[Which, bool] = {
            "train": command == "train" or (command == "sft" and recipe.data.sft_path is None),
            "eval": command in ("train", "eval") and recipe.train.eval_prompts > 0,
        }
        for which in (one for one, read in sides.items() if read):
            name = f"{which} problems of the task {recipe.data.task}"
            looks[name] = functools.partial(draw_problems, which)
    return looks


def _prepare(recipe: Recipe, command: RecipeCommand) -> list[str]:
    """Read and check all that the command reads before it starts anything, by its own function, and say what there is."""
    from quintet.data.prompts import path_of
    from quintet.runs.resume import find_resume
    from quintet.train.inputs import prepare

    resume = None if recipe.resume is None else find_resume(recipe, command)
    with tempfile.TemporaryDirectory() as scratch:
        inputs = prepare(recipe, command, Path(scratch), resume, starts=False)
    data = recipe.data
    found: dict[Which, PromptSet | None] = {"train": inputs.train, "eval": inputs.eval}
    if data.sft_path is not None:
        found["sft"] = inputs.sft
    counts = [
        f"Data: {len(prompts)} {which} prompts in {path_of(data, which) or f'the built-in task {data.task}'}."
        for which, prompts in found.items()
        if prompts is not None
    ]
    return [*counts, *inputs.notes]


def _drafts(recipe: Recipe) -> Iterator[str]:
    """How many tokens `rollout.draft_tokens=auto` takes on a CPU, or on each GPU of the table, and why."""
    from quintet.recipe.rules import shape_of
    from quintet.rollout.draft_length import drafts_of, read_table

    shape = shape_of(recipe)
    if recipe.rollout.draft_tokens != "auto" or shape is None:
        return
    devices, rest = ["cpu"], []
    if recipe.cluster.device != "cpu":
        devices, rest = sorted({row.device for row in read_table()} - {"cpu"}), ["none on other devices"]
    told = [drafts_of(recipe, shape.mtp_layers, device).why for device in devices]
    yield f"Drafts: {'; '.join([*told, *rest])}."


def _saves(recipe: Recipe, command: str) -> Iterator[str]:
    """Where checkpoints go, how large one will be, and what is resumed. Raises UserError when the recipe cannot go on with the run that it
    names."""
    from quintet.plan.describe import checkpoints
    from quintet.runs.resume import find_resume

    yield checkpoints(recipe)
    if (exports := recipe.checkpoint.hf_every_steps) > 0:
        yield f"Hugging Face directories: every {exports} steps to {recipe.run.dir}/{recipe.run.name}-<time>/hf, all kept."
    if recipe.resume is not None:
        found = find_resume(recipe, command)
        yield from found.notes
        if found.checkpoint is not None:
            manifest = found.checkpoint.manifest
            yield f"Resume: {found.run} goes on after {manifest.stage} step {manifest.step}, from {found.checkpoint.path}."


def _verify_weights(recipe: Recipe) -> list[str]:
    """Read every byte of the model's files against the checksums there are."""
    from quintet.models.checksums import verify_files
    from quintet.models.weights_on_disk import find_weights

    path = recipe.model.directory
    if path is None:
        raise UserError(
            "--verify-weights: the recipe names no model.path; a model that is built has no files yet"
        )
    files = list(find_weights(path).headers)
    notes = verify_files(path, files, lambda text: print(text, file=sys.stderr, flush=True))
    return [*notes, f"Weights: {len(files) - len(notes)} of {len(files)} files verified by their checksums."]


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--command",
        choices=["train", "sft", "generate", "eval"],
        default="train",
        help="what the recipe is checked for (default: train)",
    )
    parser.add_argument(
        "--time-limit-s",
        type=positive,
        default=3.0,
        metavar="SECONDS",
        help="most processor time for the recipe and the model's config.json and headers, before data are read (default: 3)",
    )
    parser.add_argument(
        "--gpu-gib",
        type=positive,
        metavar="GIB",
        help="memory of a GPU: says what engine.offload_*=auto and rollout.sleep_level=auto come to there (default: from which size on nothing has to leave)",
    )
    parser.add_argument(
        "--verify-weights",
        action="store_true",
        help="also read all weights against their checksums: quintet's own, or those the hub's downloads keep",
    )


COMMAND = Command(
    name="check",
    summary="validate a recipe and print it in full; starts nothing",
    description="""\
Validate a recipe without starting a run: all that train refuses before it starts is refused here. Keys, types, the layout
against the model's sizes, run.dir, the reward, tokenizer and chat template, and every row of local data files, tokenized. A model of the hub is
downloaded. Prints the resolved recipe, every key written out, to standard
output, and notes to standard error: the model's size, the layout with its data-parallel sizes, the layers, the
alignment of micro-batches, the memory of a rank, the data, where checkpoints go and how large one will be, and what
`resume` comes to. The resolved recipe can be used as a recipe.""",
    examples="""\
  quintet check my.yaml
  quintet check my.yaml layout.tp=4 cluster.ranks=8 > resolved.yaml
  quintet check my.yaml --command sft""",
    run=run,
    add_options=_add_options,
)
