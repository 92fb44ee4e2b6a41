"""The recipe that says what a setup of the engine benchmark does, and what it needs of memory by the formula of recipes."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.engine_work import Setup
from quintet.plan.fullest import cheaper, fullest_rank
from quintet.plan.out_of_memory import Needs
from quintet.recipe import schema
from quintet.recipe.derived import on_device
from quintet.recipe.hub import shapes_alone
from quintet.recipe.loader import load_recipe

OPTIONS = {
    "tokens_per_microbatch_per_rank": "--tokens",
    "backend": "--backend",
    "recompute": "--recompute",
    "recompute_modules": "--recompute-modules",
}
"""Keys of a recipe's section engine that have an option of their own."""
UNREAD = {
    **dict.fromkeys(
        ("offload_params", "offload_grads", "offload_optimizer"),
        "nothing generates between its steps; python -m benchmarks.memory and benchmarks.handover measure offload",
    ),
    "replay_routes": "its rows come without routes; python -m benchmarks.routes measures replay",
}
"""Keys that no step of the benchmark reads, and why."""


@contextmanager
def recipe_of(setup: Setup) -> Iterator[schema.Recipe]:
    """The recipe, and for as long as the context lasts a directory with the model's config. Raises UserError, in a recipe's words, for what
    one is refused for."""
    said = {
        "cluster.ranks": setup.gpus,
        **{f"layout.{axis}": size for axis, size in setup.layout.items()},
        "engine.tokens_per_microbatch_per_rank": setup.tokens,
        "engine.backend": setup.backend,
        "engine.recompute": setup.recompute,
        "engine.recompute_modules": setup.recompute_modules,
        **dict(_dotted(setup.engine, "engine")),
        "optimizer.cpu_fraction": setup.cpu_fraction,
        # What a recipe has besides, with samples that fit anywhere.
        "sft": {},
        "data.max_prompt_tokens": 1,
        "rollout.max_response_tokens": 1,
    }
    with tempfile.TemporaryDirectory() as model, shapes_alone():
        (Path(model) / "config.json").write_text(json.dumps(setup.config))
        yield load_recipe(model, [f"{key}={json.dumps(value)}" for key, value in said.items()], command="sft")


def _dotted(section: dict[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in section.items():
        yield from (
            _dotted(value, f"{prefix}.{key}") if isinstance(value, dict) else [(f"{prefix}.{key}", value)]
        )


def needs_of(setup: Setup, device: str) -> Needs:
    """What a rank needs on a device of this kind, and options of the benchmark with which it needs less."""
    with recipe_of(setup) as found:
        recipe = on_device(found, device)
        return Needs(
            fullest_rank(recipe, setup.shape, "train"),
            [(as_options(one, setup), size) for one, size in cheaper(recipe, setup.shape, "train")],
            on_top="what a side beside it keeps",
            others="a side beside it",
            less_of_others="--sequential has one side at a time on the device, and --only measures one.",
        )


def as_options(settings: str, setup: Setup) -> str:
    """Keys of a recipe with their values, as options of the benchmark."""
    words = []
    for one in settings.split():
        key, _, value = one.partition("=")
        section, _, name = key.partition(".")
        if section == "layout":
            axes = {axis: size for axis, size in setup.layout.items() if axis != "stage_layers"} | {
                name: value
            }
            words.append("--layout " + ",".join(f"{axis}={size}".lower() for axis, size in axes.items()))
        elif section == "optimizer":
            words.append(f"--cpu-fraction {value}")
        elif value == "null":
            words.append(f"no {OPTIONS[name]}")
        else:
            words.append(
                f"{OPTIONS[name]} {value.strip('[]')}" if name in OPTIONS else f"--engine {name}={value}"
            )
    return " ".join(words)
