"""`quintet check`: is this recipe sound, and what does it say in full? Starts nothing."""

from __future__ import annotations

import argparse
import functools
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from quintet.cli.command import Command
from quintet.errors import UserError

if TYPE_CHECKING:
    from quintet.models import ModelShape
    from quintet.recipe import Recipe

MOST_SECONDS = 10**6


def run(arguments: argparse.Namespace) -> int:
    """Check the recipe and its data, print it in full to stdout and what follows from it to stderr; writes nothing. 0 sound, 2 not."""
    from quintet.recipe import dump_resolved, load_recipe
    from quintet.recipe.time_limit import TimeUp, time_limit

    command = arguments.command
    try:
        with time_limit(arguments.time_limit_s):
            recipe = load_recipe(arguments.recipe, arguments.overrides, command=command)
            notes = _look_through(_looks(recipe, command))
    except TimeUp as limit:
        raise UserError(
            f"{arguments.recipe}: {limit} did not suffice to look through it; --time-limit-s gives it more"
        ) from None
    notes += [*_check_data(recipe, command), *_remote_code(recipe)]
    if command in ("train", "sft"):
        from quintet.cli.saves import describe_saves

        notes += describe_saves(recipe, command)
    if arguments.verify_weights:
        notes += _verify_weights(recipe)
    print(dump_resolved(recipe), end="")
    sys.stdout.flush()
    print(
        "\n".join([f"{arguments.recipe} is a sound recipe for quintet {command}.", *notes]), file=sys.stderr
    )
    return 0


Look = Callable[[], str | None]


def _look_through(looks: dict[str, Look]) -> list[str]:
    """What each look has to say, and which were not taken when the time was over."""
    from quintet.recipe.time_limit import TimeUp, stop_the_clock

    notes: list[str] = []
    for number, look in enumerate(looks.values()):
        try:
            note = look()
        except TimeUp as limit:
            stop_the_clock()
            left = ", ".join(list(looks)[number:])
            return [*notes, f"Not looked through in {limit}: {left}; --time-limit-s gives it more."]
        if note is not None:
            notes.append(note)
    return notes


def _looks(recipe: Recipe, command: str) -> dict[str, Look]:
    """What follows from the recipe and is not written in it: what each look is at, and the look."""
    from quintet.data.tasks import TASKS
    from quintet.recipe.rules import shape_of

    shape = shape_of(recipe)
    assert shape is not None  # a sound recipe names a model
    looks: dict[str, Look] = {
        "the chat template": lambda: _chat_template(recipe),
        "the model": lambda: _model(recipe, shape),
        "the adapters": lambda: _lora(recipe, shape),
        "the layout": lambda: _layout(recipe),
        "the experts": lambda: _experts(recipe, shape),
    }
    if command != "sft":
        looks["the rollout"] = lambda: _rollout(recipe)
        looks["what generates"] = lambda: _installed(recipe, command)
    looks["the engine"] = lambda: _engine(recipe, shape)
    if command in ("train", "sft"):
        looks["micro-batches"] = lambda: _rows(recipe)
        if recipe.model.path is not None:
            looks["memory"] = lambda: _memory(recipe, shape, command)
    if recipe.data.task in TASKS:
        for which in _needs(recipe, command):
            looks[f"{which} problems of the task {recipe.data.task}"] = functools.partial(
                _count_rows, recipe, command, which
            )
    return looks


def _chat_template(recipe: Recipe) -> None:
    """Render the shortest conversation, as a run renders every prompt."""
    from quintet.data.chat_template import check_template

    if recipe.data.chat:
        check_template(recipe.model.path, recipe.model.chat_template, recipe.data.system_prompt)


def _model(recipe: Recipe, shape: ModelShape) -> str:
    if recipe.model.path is None:  # 1 stands for the vocabulary in the shape of a built model
        return f"Model: {shape.family}, {_count(shape.parameter_count)} parameters and the embeddings, built from nothing."
    active = f", {_count(shape.active_parameter_count)} of them for each token" if shape.moe else ""
    return f"Model: {shape.family}, {_count(shape.parameter_count)} parameters{active}.{_ahead(recipe.model.path)}"


def _ahead(path: Path) -> str:
    """What becomes of layers for multi-token prediction."""
    from quintet.models import held_shape

    layers = held_shape(path).mtp_layers
    if not layers:
        return ""
    what = "Its layer" if layers == 1 else f"Its {layers} layers"
    return f" {what} for multi-token prediction: not trained, saved as found."


def _lora(recipe: Recipe, shape: ModelShape) -> str | None:
    from quintet.models.family import table_of
    from quintet.models.lora import adapted, adapter_parameters, linears
    from quintet.recipe.lora import lora_shape

    lora = lora_shape(recipe, shape)
    if lora is None:
        return None
    weights = table_of(shape)
    number, layers = adapter_parameters(weights, lora), list(linears(weights))
    beside = sum(len(adapted(one, lora)) for one in layers)
    rslora = " (rslora)" if lora.rslora else ""
    return (
        f"LoRA: rank {lora.rank}, scale {lora.scale:g}{rslora}, beside {beside} of {sum(len(one.parts) for one in layers)} "
        f"linear layers: {number:,} parameters are trained, {100 * number / shape.parameter_count:.2g}% of the model's."
    )


def _count(parameters: int) -> str:
    for unit, name in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if parameters >= unit:
            return f"{parameters / unit:.1f}{name}"
    return str(parameters)


def _layout(recipe: Recipe) -> str:
    from quintet.recipe.derived import data_parallel

    ranks, layout = recipe.cluster.ranks, recipe.layout
    sp, vpp = " with sp" if layout.sp else "", f" with vpp {layout.vpp}" if layout.vpp > 1 else ""
    cp = f" × cp {layout.cp}" if layout.cp > 1 else ""
    return (
        f"Layout: {ranks} ranks = dp {data_parallel(recipe)}{cp} × tp {layout.tp}{sp} × pp {layout.pp}{vpp}."
    )


def _experts(recipe: Recipe, shape: ModelShape) -> str | None:
    from quintet.recipe.derived import expert_tp

    if shape.moe is None:
        return None
    experts = shape.moe.experts
    layout, etp = recipe.layout, expert_tp(recipe)
    edp = recipe.cluster.ranks // (layout.pp * layout.ep * etp)
    held = experts // layout.ep
    return f"Experts: dp {edp} × ep {layout.ep} × etp {etp}, {held} of {experts} on a rank."


def _rollout(recipe: Recipe) -> str:
    from quintet.recipe.rollout import copies as own_copies
    from quintet.recipe.rollout import layout_of_copy, own_processes, shares_weights

    layout = recipe.rollout.layout
    if own_processes(recipe):
        rollout, of_copy, count = recipe.rollout, layout_of_copy(recipe), own_copies(recipe)
        separate = rollout.placement == "separate"
        devices = "device of its own" if rollout.ranks == 1 else "devices of their own"
        where = f"on {rollout.ranks} {devices}" if separate else "on the devices that train"
        return (
            f"Rollout: {rollout.backend}, {count} {'copy' if count == 1 else 'copies'} of tp {of_copy.tp} × pp {of_copy.pp} in "
            f"processes of their own, {where}."
        )
    if layout is None or shares_weights(recipe):
        return "Rollout: shares the layout and the weights."
    copies = recipe.cluster.ranks // (layout.tp * layout.pp)
    what = "resharded" if recipe.lora is None else "adapters resharded"
    return f"Rollout: dp {copies} × tp {layout.tp} × pp {layout.pp}, {what} each step."


def _installed(recipe: Recipe, command: str) -> str | None:
    backend, here = recipe.rollout.backend, recipe.cluster.address is None
    if not here or backend == "native" or importlib.util.find_spec(backend) is not None:
        return None
    return f"Rollout: {backend} is not installed here, which quintet {command} needs (docs/rollout.md)."


def _engine(recipe: Recipe, shape: ModelShape) -> str:
    from quintet.recipe.recompute import recompute_modules

    modules = recompute_modules(recipe.engine, shape)
    recompute = recipe.engine.recompute + (f" ({', '.join(modules)})" if modules else "")
    return f"Engine: {_layers(recipe)}, recompute {recompute}."


def _layers(recipe: Recipe) -> str:
    """The back end of layers, as far as it can be told without torch."""
    backend, device = recipe.engine.backend, recipe.cluster.device
    if backend != "auto":
        return f"{backend} layers"
    if device == "cpu":
        return "portable layers"
    if recipe.cluster.address is None:
        if importlib.util.find_spec("transformer_engine") is None:
            return "portable layers (TransformerEngine is not installed here)"
        if device == "cuda":
            return "transformer_engine layers"
    return "transformer_engine layers (portable on ranks without it or without a GPU)"


def _rows(recipe: Recipe) -> str:
    from quintet.packing import alignment_of

    layout, budget = recipe.layout, recipe.engine.tokens_per_microbatch_per_rank
    aligned = alignment_of(layout, layout.cp)
    text = f"Micro-batches: up to {aligned.room(budget * layout.cp)} tokens"
    if layout.cp > 1:
        text += f" on {layout.cp} ranks"
    padded = []
    if aligned.sequence > 1:
        padded.append(f"each sample padded to a multiple of {aligned.sequence}")
    if aligned.total > aligned.sequence:
        padded.append(f"the row to a multiple of {aligned.total}")
    return f"{text}{', ' if padded else ''}{' and '.join(padded)}."


def _memory(recipe: Recipe, shape: ModelShape, command: str) -> str:
    """By the formula of `quintet.plan`, of the fullest rank and the most demanding optimizer that the command starts."""
    from quintet.plan import Place, Setup, rank_memory
    from quintet.recipe.derived import optimizers
    from quintet.recipe.lora import lora_shape

    on_cpu = recipe.cluster.device == "cpu"
    setup = Setup(
        shape,
        recipe.layout,
        recipe.cluster.ranks,
        engine=recipe.engine,
        dtype=recipe.model.dtype or ("fp32" if on_cpu else "bf16"),
        device="cpu" if on_cpu else "cuda",
        backend="transformer_engine" if _layers(recipe).startswith("transformer_engine") else "portable",
        lora=lora_shape(recipe, shape),
    )
    asked = [
        one for section, one in optimizers(recipe).items() if command == "train" or section != "optimizer"
    ]
    # With LoRA the reference policy is the model under its adapters.
    has_reference = command == "train" and recipe.algorithm.kl_coef > 0 and recipe.lora is None

    def of_reference(place: Place) -> int:
        return rank_memory(replace(setup, optimizer=None), place).parameters if has_reference else 0

    most, beside = max(
        (
            (rank_memory(replace(setup, optimizer=one), place), of_reference(place))
            for one in asked
            for place in (Place(pp=stage) for stage in range(recipe.layout.pp))
        ),
        key=lambda found: found[0].peak + found[1],
    )
    parts = {name: getattr(most, name) for name in ("parameters", "gradients", "optimizer", "activations")}
    parts["other"] = most.peak - sum(parts.values())
    if has_reference:
        parts["reference policy"] = beside
    said = ", ".join(f"{name} {size / _GIB:.1f}" for name, size in parts.items())
    besides = "" if command == "sft" else ", the rollout"
    return (
        f"Memory: about {(most.peak + beside) / _GIB:.1f} GiB on the fullest rank while it trains ({said}); what a process "
        f"needs{besides} and fragmentation come on top."
    )


_GIB = 1 << 30


def _needs(recipe: Recipe, command: str) -> dict[Literal["train", "eval"], list[str]]:
    """The sides of the data that the command reads, and the columns besides the prompt."""
    needs: dict[Literal["train", "eval"], list[str]] = {}
    if command in ("train", "sft"):
        needs["train"] = ["answer"] * (command == "train") + ["response"] * (recipe.sft is not None)
    if command in ("train", "eval") and recipe.train.eval_prompts:
        needs["eval"] = ["answer"]
    return needs


def _check_data(recipe: Recipe, command: str) -> list[str]:
    """Read every row of files as the run will, short of rendering and tokenizing, which need the tokenizer."""
    from quintet.data.tasks import TASKS

    if recipe.data.task in TASKS:  # looked at with the recipe
        return []
    return [_count_rows(recipe, command, which) for which in _needs(recipe, command)]


def _count_rows(recipe: Recipe, command: str, which: Literal["train", "eval"]) -> str:
    from quintet.data.prompts import check_rows

    data = recipe.data
    path = data.train_path if which == "train" else data.eval_path
    if path is not None and not Path(path).exists():
        return f"Data: {path} is not a file here, taken for a hub name; its rows were not checked."
    rows = check_rows(data, which, seed=recipe.run.seed, needs=_needs(recipe, command)[which])
    if not rows:
        raise UserError(f"data.{which}_path: {path} has no rows")
    return f"Data: {rows} {which} prompts in {path or f'the built-in task {data.task}'}."


def _remote_code(recipe: Recipe) -> list[str]:
    """What is to be said of code that comes with the model, which is not run here. Raises UserError where it would be needed."""
    from quintet.data.tokenizer import code_of_tokenizer, load_tokenizer, remote_code_warning

    path = recipe.model.path
    if path is None:
        return []
    if recipe.model.trust_remote_code:
        return [remote_code_warning(path)]
    if code_of_tokenizer(path) is not None:  # else not worth the seconds that transformers takes to import
        load_tokenizer(path)
    return []


def _verify_weights(recipe: Recipe) -> list[str]:
    """Read every byte of the model's files against the checksums there are."""
    from quintet.models.checksums import verify_files
    from quintet.models.weights_on_disk import find_weights

    path = recipe.model.path
    if path is None:
        raise UserError(
            "--verify-weights: the recipe names no model.path; a model that is built has no files yet"
        )
    files = list(find_weights(path).headers)
    notes = verify_files(path, files, lambda text: print(text, file=sys.stderr, flush=True))
    return [*notes, f"Weights: {len(files) - len(notes)} of {len(files)} files verified by their checksums."]


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds <= MOST_SECONDS:
        raise argparse.ArgumentTypeError(f"{text} is not above 0 and at most {MOST_SECONDS:,}")
    return seconds


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--command",
        choices=["train", "sft", "generate", "eval"],
        default="train",
        help="what the recipe is checked for (default: train)",
    )
    parser.add_argument(
        "--time-limit-s",
        type=_seconds,
        default=3.0,
        metavar="SECONDS",
        help="most processor time for the recipe and the model's config.json and headers, before data are read (default: 3)",
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
Validate a recipe without starting any process: keys, types, the layout against the model's sizes, files, and every
row of local data files (short of tokenizing). Prints the resolved recipe, every key written out, to standard
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
